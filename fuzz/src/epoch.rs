//! What another host sends as epochs of a machine.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| onecopy_checkpoint::delta::fuzz::play(input));
