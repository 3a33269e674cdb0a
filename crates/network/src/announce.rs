//! Frames that tell a network at which card an address is: neighbours and bridges that knew another place learn it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::HardwareAddress;

const BROADCAST: [u8; 6] = [0xff; 6];

/// A frame for each address: an ARP request for itself (RFC 5227, an announcement), or an unsolicited neighbour
/// advertisement (RFC 4861, 7.2.6). Without one it is a question that nobody need answer (RFC 903), by which bridges
/// learn where the card is, as QEMU does it.
pub fn announcements(card: HardwareAddress, addresses: &[IpAddr]) -> Vec<Vec<u8>> {
    if addresses.is_empty() {
        return vec![reverse_request(card)];
    }
    let frame = |address: &IpAddr| match address {
        IpAddr::V4(address) => arp(card, *address),
        IpAddr::V6(address) => advertisement(card, *address),
    };
    addresses.iter().map(frame).collect()
}

/// Source: RFC 826; hardware 1 (Ethernet), protocol 0x0800, lengths 6 and 4, operation 1 (request).
fn arp(card: HardwareAddress, address: Ipv4Addr) -> Vec<u8> {
    let own = address.octets();
    let head = [&BROADCAST[..], &card.0, &[0x08, 0x06]].concat();
    [&head[..], &[0, 1, 8, 0, 6, 4, 0, 1], &card.0, &own, &[0; 6], &own].concat()
}

/// Source: RFC 903; as ARP, with its own protocol number 0x8035, operation 3 (reverse request).
fn reverse_request(card: HardwareAddress) -> Vec<u8> {
    let head = [&BROADCAST[..], &card.0, &[0x80, 0x35]].concat();
    [&head[..], &[0, 1, 8, 0, 6, 4, 0, 3], &card.0, &[0; 4], &card.0, &[0; 4]].concat()
}

/// Type 136, flags: override; the option 2 has the card's address. To all nodes, `ff02::1`.
fn advertisement(card: HardwareAddress, address: Ipv6Addr) -> Vec<u8> {
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut message = [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &address.octets(), &[2, 1], &card.0].concat();
    let length = u8::try_from(message.len()).expect("32 bytes");
    let pseudo = [&address.octets()[..], &all_nodes.octets(), &[0, 0, 0, length], &[0, 0, 0, 58], &message].concat();
    let sum = checksum(&pseudo);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    // Version 6, the message's length, ICMPv6, and a hop limit that no router leaves.
    let head = [0x60, 0, 0, 0, 0, length, 58, 255];
    let ethernet = [&[0x33, 0x33, 0, 0, 0, 1][..], &card.0, &[0x86, 0xdd]].concat();
    [&ethernet[..], &head, &address.octets(), &all_nodes.octets(), &message].concat()
}

/// Source: RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("sixteen bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_announced_in_the_words_of_its_version() {
        let card: HardwareAddress = "52:54:00:00:00:01".parse().unwrap();
        let addresses = ["192.0.2.10".parse().unwrap(), "2001:db8::10".parse().unwrap()];
        let [four, six] = <[Vec<u8>; 2]>::try_from(announcements(card, &addresses)).unwrap();
        assert_eq!(four.len(), 42);
        assert_eq!((&four[..6], &four[6..12], &four[12..14]), (&[0xff; 6][..], &card.0[..], &[8, 6][..]));
        assert_eq!((&four[28..32], &four[38..42]), (&[192, 0, 2, 10][..], &[192, 0, 2, 10][..]));
        assert_eq!(six.len(), 14 + 40 + 32);
        let message = &six[54..];
        let pseudo = [&six[22..54], &[0, 0, 0, 32, 0, 0, 0, 58], message].concat();
        assert_eq!(checksum(&pseudo), 0, "whoever sums it with its sum finds nothing");
        assert_eq!(&message[26..], &card.0);
        let [none] = <[Vec<u8>; 1]>::try_from(announcements(card, &[])).unwrap();
        assert_eq!((none.len(), &none[6..12], &none[12..14], none[21]), (42, &card.0[..], &[0x80, 0x35][..], 3));
    }
}
