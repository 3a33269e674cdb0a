use proptest::prelude::*;

use super::*;

/// Bytes from numbers in hexadecimal and texts in quotes, as in a dump.
fn bytes(dump: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, part) in dump.split('"').enumerate() {
        match number % 2 {
            1 => bytes.extend_from_slice(part.as_bytes()),
            _ => bytes.extend(part.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap())),
        }
    }
    bytes
}

const HEAD: &str = r#""QEVM" 00 00 00 03"#;
const CONFIGURATION: &str = r#"07 00 00 00 0b "pc-q35-10.0""#;
const CAPABILITIES: &str = r#"05 1a "configuration/capabilities" 00 00 00 01 00 00 00 01 0f "x-ignore-shared""#;
const START: &str = r#"01 00 00 00 02 03 "ram" 00 00 00 00 00 00 00 04"#;
/// Two blocks, each with its place in the guest.
const SIZES_SENT: &str = r#"00 00 00 00 00 12 00 04
    06 "pc.ram" 00 00 00 00 00 10 00 00 00 00 00 00 00 00 00 00
    07 "pc.bios" 00 00 00 00 00 02 00 00 00 00 00 00 ff fe 00 00
    00 00 00 00 00 00 00 10"#;
const SIZES_TAKEN: &str = r#"00 00 00 00 00 12 00 04
    06 "pc.ram" 00 00 00 00 00 10 00 00
    07 "pc.bios" 00 00 00 00 00 02 00 00
    00 00 00 00 00 00 00 10"#;
const FOOTER: &str = "7e 00 00 00 02";
const COMMAND: &str = "08 00 02 00 04 01 02 03 04";
const FIRST_PAGE: &str = r#"00 00 00 00 00 00 00 08 07 "pc.bios""#;
const LAST: &str = "00 00 00 00 00 00 00 10";
const DEVICES: &str = r#"04 00 00 00 03 05 "timer" 00 00 00 00 00 00 00 02 aa bb 7e 00 00 00 03 00"#;

fn page() -> Vec<u8> {
    (0..4096u32).map(|byte| byte.to_le_bytes()[0] ^ byte.to_le_bytes()[1]).collect()
}

/// As QEMU sends it.
fn sent() -> Vec<u8> {
    [
        bytes(&[HEAD, CONFIGURATION, CAPABILITIES, START, SIZES_SENT, FOOTER, COMMAND, "02 00 00 00 02"].join(" ")),
        bytes(FIRST_PAGE),
        page(),
        bytes(&[LAST, FOOTER, COMMAND, "03 00 00 00 02"].join(" ")),
        bytes(&[r#"00 00 00 00 00 00 10 02 07 "pc.bios" 00"#, "00 00 00 00 00 00 20 22 5a", LAST, FOOTER].join(" ")),
        bytes(DEVICES),
    ]
    .concat()
}

fn devices() -> Vec<u8> {
    bytes(&[HEAD, DEVICES].join(" "))
}

/// The stream that restores a machine is made byte by byte of what the machine has said of itself; whatever the bytes
/// are, they are understood wholly or refused with the place.
///
/// Spec: D6
#[test]
fn t8_a_stream_is_made_byte_by_byte() {
    let prefix = Prefix::parse(&sent()).unwrap();
    let block = |name: &str, bytes| Block { name: name.to_owned(), bytes };
    assert_eq!(prefix.blocks(), [block("pc.ram", 1 << 20), block("pc.bios", 128 << 10)]);
    let expected = [
        bytes(&[HEAD, CONFIGURATION, START, SIZES_TAKEN, FOOTER, "03 00 00 00 02", FIRST_PAGE].join(" ")),
        page(),
        bytes(r#"00 00 00 00 00 00 10 02 07 "pc.bios" 00"#),
        bytes(&["00 00 00 00 00 00 20 22 5a", LAST, FOOTER, DEVICES, r#"06 00 00 00 02 "{}""#].join(" ")),
    ];
    assert_eq!(stream(&prefix, &devices()).unwrap(), expected.concat());
}

/// Spec: D6
#[test]
fn t8_a_stream_that_is_cut_short_anywhere_is_refused() {
    let sent = sent();
    let needed = sent.len() - bytes(DEVICES).len();
    assert!(Prefix::parse(&sent[..needed]).is_ok(), "what follows the memory is not looked at");
    for length in 0..needed {
        assert!(Prefix::parse(&sent[..length]).is_err(), "{length} of {needed} bytes are enough");
    }
    let (prefix, devices) = (Prefix::parse(&sent).unwrap(), devices());
    for length in [0, 7, 8, 9, devices.len() - 1] {
        assert!(stream(&prefix, &devices[..length]).is_err(), "{length} bytes are a device state");
    }
}

/// Spec: D6
#[test]
fn t8_what_is_not_known_is_refused_and_named() {
    // What is there, what is put there, and what is said of it.
    let table: [(&str, &str, &str); 9] = [
        ("00 00 00 03 07", "00 00 00 02 07", "no migration of version 3"),
        (r#""ram" 00 00 00 00 00 00 00 04"#, r#""ram" 00 00 00 00 00 00 00 05"#, "version 5"),
        (r#"03 "ram""#, r#"03 "rom""#, "not the memory's"),
        ("00 00 00 00 00 12 00 04", "00 00 00 00 00 11 00 04", "larger than the memory"),
        ("00 00 00 00 00 12 00 04", "00 00 00 00 00 12 00 05", "does not begin with its sizes"),
        (r#""configuration/cap"#, r#""configuration/cat"#, "subsection"),
        ("00 00 00 00 00 00 20 22", "00 00 00 00 00 02 00 22", "which ends before"),
        ("00 00 00 00 00 00 20 22", "00 00 00 00 00 00 22 20", "with flags 0x200"),
        ("7e 00 00 00 02", "7e 00 00 00 03", "footer of section 3"),
    ];
    for (found, put, said) in table {
        // A quote that is open on both sides: only its bytes count.
        let closed =
            |text: &str| bytes(&if text.matches('"').count() % 2 == 1 { format!("{text}\"") } else { text.to_owned() });
        let (found, put, mut changed) = (closed(found), closed(put), sent());
        let at = changed.windows(found.len()).position(|window| window == found).expect("it is there");
        changed.splice(at..at + found.len(), put);
        let error = Prefix::parse(&changed).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said:?}");
    }
}

proptest! {
    /// Spec: D6
    #[test]
    fn t8_any_bytes_are_a_prefix_or_an_error(tail in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Prefix::parse(&tail);
        let _ = Prefix::parse(&[bytes(HEAD), tail.clone()].concat());
        let begin = bytes(&[HEAD, CONFIGURATION, START].join(" "));
        let _ = Prefix::parse(&[begin, tail.clone()].concat());
        let memory = bytes(&[HEAD, CONFIGURATION, START, SIZES_SENT, FOOTER].join(" "));
        let _ = Prefix::parse(&[memory, tail.clone()].concat());
        let _ = stream(&Prefix::parse(&sent()).unwrap(), &[bytes(HEAD), tail].concat());
    }

    /// Spec: D6
    #[test]
    fn t8_a_changed_byte_is_a_prefix_or_an_error(at in 0usize..4600, byte in any::<u8>()) {
        let mut changed = sent();
        let at = at % changed.len();
        changed[at] = byte;
        if let Ok(prefix) = Prefix::parse(&changed) {
            stream(&prefix, &devices()).unwrap();
        }
    }
}
