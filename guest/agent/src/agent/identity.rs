//! What tells a guest from another one that was copied from the same memory or disk.

use super::process::{Program, run};
use super::replies::{Result, failed, malformed};
use crate::protocol::Identity;
use std::fs::{create_dir_all, write};
use std::net::IpAddr;
use std::time::Duration;

/// The first network card: the guest's names are the kernel's.
const CARD: &str = "eth0";
/// What the guest's first process reads at the next boot.
const KEPT: &str = "/etc/onecopy";
const TIMEOUT: Duration = Duration::from_secs(30);
/// Of a host's name (RFC 1123, one label and the domains behind it as far as the kernel takes them).
const HOSTNAME_BYTES_MAX: usize = 63;

/// Checks all of it first: half an identity is worse than none.
pub(crate) fn set(identity: &Identity) -> Result<()> {
    check(identity)?;
    create_dir_all(KEPT).map_err(|error| failed(KEPT, error))?;
    if let Some(name) = &identity.hostname {
        put("/proc/sys/kernel/hostname", name)?;
        put("/etc/hostname", &format!("{name}\n"))?;
        put(&format!("{KEPT}/hostname"), &format!("{name}\n"))?;
    }
    if let Some(machine_id) = &identity.machine_id {
        put("/etc/machine-id", &format!("{machine_id}\n"))?;
    }
    if let Some(mac) = &identity.mac {
        ip(&["link", "set", "dev", CARD, "address", mac])?;
    }
    if let Some(address) = &identity.address {
        ip(&["address", "flush", "dev", CARD])?;
        ip(&["address", "replace", address, "dev", CARD])?;
        ip(&["link", "set", CARD, "up"])?;
        put(&format!("{KEPT}/address"), &format!("{address}\n"))?;
        if let Some(gateway) = &identity.gateway {
            ip(&["route", "replace", "default", "via", gateway])?;
            put(&format!("{KEPT}/gateway"), &format!("{gateway}\n"))?;
        }
    }
    Ok(())
}

fn check(identity: &Identity) -> Result<()> {
    let fits = |value: &Option<String>, test: fn(&str) -> bool| value.as_deref().is_none_or(test);
    for (fits, what) in [
        (fits(&identity.hostname, is_hostname), "hostname"),
        (fits(&identity.machine_id, is_machine_id), "machine_id"),
        (fits(&identity.mac, is_mac), "mac"),
        (fits(&identity.address, is_address), "address"),
        (fits(&identity.gateway, |text| text.parse::<IpAddr>().is_ok()), "gateway"),
    ] {
        if !fits {
            return Err(malformed(format!("{what} is none")));
        }
    }
    if identity.gateway.is_some() && identity.address.is_none() {
        return Err(malformed("a gateway goes with an address"));
    }
    Ok(())
}

fn is_hostname(text: &str) -> bool {
    let bytes = text.as_bytes();
    (1..=HOSTNAME_BYTES_MAX).contains(&bytes.len())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(byte))
        && bytes[0].is_ascii_alphanumeric()
}

fn is_machine_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn is_mac(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    parts.len() == 6 && parts.iter().all(|part| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn is_address(text: &str) -> bool {
    let Some((address, prefix)) = text.split_once('/') else { return false };
    let bits_max = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    prefix.parse::<u8>().is_ok_and(|bits| bits <= bits_max)
}

fn put(path: &str, text: &str) -> Result<()> {
    write(path, text).map_err(|error| failed(&format!("writing {path}"), error))
}

fn ip(arguments: &[&str]) -> Result<()> {
    let program = [&["ip"], arguments].concat();
    let ended = run(&Program::new(&program), TIMEOUT)?;
    if ended.status == Some(0) { Ok(()) } else { Err(failed(&program.join(" "), ended.stderr.to_text())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_checked_before_anything_is_changed() {
        let some = |text: &str| Some(text.to_string());
        let good = Identity {
            hostname: some("replica-2.example"),
            machine_id: some("0123456789abcdef0123456789abcdef"),
            mac: some("52:54:00:12:34:56"),
            address: some("10.0.2.16/24"),
            gateway: some("10.0.2.2"),
        };
        check(&good).unwrap();
        check(&Identity::default()).unwrap();
        for bad in [
            Identity { hostname: some(""), ..good.clone() },
            Identity { hostname: some("a;reboot"), ..good.clone() },
            Identity { hostname: some(&"a".repeat(64)), ..good.clone() },
            Identity { machine_id: some("0123456789ABCDEF0123456789ABCDEF"), ..good.clone() },
            Identity { mac: some("52:54:00:12:34"), ..good.clone() },
            Identity { address: some("10.0.2.16"), ..good.clone() },
            Identity { address: some("10.0.2.16/33"), ..good.clone() },
            Identity { gateway: some("there"), ..good.clone() },
            Identity { address: None, ..good.clone() },
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }
}
