//! The four messages of an exchange, read by total functions: any bytes give a value or an error.
//!
//! Grammar: RFC 5802, section 7, as strict as PostgreSQL and in two points stricter: attributes that mean something
//! may not come twice, and base64 must be canonical.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::error::{AuthenticationError, MESSAGE_BYTES_MAX};
use super::keys::Key;

const CLIENT_FIRST: &str = "client-first";
pub(super) const SERVER_FIRST: &str = "server-first";
pub(super) const CLIENT_FINAL: &str = "client-final";
const SERVER_FINAL: &str = "server-final";

/// What the server side needs of client-first. The user name in it is ignored: the start-up packet's counts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientFirst<'a> {
    /// The gs2 header, `n,,` or `y,,`: client-final must repeat it in base64.
    pub(super) gs2_header: &'a [u8],
    /// All that follows the header; it goes into the signed text.
    pub(super) bare: &'a [u8],
    pub(super) nonce: &'a [u8],
}

/// What the client side needs of server-first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServerFirst<'a> {
    pub(super) nonce: &'a [u8],
    pub(super) salt: Vec<u8>,
    pub(super) iterations: u32,
}

/// What the server side needs of client-final.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientFinal<'a> {
    /// The gs2 header as client-final repeats it, decoded.
    pub(super) gs2_header: Vec<u8>,
    pub(super) nonce: &'a [u8],
    /// The message up to and without `,p=`; it goes into the signed text.
    pub(super) without_proof: &'a [u8],
    pub(super) proof: Key,
}

/// Reads client-first: `n,,n=,r=NONCE`.
pub(super) fn parse_client_first(input: &[u8]) -> Result<ClientFirst<'_>, AuthenticationError> {
    let mut attributes = Attributes::new(CLIENT_FIRST, input)?;
    match input.first() {
        Some(b'n' | b'y') => {}
        Some(b'p') => return Err(AuthenticationError::ChannelBindingRequired),
        _ => return Err(attributes.malformed("it must begin with a channel-binding flag")),
    }
    match input.get(1..3) {
        Some(b",,") => {}
        Some(b",a") => return Err(AuthenticationError::AuthorizationIdentity),
        _ => return Err(attributes.malformed("the channel-binding flag must be followed by two commas")),
    }
    let (gs2_header, bare) = input.split_at(3);
    attributes.rest = Some(bare);
    attributes.refuse_mandatory_extension()?;
    attributes.value(b'n')?;
    let nonce = attributes.nonce()?;
    while attributes.rest.is_some() {
        attributes.extension(b"anrmcp")?;
    }
    Ok(ClientFirst { gs2_header, bare, nonce })
}

/// Reads server-first: `r=NONCE,s=SALT,i=ITERATIONS`.
pub(super) fn parse_server_first(input: &[u8]) -> Result<ServerFirst<'_>, AuthenticationError> {
    let mut attributes = Attributes::new(SERVER_FIRST, input)?;
    attributes.refuse_mandatory_extension()?;
    let nonce = attributes.nonce()?;
    let salt = attributes.base64(b's')?;
    if salt.is_empty() {
        return Err(attributes.malformed("the salt is empty"));
    }
    let iterations = parse_iterations(attributes.value(b'i')?)
        .ok_or_else(|| attributes.malformed("the iteration count is not a positive number"))?;
    attributes.end()?;
    Ok(ServerFirst { nonce, salt, iterations })
}

/// Reads client-final: `c=biws,r=NONCE,p=PROOF`.
pub(super) fn parse_client_final(input: &[u8]) -> Result<ClientFinal<'_>, AuthenticationError> {
    let mut attributes = Attributes::new(CLIENT_FINAL, input)?;
    let gs2_header = attributes.base64(b'c')?;
    let nonce = attributes.nonce()?;
    while attributes.rest.is_some_and(|rest| !rest.starts_with(b"p=")) {
        attributes.extension(b"cram")?;
    }
    let proof_bytes = attributes.rest.map_or(0, <[u8]>::len);
    let proof = attributes.key(b'p')?;
    attributes.end()?;
    // The proof is the last attribute and stands after a comma.
    let without_proof = &input[..input.len() - proof_bytes - 1];
    Ok(ClientFinal { gs2_header, nonce, without_proof, proof })
}

/// Reads server-final: `v=SIGNATURE`, or `e=ERROR`, which is an error here as well.
pub(super) fn parse_server_final(input: &[u8]) -> Result<Key, AuthenticationError> {
    let mut attributes = Attributes::new(SERVER_FINAL, input)?;
    if input.starts_with(b"e=") {
        let reason = String::from_utf8_lossy(attributes.value(b'e')?).into_owned();
        return Err(AuthenticationError::RefusedByServer(reason));
    }
    let signature = attributes.key(b'v')?;
    attributes.end()?;
    Ok(signature)
}

/// Reads an iteration count: decimal digits, from 1 to 2^31 - 1 as in PostgreSQL.
pub(super) fn parse_iterations(digits: &[u8]) -> Option<u32> {
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let iterations: u32 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (1..=i32::MAX.unsigned_abs()).contains(&iterations).then_some(iterations)
}

/// Writes bytes in base64, as every message does.
pub(super) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Reads canonical base64.
pub(super) fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// Reads a key of 32 bytes in base64.
pub(super) fn key_from_base64(text: &[u8]) -> Option<Key> {
    Some(Key(from_base64(text)?.try_into().ok()?))
}

/// Walks over `name=value` attributes that are separated by commas.
struct Attributes<'a> {
    message: &'static str,
    /// What follows the last comma; none after the last attribute.
    rest: Option<&'a [u8]>,
}

impl<'a> Attributes<'a> {
    fn new(message: &'static str, input: &'a [u8]) -> Result<Attributes<'a>, AuthenticationError> {
        let attributes = Attributes { message, rest: Some(input) };
        if input.len() > MESSAGE_BYTES_MAX {
            return Err(AuthenticationError::MessageTooLong { message, bytes: input.len() });
        }
        if input.is_empty() {
            return Err(attributes.malformed("it is empty"));
        }
        if input.contains(&0) {
            return Err(attributes.malformed("it holds a zero byte"));
        }
        Ok(attributes)
    }

    fn malformed(&self, reason: &'static str) -> AuthenticationError {
        AuthenticationError::Malformed { message: self.message, reason }
    }

    /// Takes the next attribute, whatever its name.
    fn next(&mut self) -> Result<(u8, &'a [u8]), AuthenticationError> {
        let Some(rest) = self.rest else {
            return Err(self.malformed("an attribute is missing at its end"));
        };
        let [name, b'=', after @ ..] = rest else {
            return Err(self.malformed("an attribute has no name or no equals sign"));
        };
        if !name.is_ascii_alphabetic() {
            return Err(self.malformed("an attribute's name is not a letter"));
        }
        let mut halves = after.splitn(2, |byte| *byte == b',');
        let value = halves.next().unwrap_or_default();
        self.rest = halves.next();
        Ok((*name, value))
    }

    /// Takes the value of the next attribute, which must be `name`.
    fn value(&mut self, name: u8) -> Result<&'a [u8], AuthenticationError> {
        match self.next()? {
            (found, value) if found == name => Ok(value),
            _ => Err(self.malformed("an attribute is missing or out of order")),
        }
    }

    /// Takes one optional extension and ignores it, unless its name is one that has a meaning elsewhere.
    fn extension(&mut self, reserved: &[u8]) -> Result<(), AuthenticationError> {
        let (name, _) = self.next()?;
        if reserved.contains(&name) {
            return Err(self.malformed("an attribute is repeated or out of order"));
        }
        Ok(())
    }

    fn refuse_mandatory_extension(&self) -> Result<(), AuthenticationError> {
        match self.rest {
            Some(rest) if rest.starts_with(b"m=") => Err(AuthenticationError::MandatoryExtension(self.message)),
            _ => Ok(()),
        }
    }

    /// Takes a nonce: printable ASCII without comma, at least one character.
    fn nonce(&mut self) -> Result<&'a [u8], AuthenticationError> {
        let nonce = self.value(b'r')?;
        if nonce.is_empty() || !nonce.iter().all(u8::is_ascii_graphic) {
            return Err(self.malformed("the nonce is empty or not printable"));
        }
        Ok(nonce)
    }

    fn base64(&mut self, name: u8) -> Result<Vec<u8>, AuthenticationError> {
        from_base64(self.value(name)?).ok_or_else(|| self.malformed("an attribute is not base64"))
    }

    fn key(&mut self, name: u8) -> Result<Key, AuthenticationError> {
        key_from_base64(self.value(name)?).ok_or_else(|| self.malformed("a proof is not 32 bytes in base64"))
    }

    fn end(&self) -> Result<(), AuthenticationError> {
        match self.rest {
            None => Ok(()),
            Some(_) => Err(self.malformed("something follows its last attribute")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: &str = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";

    #[test]
    fn client_first_forms() {
        let parsed = parse_client_first(b"y,,n=us=2Cer,r=abc,x=ignored").unwrap();
        assert_eq!(parsed.gs2_header, b"y,,");
        assert_eq!(parsed.bare, b"n=us=2Cer,r=abc,x=ignored");
        assert_eq!(parsed.nonce, b"abc");
        let refused: &[&[u8]] = &[
            b"",
            b"n",
            b"n,",
            b"n,,",
            b"n,,n",
            b"n,,n=",
            b"n,,n=,",
            b"n,,n=,r",
            b"n,,n=,r=",
            b"n,,n=,r=a\x7f",
            b"n,,n=,r=a b",
            b"n,,r=abc,n=",
            b"n,,n=,r=abc,",
            b"n,,n=,r=abc,r=def",
            b"n,,n=,n=,r=abc",
            b"n,,n=,r=abc,n=x",
            b"n,,n=,r=abc,m=x",
            b"n,,n=,r=abc,1=x",
            b"n,,n=,r=abc\0",
            b"x,,n=,r=abc",
            b"n;,n=,r=abc",
            b"n,x,n=,r=abc",
        ];
        for input in refused {
            let error = parse_client_first(input).unwrap_err();
            assert!(matches!(error, AuthenticationError::Malformed { .. }), "{input:?}: {error}");
            assert_eq!(error.sqlstate(), "08P01");
        }
        assert_eq!(
            parse_client_first(b"p=tls-server-end-point,,n=,r=abc"),
            Err(AuthenticationError::ChannelBindingRequired)
        );
        assert_eq!(parse_client_first(b"n,a=admin,n=,r=abc"), Err(AuthenticationError::AuthorizationIdentity));
        assert_eq!(
            parse_client_first(b"n,,m=x,n=,r=abc"),
            Err(AuthenticationError::MandatoryExtension("client-first"))
        );
        let long = [b"n,,n=,r=".as_slice(), &[b'a'; MESSAGE_BYTES_MAX]].concat();
        assert_eq!(
            parse_client_first(&long),
            Err(AuthenticationError::MessageTooLong { message: "client-first", bytes: MESSAGE_BYTES_MAX + 8 })
        );
    }

    #[test]
    fn server_first_forms() {
        let parsed = parse_server_first(b"r=abcdef,s=c2FsdA==,i=4096").unwrap();
        assert_eq!(parsed, ServerFirst { nonce: b"abcdef", salt: b"salt".to_vec(), iterations: 4096 });
        let refused: &[&[u8]] = &[
            b"r=abc",
            b"r=abc,s=c2FsdA==",
            b"r=abc,s=,i=1",
            b"r=abc,s=c2FsdA,i=1",
            b"r=abc,s=c2FsdA==,i=",
            b"r=abc,s=c2FsdA==,i=0",
            b"r=abc,s=c2FsdA==,i=-1",
            b"r=abc,s=c2FsdA==,i=+1",
            b"r=abc,s=c2FsdA==,i=1x",
            b"r=abc,s=c2FsdA==,i=2147483648",
            b"r=abc,s=c2FsdA==,i=99999999999999999999",
            b"r=abc,s=c2FsdA==,i=1,",
            b"r=abc,s=c2FsdA==,i=1,x=y",
            b"s=c2FsdA==,r=abc,i=1",
            b"r=abc,r=abc,s=c2FsdA==,i=1",
        ];
        for input in refused {
            let error = parse_server_first(input).unwrap_err();
            assert!(matches!(error, AuthenticationError::Malformed { .. }), "{input:?}: {error}");
        }
        assert_eq!(
            parse_server_first(b"m=x,r=abc,s=c2FsdA==,i=1"),
            Err(AuthenticationError::MandatoryExtension("server-first"))
        );
    }

    #[test]
    fn client_final_forms() {
        let text = format!("c=biws,r=abc,x=ignored,p={KEY}");
        let parsed = parse_client_final(text.as_bytes()).unwrap();
        assert_eq!(parsed.gs2_header, b"n,,");
        assert_eq!(parsed.nonce, b"abc");
        assert_eq!(parsed.without_proof, b"c=biws,r=abc,x=ignored");
        assert_eq!(to_base64(&parsed.proof.0), KEY);
        let refused = [
            format!("p={KEY}"),
            format!("c=biws,p={KEY}"),
            format!("r=abc,c=biws,p={KEY}"),
            format!("c=biws,r=abc,p={KEY},"),
            format!("c=biws,r=abc,p={KEY},p={KEY}"),
            format!("c=biws,r=abc,r=abc,p={KEY}"),
            format!("c=biws,c=biws,r=abc,p={KEY}"),
            format!("c=biw,r=abc,p={KEY}"),
            "c=biws,r=abc".to_owned(),
            "c=biws,r=abc,".to_owned(),
            "c=biws,r=abc,p=".to_owned(),
            "c=biws,r=abc,p=c2FsdA==".to_owned(),
            format!("c=biws,r=abc,p={}", &KEY[..KEY.len() - 1]),
        ];
        for input in refused {
            let error = parse_client_final(input.as_bytes()).unwrap_err();
            assert!(matches!(error, AuthenticationError::Malformed { .. }), "{input}: {error}");
        }
    }

    #[test]
    fn server_final_forms() {
        assert_eq!(to_base64(&parse_server_final(format!("v={KEY}").as_bytes()).unwrap().0), KEY);
        assert_eq!(
            parse_server_final(b"e=other-error"),
            Err(AuthenticationError::RefusedByServer("other-error".to_owned()))
        );
        for input in ["v=", "v=AAAA", "x=1", "v", &format!("v={KEY},"), &format!("v={KEY},v={KEY}")] {
            let error = parse_server_final(input.as_bytes()).unwrap_err();
            assert!(matches!(error, AuthenticationError::Malformed { .. }), "{input}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(input in proptest::collection::vec(any::<u8>(), 0..1100)) {
            let _ = parse_client_first(&input);
            let _ = parse_server_first(&input);
            let _ = parse_client_final(&input);
            let _ = parse_server_final(&input);
        }

        #[test]
        fn damaged_messages_keep_what_was_signed_inside_the_message(
            position in 0usize..64, byte in any::<u8>(), cut in 0usize..64
        ) {
            let mut input = format!("c=biws,r=abcdefgh,p={KEY}").into_bytes();
            input[position] = byte;
            input.truncate(input.len() - cut);
            if let Ok(parsed) = parse_client_final(&input) {
                prop_assert_eq!(cut, 0);
                prop_assert!(input.starts_with(parsed.without_proof));
                prop_assert!(input[parsed.without_proof.len()..].starts_with(b",p="));
            }
        }
    }
}
