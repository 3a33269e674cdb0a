//! The side that proves: the router towards its servers.

use std::fmt;

use super::error::AuthenticationError;
use super::keys::{Key, ScramKeys};
use super::message::{SERVER_FIRST, ServerFirst, parse_server_final, parse_server_first, to_base64};

/// Random bytes in the client's part of the nonce (`SCRAM_RAW_NONCE_LEN`).
const NONCE_BYTES: usize = 18;

/// The gs2 header: this client does no channel binding.
const GS2_HEADER: &str = "n,,";

/// With what the router logs in to a server.
#[derive(Clone)]
pub enum ScramCredential {
    /// A password, for the router's own role. The first login costs a key derivation; it yields [`ScramKeys`] for the
    /// next ones.
    Password(Vec<u8>),
    /// Keys that a client or an earlier login has proved. They work on servers that hold the same verifier.
    Keys(ScramKeys),
}

impl fmt::Debug for ScramCredential {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScramCredential::Password(_) => formatter.write_str("Password(..)"),
            ScramCredential::Keys(keys) => formatter.debug_tuple("Keys").field(keys).finish(),
        }
    }
}

/// An exchange in which client-first is to be sent and server-first is awaited.
#[derive(Debug)]
pub struct ScramClient {
    credential: ScramCredential,
    pub(super) nonce: String,
    client_first_bare: String,
}

/// An exchange in which client-final is to be sent and server-final is awaited.
#[derive(Debug)]
#[must_use = "the server is not authenticated before its signature is verified"]
pub struct ScramClientFinal {
    keys: ScramKeys,
    server_signature: Key,
}

impl ScramClient {
    /// Begins an exchange with a fresh nonce.
    pub fn new(credential: ScramCredential) -> ScramClient {
        // The user name stays empty, as in libpq: servers take the one of the start-up packet.
        ScramClient::with_nonce(credential, "", to_base64(&rand::random::<[u8; NONCE_BYTES]>()))
    }

    pub(super) fn with_nonce(credential: ScramCredential, user: &str, nonce: String) -> ScramClient {
        let client_first_bare = format!("n={user},r={nonce}");
        ScramClient { credential, nonce, client_first_bare }
    }

    /// The client-first message, to send in SASLInitialResponse under the name [`super::MECHANISM`].
    pub fn client_first(&self) -> String {
        format!("{GS2_HEADER}{}", self.client_first_bare)
    }

    /// Takes the server-first message from AuthenticationSASLContinue and gives the client-final message to send in
    /// SASLResponse. With a password this derives keys, which takes milliseconds and more of one core.
    ///
    /// # Errors
    /// Malformed messages, a nonce that does not extend ours, more than [`super::ITERATIONS_MAX`] iterations, or, with
    /// keys, another salt or iteration count than theirs ([`AuthenticationError::VerifierDiffers`]).
    pub fn client_final(self, server_first: &[u8]) -> Result<(ScramClientFinal, String), AuthenticationError> {
        let parsed = parse_server_first(server_first)?;
        // A nonce to which the server added nothing is an echo, not an answer.
        if !parsed.nonce.starts_with(self.nonce.as_bytes()) || parsed.nonce.len() == self.nonce.len() {
            return Err(AuthenticationError::NonceMismatch(SERVER_FIRST));
        }
        let without_proof =
            format!("c={},r={}", to_base64(GS2_HEADER.as_bytes()), String::from_utf8_lossy(parsed.nonce));
        let signed = [self.client_first_bare.as_bytes(), server_first, without_proof.as_bytes()].join(&b',');
        let keys = keys_for(self.credential, &parsed)?;
        let proof = keys.client_key.xor(&keys.client_key.hash().sign(&signed));
        let client_final = format!("{without_proof},p={}", to_base64(&proof.0));
        let server_signature = keys.server_key.sign(&signed);
        Ok((ScramClientFinal { keys, server_signature }, client_final))
    }
}

impl ScramClientFinal {
    /// Takes the server-final message from AuthenticationSASLFinal. When the server has proved that it knows the
    /// verifier, gives the keys for further logins to servers that hold the same one.
    ///
    /// # Errors
    /// Malformed messages, [`AuthenticationError::RefusedByServer`], or a signature that is not the verifier's
    /// ([`AuthenticationError::WrongServerSignature`]): the connection must then be closed.
    pub fn verify(self, server_final: &[u8]) -> Result<ScramKeys, AuthenticationError> {
        if parse_server_final(server_final)? == self.server_signature {
            Ok(self.keys)
        } else {
            Err(AuthenticationError::WrongServerSignature)
        }
    }
}

/// The keys of a credential for the verifier that the server holds.
fn keys_for(credential: ScramCredential, server_first: &ServerFirst<'_>) -> Result<ScramKeys, AuthenticationError> {
    match credential {
        ScramCredential::Password(password) => {
            ScramKeys::derive(&password, &server_first.salt, server_first.iterations)
        }
        ScramCredential::Keys(keys) if keys.salt == server_first.salt && keys.iterations == server_first.iterations => {
            Ok(keys)
        }
        // The proof would fail anyway; this error says why.
        ScramCredential::Keys(_) => Err(AuthenticationError::VerifierDiffers),
    }
}
