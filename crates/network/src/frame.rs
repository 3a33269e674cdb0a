//! Frames as QEMU's stream has them, and which of them a machine may send.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::NetworkError;

/// Addresses and type: the shortest that can be looked at. Padding to 60 bytes is a wire's business.
pub const FRAME_BYTES_MIN: usize = 14;

/// The longest: 9000 bytes for the network layer, with addresses, type and a VLAN tag. The kernel drops what is longer
/// than the interface that it would leave by.
pub const FRAME_BYTES_MAX: usize = 9018;

/// The longest record of a stream. Source: QEMU, `include/net/net.h`, `NET_BUFSIZE`; a longer one is none of QEMU's.
pub(crate) const RECORD_BYTES_MAX: usize = 4096 + 65536;

/// The length before each frame, big-endian.
pub(crate) const LENGTH_BYTES: usize = 4;

/// The address of a network card.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HardwareAddress(pub [u8; 6]);

impl FromStr for HardwareAddress {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<HardwareAddress, NetworkError> {
        let invalid = || NetworkError::HardwareAddress { text: text.to_owned() };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && !part.starts_with('+')).ok_or_else(invalid)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
        }
        // An odd first number is the address of a group, which sends nothing.
        if parts.next().is_some() || bytes[0] & 1 == 1 || bytes == [0; 6] {
            return Err(invalid());
        }
        Ok(HardwareAddress(bytes))
    }
}

impl HardwareAddress {
    /// One made of any six bytes: locally administered, of one card (IEEE 802).
    pub fn local(mut bytes: [u8; 6]) -> HardwareAddress {
        bytes[0] = bytes[0] & !1 | 2;
        HardwareAddress(bytes)
    }
}

impl fmt::Display for HardwareAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for HardwareAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl TryFrom<String> for HardwareAddress {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<HardwareAddress, NetworkError> {
        text.parse()
    }
}

impl From<HardwareAddress> for String {
    fn from(address: HardwareAddress) -> String {
        address.to_string()
    }
}

/// Why a frame of the machine goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It has no whole head.
    Short,
    /// No Ethernet carries it.
    Long,
    /// It is not from the machine's card.
    ForeignSource,
    /// It is for the bridge itself: no bridge passes such frames on (IEEE 802.1Q, table 8-1).
    ForBridge,
}

/// What a machine may send.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Only from this address, and nothing for the bridge itself; none: whatever an Ethernet carries.
    pub source: Option<HardwareAddress>,
}

impl Filter {
    /// Whether a frame may pass.
    pub fn look(&self, frame: &[u8]) -> Result<(), Refusal> {
        if frame.len() < FRAME_BYTES_MIN {
            return Err(Refusal::Short);
        }
        if frame.len() > FRAME_BYTES_MAX {
            return Err(Refusal::Long);
        }
        let Some(own) = self.source else { return Ok(()) };
        if frame[6..12] != own.0 {
            return Err(Refusal::ForeignSource);
        }
        if frame[..5] == [0x01, 0x80, 0xc2, 0, 0] && frame[5] < 0x10 {
            return Err(Refusal::ForBridge);
        }
        Ok(())
    }
}

/// What comes next in a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record<'a> {
    /// A frame, of any length that QEMU may send; so many bytes of the stream are behind it.
    Frame(&'a [u8], usize),
    /// It is not all there.
    Incomplete,
    /// QEMU sends no such length: nobody knows where the next record begins.
    Broken(u32),
}

/// The first record of `bytes`.
pub(crate) fn record(bytes: &[u8]) -> Record<'_> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Record::Incomplete };
    let length = u32::from_be_bytes(*length);
    match usize::try_from(length) {
        Ok(bytes) if bytes <= RECORD_BYTES_MAX => match rest.get(..bytes) {
            Some(frame) => Record::Frame(frame, LENGTH_BYTES + bytes),
            None => Record::Incomplete,
        },
        _ => Record::Broken(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_one_card_are_taken_and_those_made_are_such() {
        let address: HardwareAddress = "52:54:00:0a:FF:01".parse().unwrap();
        assert_eq!(address.to_string(), "52:54:00:0a:ff:01");
        let long = "52:54:00:00:00:00:00";
        for bad in ["", "52:54:00:00:00", long, "53:54:00:00:00:00", "00:00:00:00:00:00", "+2:54:00:00:00:00", "x"] {
            assert!(bad.parse::<HardwareAddress>().is_err(), "{bad}");
        }
        for first in 0..=255 {
            let made = HardwareAddress::local([first, 0, 0, 0, 0, 0]);
            assert_eq!(made.0[0] & 3, 2);
            assert_eq!(made.to_string().parse::<HardwareAddress>().unwrap(), made);
        }
    }

    /// Whatever length words say, and wherever the bytes end.
    ///
    /// Spec: C5
    #[test]
    fn e1_any_bytes_are_records_incomplete_or_broken() {
        let broken = |length: u32| matches!(record(&length.to_be_bytes()), Record::Broken(found) if found == length);
        let longest = u32::try_from(RECORD_BYTES_MAX).unwrap();
        assert!(broken(longest + 1) && broken(u32::MAX) && broken(1 << 31));
        assert_eq!(record(&longest.to_be_bytes()), Record::Incomplete);
        assert_eq!(record(&0u32.to_be_bytes()), Record::Frame(&[], 4));
        let mut whole = 3u32.to_be_bytes().to_vec();
        whole.extend(b"abcd");
        assert_eq!(record(&whole), Record::Frame(b"abc", 7));
        for length in 0..7 {
            assert_eq!(record(&whole[..length]), Record::Incomplete);
        }
    }

    /// Spec: C5
    #[test]
    fn e2_a_machine_sends_from_its_own_card_and_nothing_for_the_bridge() {
        let own: HardwareAddress = "52:54:00:00:00:01".parse().unwrap();
        let filter = Filter { source: Some(own) };
        let frame = |to: [u8; 6], from: [u8; 6]| [&to[..], &from, &[8, 0], b"content"].concat();
        assert_eq!(filter.look(&frame([0xff; 6], own.0)), Ok(()));
        assert_eq!(filter.look(&frame([0xff; 6], [2; 6])), Err(Refusal::ForeignSource));
        let mut group = own.0;
        group[0] |= 1;
        assert_eq!(filter.look(&frame([0xff; 6], group)), Err(Refusal::ForeignSource));
        for last in [0, 3, 0xe, 0xf] {
            assert_eq!(filter.look(&frame([1, 0x80, 0xc2, 0, 0, last], own.0)), Err(Refusal::ForBridge));
        }
        assert_eq!(filter.look(&frame([1, 0x80, 0xc2, 0, 0, 0x10], own.0)), Ok(()));
        for length in 0..FRAME_BYTES_MIN {
            assert_eq!(filter.look(&vec![0; length]), Err(Refusal::Short));
        }
        let mut long = frame([0xff; 6], own.0);
        long.resize(FRAME_BYTES_MAX, 0);
        assert_eq!(filter.look(&long), Ok(()));
        long.push(0);
        assert_eq!(filter.look(&long), Err(Refusal::Long));
        let open = Filter { source: None };
        assert_eq!(open.look(&frame([1, 0x80, 0xc2, 0, 0, 0], [3; 6])), Ok(()));
        assert_eq!(open.look(&[]), Err(Refusal::Short));
    }
}
