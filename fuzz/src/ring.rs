//! What a guest puts on its disk's ring.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| onecopy_disk::vhost_user::fuzz::play(input));
