//! Addresses of exports, as the NBD project's `doc/uri.md` writes them.

use std::path::PathBuf;

use crate::nbd::Address;
use crate::nbd::protocol::PORT;

/// Which export of which server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) address: Address,
    /// The export's name; "" is the server's default.
    pub(super) export: String,
    pub(super) is_encrypted: bool,
    /// Who must be there, when the connection is encrypted.
    pub(super) server_name: String,
}

impl Url {
    pub(super) fn parse(text: &str) -> Result<Url, String> {
        let wrong = |why: &str| format!("{text:?} is no address of an export: {why}");
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("nbd://HOST:PORT/NAME is one"))?;
        let (is_encrypted, is_unix) = match scheme {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(wrong("it begins with nbd, nbds, nbd+unix or nbds+unix")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export).ok_or_else(|| wrong("the name is not UTF-8"))?;
        let (mut socket, mut server_name) = (None, None);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let value = decode(value).ok_or_else(|| wrong("a parameter is not UTF-8"))?;
            match key {
                "socket" => socket = Some(value),
                "tls-hostname" => server_name = Some(value),
                // A parameter that we ignored might have been meant to protect something.
                _ => return Err(wrong(&format!("unknown parameter {key:?}"))),
            }
        }
        let (address, host) = if is_unix {
            let socket = socket.filter(|path| !path.is_empty()).ok_or_else(|| wrong("it needs ?socket=PATH"))?;
            (Address::Unix(PathBuf::from(socket)), "localhost".to_owned())
        } else {
            if authority.contains('@') {
                return Err(wrong("users are not known here"));
            }
            let (host, port) = host_and_port(authority).ok_or_else(|| wrong("it needs a host"))?;
            (Address::Tcp(format!("{host}:{port}")), host.trim_matches(['[', ']']).to_owned())
        };
        Ok(Url { address, export, is_encrypted, server_name: server_name.unwrap_or(host) })
    }
}

/// `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`.
fn host_and_port(authority: &str) -> Option<(&str, u16)> {
    let bracket = authority.rfind(']').map_or(0, |at| at + 1);
    let (host, port) = match authority[bracket..].find(':') {
        Some(colon) => {
            let (host, port) = authority.split_at(bracket + colon);
            (host, port[1..].parse().ok()?)
        }
        None => (authority, PORT),
    };
    let is_whole = bracket == 0 || (host.starts_with('[') && host.ends_with(']'));
    (!host.is_empty() && is_whole).then_some((host, port))
}

/// Percent-decodes (RFC 3986).
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        if *first == b'%' {
            let digits = behind.get(..2)?;
            let digits = std::str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?);
            rest = &behind[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_of_exports_are_read() {
        let cases = [
            ("nbd://h:1/disk", "h:1", "disk", false, "h"),
            ("nbd://h", "h:10809", "", false, "h"),
            ("nbd://h/", "h:10809", "", false, "h"),
            ("nbd://h//disk", "h:10809", "/disk", false, "h"),
            ("nbds://[::1]:2/snapshot/a%20b", "[::1]:2", "snapshot/a b", true, "::1"),
            ("nbds://[::1]/x", "[::1]:10809", "x", true, "::1"),
            ("nbd+unix:///disk?socket=/run/s%3f", "unix:/run/s?", "disk", false, "localhost"),
            ("nbds+unix:///?socket=s&tls-hostname=a.b", "unix:s", "", true, "a.b"),
        ];
        for (text, address, export, is_encrypted, server_name) in cases {
            let url = Url::parse(text).unwrap();
            assert_eq!((url.address.to_string().as_str(), url.export.as_str()), (address, export), "{text}");
            assert_eq!((url.is_encrypted, url.server_name.as_str()), (is_encrypted, server_name), "{text}");
        }
        for text in [
            "h:1/disk",
            "http://h/",
            "nbd:///x",
            "nbd+unix:///x",
            "nbd+unix:///x?socket=",
            "nbd://h:99999/",
            "nbd://u@h/",
            "nbd://h/%ff",
            "nbd://h/%4",
            "nbd://h/%+1",
            "nbd://[::1/x",
            "nbds://h/?tls-type=anon",
        ] {
            assert!(Url::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_an_address_or_an_error(text in ".{0,80}", tail in "[a-z0-9:/?&=%@\\[\\]+.]{0,60}") {
            let _ = Url::parse(&text);
            let _ = Url::parse(&format!("nbd://{tail}"));
            let _ = Url::parse(&format!("nbds+unix://{tail}"));
        }
    }
}
