//! What a server stores of a password: `pg_authid.rolpassword`.

use std::fmt;

use super::MECHANISM;
use super::error::AuthenticationError;
use super::keys::{Key, ScramKeys, sign};
use super::message::{from_base64, key_from_base64, parse_iterations, to_base64};

/// Longest stored password that is looked at, in bytes; PostgreSQL's own limit is 512.
pub const VERIFIER_BYTES_MAX: usize = 1024;

/// Iterations that a mock verifier shows: PostgreSQL's default, so the mock looks like any other role.
const MOCK_ITERATIONS: u32 = 4096;

/// Bytes of salt that a mock verifier shows (`SCRAM_DEFAULT_SALT_LEN`).
const MOCK_SALT_BYTES: usize = 16;

/// What verifies a password, and cannot be turned back into what proves it.
#[derive(Clone)]
pub struct ScramVerifier {
    pub(super) iterations: u32,
    pub(super) salt: Vec<u8>,
    pub(super) stored_key: Key,
    pub(super) server_key: Key,
    /// No proof is accepted, whatever it is.
    pub(super) doomed: bool,
}

impl fmt::Debug for ScramVerifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing that tells a mock from a real one, either: this may end up in a log that many read.
        formatter.debug_struct("ScramVerifier").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

/// What the router keeps to itself so that its mock salts can be neither foreseen nor told from real ones.
#[derive(Clone)]
pub struct MockSecret([u8; 32]);

impl fmt::Debug for MockSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("MockSecret(..)")
    }
}

impl MockSecret {
    /// A secret from bytes that are kept somewhere, so that mock salts stay the same across restarts: a role whose
    /// salt changes when the router restarts would show that it does not exist.
    pub fn new(bytes: [u8; 32]) -> MockSecret {
        MockSecret(bytes)
    }

    /// A secret for the life of this process.
    pub fn random() -> MockSecret {
        MockSecret(rand::random())
    }
}

impl ScramVerifier {
    /// Reads `SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>` as `pg_authid.rolpassword` holds it; an SQL
    /// null is the empty text here.
    ///
    /// # Errors
    /// [`AuthenticationError::NoPassword`], [`AuthenticationError::Md5Verifier`] and
    /// [`AuthenticationError::MalformedVerifier`], each with its remedy.
    pub fn parse(stored: &str) -> Result<ScramVerifier, AuthenticationError> {
        use AuthenticationError::MalformedVerifier;

        if stored.is_empty() {
            return Err(AuthenticationError::NoPassword);
        }
        if stored.len() > VERIFIER_BYTES_MAX {
            return Err(MalformedVerifier("too long"));
        }
        // As PostgreSQL tells the forms apart (get_password_type): "md5" and 32 hexadecimal digits.
        if let Some(digest) = stored.strip_prefix("md5")
            && digest.len() == 32
            && digest.bytes().all(|byte| byte.is_ascii_hexdigit())
        {
            return Err(AuthenticationError::Md5Verifier);
        }
        let (mechanism, rest) = stored.split_once('$').ok_or(MalformedVerifier("no mechanism"))?;
        if mechanism != MECHANISM {
            return Err(MalformedVerifier("another mechanism"));
        }
        let (parameters, keys) = rest.split_once('$').ok_or(MalformedVerifier("no keys"))?;
        let (iterations, salt) = parameters.split_once(':').ok_or(MalformedVerifier("no salt"))?;
        let (stored_key, server_key) = keys.split_once(':').ok_or(MalformedVerifier("no server key"))?;
        Ok(ScramVerifier {
            iterations: parse_iterations(iterations.as_bytes()).ok_or(MalformedVerifier("bad iteration count"))?,
            salt: from_base64(salt.as_bytes()).filter(|salt| !salt.is_empty()).ok_or(MalformedVerifier("bad salt"))?,
            stored_key: key_from_base64(stored_key.as_bytes()).ok_or(MalformedVerifier("bad stored key"))?,
            server_key: key_from_base64(server_key.as_bytes()).ok_or(MalformedVerifier("bad server key"))?,
            doomed: false,
        })
    }

    /// A verifier for a role that does not exist or has no SCRAM password: its exchange runs like any other and fails
    /// at the end like a wrong password (28P01), so a client cannot find out which roles exist.
    ///
    /// The salt is a function of the secret and the role's name, because a real one stays the same as well
    /// (`mock_scram_secret` in PostgreSQL).
    pub fn mock(secret: &MockSecret, user: &str) -> ScramVerifier {
        let salt = sign(&secret.0, &[user.as_bytes()]);
        ScramVerifier {
            iterations: MOCK_ITERATIONS,
            salt: salt.0[..MOCK_SALT_BYTES].to_vec(),
            stored_key: Key([0; 32]),
            server_key: Key([0; 32]),
            doomed: true,
        }
    }

    /// The text that `CREATE ROLE ... PASSWORD '...'` stores unchanged, from a password of which PostgreSQL then
    /// never sees more than this.
    ///
    /// # Errors
    /// [`AuthenticationError::TooManyIterations`] beyond [`super::ITERATIONS_MAX`].
    pub fn encode(password: &[u8], salt: &[u8], iterations: u32) -> Result<String, AuthenticationError> {
        let keys = ScramKeys::derive(password, salt, iterations)?;
        Ok(format!(
            "{MECHANISM}${iterations}:{}${}:{}",
            to_base64(salt),
            to_base64(&keys.client_key.hash().0),
            to_base64(&keys.server_key.0)
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The verifier of the user in RFC 7677, section 3.
    const PENCIL: &str = "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$\
        WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU=";

    #[test]
    fn verifier_of_the_published_vector() {
        let salt = from_base64(b"W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        assert_eq!(ScramVerifier::encode(b"pencil", &salt, 4096).unwrap(), PENCIL);
        let verifier = ScramVerifier::parse(PENCIL).unwrap();
        assert_eq!(verifier.iterations, 4096);
        assert_eq!(verifier.salt, salt);
        assert!(!verifier.doomed);
    }

    #[test]
    fn other_forms_have_named_errors() {
        assert_eq!(ScramVerifier::parse("").unwrap_err(), AuthenticationError::NoPassword);
        let md5 = "md5".to_owned() + &"0123456789abcdef".repeat(2);
        assert_eq!(ScramVerifier::parse(&md5).unwrap_err(), AuthenticationError::Md5Verifier);
        let malformed = [
            "md5".to_owned(),
            "plain".to_owned(),
            PENCIL.replace("256", "512"),
            PENCIL.replace("4096", "0"),
            PENCIL.replace("4096", "-4096"),
            PENCIL.replace("4096:", "4096"),
            PENCIL.replace("W22ZaJ0SNY7soEsUEjb6gQ==", ""),
            PENCIL.replace("gQ==", "gQ="),
            PENCIL.replace("qY=:", "qY=$"),
            PENCIL.replace("qY=:", "="),
            format!("{PENCIL}:x"),
            format!("{PENCIL}A"),
            "SCRAM-SHA-256$".to_owned(),
            "SCRAM-SHA-256$1:c2FsdA==".to_owned(),
            "x".repeat(VERIFIER_BYTES_MAX + 1),
        ];
        for stored in malformed {
            let error = ScramVerifier::parse(&stored).unwrap_err();
            assert!(matches!(error, AuthenticationError::MalformedVerifier(_)), "{stored}: {error}");
            assert_eq!(error.sqlstate(), "28P01");
        }
    }

    #[test]
    fn mock_salts_are_stable_for_a_user_and_differ_between_users_and_secrets() {
        let secret = MockSecret::new([7; 32]);
        let salt = |secret: &MockSecret, user| ScramVerifier::mock(secret, user).salt;
        assert_eq!(salt(&secret, "nobody"), salt(&secret, "nobody"));
        assert_eq!(salt(&secret, "nobody").len(), MOCK_SALT_BYTES);
        assert_ne!(salt(&secret, "nobody"), salt(&secret, "no one"));
        assert_ne!(salt(&secret, "nobody"), salt(&MockSecret::random(), "nobody"));
    }

    #[test]
    fn debug_shows_no_secret() {
        let keys = ScramKeys::derive(b"pencil", b"salt", 1).unwrap();
        let verifier = ScramVerifier::parse(PENCIL).unwrap();
        assert_eq!(format!("{verifier:?}"), "ScramVerifier { iterations: 4096, .. }");
        assert_eq!(format!("{keys:?}"), "ScramKeys { iterations: 1, .. }");
        assert_eq!(format!("{:?}", MockSecret::new([7; 32])), "MockSecret(..)");
        assert_eq!(format!("{:?}", Key([7; 32])), "Key(..)");
    }

    proptest! {
        #[test]
        fn any_stored_text_gives_a_verifier_or_an_error(stored in ".{0,300}") {
            let _ = ScramVerifier::parse(&stored);
            let _ = ScramVerifier::parse(&format!("SCRAM-SHA-256${stored}"));
        }
    }
}
