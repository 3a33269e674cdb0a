//! A machine's network: QEMU's own, or a card on a bridge of the host.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::str::FromStr;

use onecopy_network::{HardwareAddress, check_name};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::MachineError;

/// What no address is said by, to the guest's first process.
const NONE: &str = "none";

/// A card on a bridge: the table `[network]` of `machine.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BridgedNetwork {
    /// The bridge, an interface of the namespace in which the machine is started.
    pub bridge: String,
    /// The card's address; none: one that is made of the machine's directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<HardwareAddress>,
    /// The guest's address; none: the guest finds one by itself, as by DHCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<InterfaceAddress>,
    /// Where the guest sends what is for other networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// The guest may send from its card's address alone, and nothing for the bridge itself.
    #[serde(default = "is_filtered_default", skip_serializing_if = "Clone::clone")]
    pub filter: bool,
}

fn is_filtered_default() -> bool {
    true
}

/// An address and how many of its bits are the network's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InterfaceAddress {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub bits: u8,
}

impl FromStr for InterfaceAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<InterfaceAddress, String> {
        let parts = text.split_once('/').and_then(|(address, bits)| Some((address.parse().ok()?, bits.parse().ok()?)));
        let Some((address, bits)) = parts else {
            return Err(format!("{text:?} is no address with its network's bits, such as 192.0.2.10/24"));
        };
        let bits_max = if matches!(address, IpAddr::V4(_)) { 32 } else { 128 };
        if !(1..=bits_max).contains(&bits) || address.is_unspecified() || address.is_multicast() {
            return Err(format!("{text:?} is no address that an interface can have"));
        }
        Ok(InterfaceAddress { address, bits })
    }
}

impl InterfaceAddress {
    /// Whether another address is in the same network.
    fn is_beside(&self, other: IpAddr) -> bool {
        let is_same = |own: u128, other: u128, all: u8| (own ^ other) >> (all - self.bits).min(127) == 0;
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => is_same(own.to_bits().into(), other.to_bits().into(), 32),
            (IpAddr::V6(own), IpAddr::V6(other)) => is_same(own.to_bits(), other.to_bits(), 128),
            _ => false,
        }
    }
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.address, self.bits)
    }
}

impl TryFrom<String> for InterfaceAddress {
    type Error = String;

    fn try_from(text: String) -> Result<InterfaceAddress, String> {
        text.parse()
    }
}

impl From<InterfaceAddress> for String {
    fn from(address: InterfaceAddress) -> String {
        address.to_string()
    }
}

/// What `--network` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkChoice {
    /// QEMU's own network.
    User,
    /// A card on a bridge.
    Bridged(BridgedNetwork),
}

impl FromStr for NetworkChoice {
    type Err = String;

    /// Understands `user` and `bridge=NAME[,mac=..][,address=..][,gateway=..][,filter=on|off]`.
    fn from_str(text: &str) -> Result<NetworkChoice, String> {
        if text == "user" {
            return Ok(NetworkChoice::User);
        }
        let mut network =
            BridgedNetwork { bridge: String::new(), mac: None, address: None, gateway: None, filter: true };
        for word in text.split(',') {
            match word.split_once('=') {
                Some(("bridge", name)) => name.clone_into(&mut network.bridge),
                Some(("mac", mac)) => network.mac = Some(mac.parse().map_err(|error| format!("{error}"))?),
                Some(("address", address)) => network.address = Some(address.parse()?),
                Some(("gateway", gateway)) => {
                    let gateway = gateway.parse().map_err(|_| format!("{gateway:?} is no address of a gateway"))?;
                    network.gateway = Some(gateway);
                }
                Some(("filter", word @ ("on" | "off"))) => network.filter = word == "on",
                _ => {
                    return Err(format!(
                        "{word:?} is not understood; it is user, or \
                         bridge=NAME[,mac=..][,address=ADDRESS/BITS][,gateway=ADDRESS][,filter=on|off]"
                    ));
                }
            }
        }
        network.check()?;
        Ok(NetworkChoice::Bridged(network))
    }
}

impl BridgedNetwork {
    /// Refuses what no machine can have, with the reason.
    pub(crate) fn check(&self) -> Result<(), String> {
        check_name(&self.bridge).map_err(|error| error.to_string())?;
        let Some(gateway) = self.gateway else { return Ok(()) };
        match self.address {
            None => Err("a gateway goes with an address: whoever gives the guest its address gives it both".to_owned()),
            Some(own) if !own.is_beside(gateway) || own.address == gateway => {
                Err(format!("the gateway {gateway} is no other address in the network of {own}"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Refuses machines on a bridge where nobody could plug them in.
    ///
    /// # Errors
    /// [`MachineError::InvalidConfiguration`].
    pub(crate) fn refuse_elsewhere() -> Result<(), MachineError> {
        let invalid = |reason: &str| Err(MachineError::InvalidConfiguration { reason: reason.to_owned() });
        if !rustix::process::geteuid().is_root() {
            return invalid("a machine on a bridge is started by root alone, who may make its interface");
        }
        match Path::new("/dev/net/tun").exists() {
            true => Ok(()),
            false => invalid("a machine on a bridge needs /dev/net/tun, which is not there; `modprobe tun` makes it"),
        }
    }

    /// Whether its bridge is there, in this namespace.
    ///
    /// # Errors
    /// Why not.
    pub fn check_bridge(&self) -> Result<(), String> {
        onecopy_network::check_bridge(&self.bridge).map_err(|error| error.to_string())
    }

    /// What the guest's first process is told on the kernel's command line.
    pub(crate) fn kernel_arguments(&self) -> String {
        let address = self.address.map_or_else(|| NONE.to_owned(), |address| address.to_string());
        let gateway = self.gateway.map_or_else(|| NONE.to_owned(), |gateway| gateway.to_string());
        format!(" onecopy.address={address} onecopy.gateway={gateway}")
    }

    /// The card of the machine in a directory.
    pub fn card(&self, root: &Path) -> HardwareAddress {
        self.mac.unwrap_or_else(|| made_address(root))
    }
}

/// A card's address: the same at each start, another one for each machine of a host, locally administered (IEEE 802).
pub(crate) fn made_address(root: &Path) -> HardwareAddress {
    let digest = Sha256::digest(root.as_os_str().as_encoded_bytes());
    HardwareAddress([0x52, 0x54, 0, digest[0], digest[1], digest[2]])
}

/// The name of a machine's interface: nobody else's.
pub(crate) fn interface_name(root: &Path) -> String {
    let digest = Sha256::digest(root.as_os_str().as_encoded_bytes());
    let digits: Vec<String> = digest[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("oc{}", digits.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bridged(text: &str) -> Result<BridgedNetwork, String> {
        match text.parse()? {
            NetworkChoice::Bridged(network) => Ok(network),
            NetworkChoice::User => Err("QEMU's own".to_owned()),
        }
    }

    #[test]
    fn what_a_network_is_said_to_be_is_understood_whole_or_refused_with_the_word() {
        assert_eq!("user".parse(), Ok(NetworkChoice::User));
        let whole = "bridge=br0,mac=52:54:00:00:00:07,address=192.0.2.10/24,gateway=192.0.2.1,filter=off";
        let network = bridged(whole).unwrap();
        assert_eq!(network.kernel_arguments(), " onecopy.address=192.0.2.10/24 onecopy.gateway=192.0.2.1");
        assert_eq!((network.mac.unwrap().to_string(), network.filter), ("52:54:00:00:00:07".to_owned(), false));
        let found = toml::from_str::<BridgedNetwork>(&toml::to_string(&network).unwrap()).unwrap();
        assert_eq!(found, network);
        let short = bridged("bridge=br0").unwrap();
        assert!(short.filter);
        assert_eq!(short.kernel_arguments(), " onecopy.address=none onecopy.gateway=none");
        assert_eq!(toml::from_str::<BridgedNetwork>(&toml::to_string(&short).unwrap()).unwrap(), short);
        for (wrong, said) in [
            ("", "bridge=NAME"),
            ("bridge=", "no name of a network interface"),
            ("bridge=a/b", "no name of a network interface"),
            ("mac=52:54:00:00:00:07", "no name of a network interface"),
            ("bridge=br0,mac=01:00:00:00:00:00", "no hardware address"),
            ("bridge=br0,address=192.0.2.10", "192.0.2.10/24"),
            ("bridge=br0,address=192.0.2.10/33", "can have"),
            ("bridge=br0,address=0.0.0.0/8", "can have"),
            ("bridge=br0,address=ff02::1/64", "can have"),
            ("bridge=br0,gateway=192.0.2.1", "goes with an address"),
            ("bridge=br0,address=192.0.2.10/24,gateway=192.0.3.1", "no other address"),
            ("bridge=br0,address=192.0.2.10/24,gateway=192.0.2.10", "no other address"),
            ("bridge=br0,address=192.0.2.10/24,gateway=fe80::1", "no other address"),
            ("bridge=br0,filter=no", "filter=on|off"),
            ("bridge=br0,vlan=7", "vlan=7"),
        ] {
            let error = bridged(wrong).unwrap_err();
            assert!(error.contains(said), "{wrong}: {error}");
        }
        bridged("bridge=br0,address=2001:db8::10/64,gateway=2001:db8::1").unwrap();
        bridged("bridge=br0,address=192.0.2.10/32,gateway=192.0.2.1").unwrap_err();
    }

    #[test]
    fn interfaces_and_cards_of_machines_are_each_their_own() {
        let [first, second] = ["/m/first", "/m/second"].map(Path::new);
        assert_ne!(interface_name(first), interface_name(second));
        check_name(&interface_name(first)).unwrap();
        assert_ne!(made_address(first), made_address(second));
        assert_eq!(made_address(first), made_address(first));
        let network = bridged("bridge=br0").unwrap();
        assert_eq!(network.card(first), made_address(first));
    }
}
