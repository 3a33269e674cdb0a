//! The key schedule of SCRAM-SHA-256 (RFC 5802, section 3): from a password to what proves it.

use std::borrow::Cow;
use std::fmt;

use hmac::digest::CtOutput;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::error::{AuthenticationError, ITERATIONS_MAX};

/// A key of 32 bytes that never shows in `Debug` and compares in constant time.
#[derive(Clone)]
pub(super) struct Key(pub(super) [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(..)")
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        CtOutput::<Hmac<Sha256>>::new(self.0.into()) == CtOutput::new(other.0.into())
    }
}

impl Eq for Key {}

impl Key {
    /// HMAC of `message` under this key.
    pub(super) fn sign(&self, message: &[u8]) -> Key {
        sign(&self.0, &[message])
    }

    /// SHA-256 of this key: the stored key, when this is a client key.
    pub(super) fn hash(&self) -> Key {
        Key(Sha256::digest(self.0).into())
    }

    /// Byte-wise exclusive or: proof and client key turn into each other under the client signature.
    pub(super) fn xor(&self, other: &Key) -> Key {
        Key(std::array::from_fn(|index| self.0[index] ^ other.0[index]))
    }
}

/// HMAC-SHA-256 of `parts`, put together, under a key of any length.
pub(super) fn sign(key: &[u8], parts: &[&[u8]]) -> Key {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    Key(mac.finalize().into_bytes().into())
}

/// What proves a password to servers that hold its verifier, and a server to its client, without the password.
///
/// Two are equal when they prove the same password against the same verifier.
#[derive(Clone, PartialEq, Eq)]
pub struct ScramKeys {
    pub(super) client_key: Key,
    pub(super) server_key: Key,
    pub(super) salt: Vec<u8>,
    pub(super) iterations: u32,
}

impl fmt::Debug for ScramKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ScramKeys").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

impl ScramKeys {
    /// Derives the keys of `password` for a verifier's salt and iteration count. Takes milliseconds and more of
    /// one core: call it where that blocks nobody.
    ///
    /// # Errors
    /// [`AuthenticationError::TooManyIterations`] beyond [`ITERATIONS_MAX`].
    pub fn derive(password: &[u8], salt: &[u8], iterations: u32) -> Result<ScramKeys, AuthenticationError> {
        if iterations > ITERATIONS_MAX {
            return Err(AuthenticationError::TooManyIterations(iterations));
        }
        let salted_password = salted_password(&prepare_password(password), salt, iterations);
        Ok(ScramKeys {
            client_key: salted_password.sign(b"Client Key"),
            server_key: salted_password.sign(b"Server Key"),
            salt: salt.to_vec(),
            iterations,
        })
    }
}

/// PBKDF2 with HMAC-SHA-256 and one block of output (`Hi` of RFC 5802).
fn salted_password(password: &[u8], salt: &[u8], iterations: u32) -> Key {
    // The two inner blocks of HMAC depend on the key alone; cloning this state saves hashing them every round.
    let keyed = Hmac::<Sha256>::new_from_slice(password).expect("HMAC takes keys of any length");
    let round = |parts: &[&[u8]]| {
        let mut mac = keyed.clone();
        parts.iter().for_each(|part| mac.update(part));
        Key(mac.finalize().into_bytes().into())
    };
    let mut previous = round(&[salt, &1_u32.to_be_bytes()]);
    let mut output = previous.clone();
    for _ in 1..iterations {
        previous = round(&[&previous.0]);
        output = output.xor(&previous);
    }
    output
}

/// The form of a password that is hashed: SASLprep (RFC 4013) where that is possible, else its own bytes.
///
/// PostgreSQL does the same (`scram_build_secret`): a password that is no UTF-8, or holds prohibited characters, or
/// of which nothing would be left, still works as it is.
fn prepare_password(password: &[u8]) -> Cow<'_, [u8]> {
    match std::str::from_utf8(password).map(stringprep::saslprep) {
        Ok(Ok(Cow::Borrowed(prepared))) => Cow::Borrowed(prepared.as_bytes()),
        Ok(Ok(Cow::Owned(prepared))) if !prepared.is_empty() => Cow::Owned(prepared.into_bytes()),
        _ => Cow::Borrowed(password),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_prepared_as_postgresql_does() {
        let cases: &[(&[u8], &[u8])] = &[
            (b"pencil", b"pencil"),
            (b" two  spaces ", b" two  spaces "),
            ("I\u{AD}X".as_bytes(), b"IX"),
            ("\u{2168}".as_bytes(), b"IX"),
            ("\u{AA}".as_bytes(), b"a"),
            ("a\u{A0}b".as_bytes(), b"a b"),
            // Prohibited, not UTF-8, and nothing left: the bytes as they are.
            (b"\x07bell", b"\x07bell"),
            (b"\xff\xfe", b"\xff\xfe"),
            ("\u{AD}".as_bytes(), "\u{AD}".as_bytes()),
            (b"", b""),
        ];
        for (password, prepared) in cases {
            assert_eq!(&*prepare_password(password), *prepared, "{password:?}");
        }
    }

    #[test]
    fn salted_password_matches_published_pbkdf2_vectors() {
        // RFC 7914, section 11 (first 32 of 64 bytes: PBKDF2's blocks are independent).
        assert_eq!(
            hex(&salted_password(b"passwd", b"salt", 1).0),
            "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc"
        );
        assert_eq!(
            hex(&salted_password(b"Password", b"NaCl", 80_000).0),
            "4ddcd8f60b98be21830cee5ef22701f9641a4418d04c0414aeff08876b34ab56"
        );
    }

    #[test]
    fn derivation_is_bounded() {
        assert_eq!(
            ScramKeys::derive(b"x", b"salt", ITERATIONS_MAX + 1),
            Err(AuthenticationError::TooManyIterations(ITERATIONS_MAX + 1))
        );
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
