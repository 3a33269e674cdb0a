//! The side that verifies: the router towards its clients.

use super::MECHANISM;
use super::error::AuthenticationError;
use super::keys::ScramKeys;
use super::message::{CLIENT_FINAL, parse_client_final, parse_client_first, to_base64};
use super::verifier::ScramVerifier;

/// Random bytes in the server's part of the nonce (`SCRAM_RAW_NONCE_LEN`).
const NONCE_BYTES: usize = 18;

/// Most bytes of a refused mechanism's name that an error repeats.
const MECHANISM_BYTES_SHOWN_MAX: usize = 64;

/// An exchange in which server-first has been sent and client-final is awaited.
#[derive(Debug)]
pub struct ScramServer {
    verifier: ScramVerifier,
    gs2_header: Vec<u8>,
    client_first_bare: Vec<u8>,
    nonce: Vec<u8>,
    server_first: String,
}

impl ScramServer {
    /// Answers the client's SASLInitialResponse: takes the mechanism that it chose and its client-first message, and
    /// gives the server-first message to send in AuthenticationSASLContinue.
    ///
    /// # Errors
    /// Another mechanism than the offered one, and whatever is wrong with the message; the session then ends with
    /// [`AuthenticationError::sqlstate`].
    pub fn start(
        verifier: ScramVerifier,
        mechanism: &[u8],
        client_first: &[u8],
    ) -> Result<(ScramServer, String), AuthenticationError> {
        let nonce = to_base64(&rand::random::<[u8; NONCE_BYTES]>());
        ScramServer::start_with_nonce(verifier, mechanism, client_first, &nonce)
    }

    pub(super) fn start_with_nonce(
        verifier: ScramVerifier,
        mechanism: &[u8],
        client_first: &[u8],
        server_nonce: &str,
    ) -> Result<(ScramServer, String), AuthenticationError> {
        if mechanism != MECHANISM.as_bytes() {
            let shown = &mechanism[..mechanism.len().min(MECHANISM_BYTES_SHOWN_MAX)];
            return Err(AuthenticationError::UnknownMechanism(String::from_utf8_lossy(shown).into_owned()));
        }
        let client_first = parse_client_first(client_first)?;
        let nonce = [client_first.nonce, server_nonce.as_bytes()].concat();
        let server_first =
            format!("r={},s={},i={}", String::from_utf8_lossy(&nonce), to_base64(&verifier.salt), verifier.iterations);
        let server = ScramServer {
            verifier,
            gs2_header: client_first.gs2_header.to_vec(),
            client_first_bare: client_first.bare.to_vec(),
            nonce,
            server_first: server_first.clone(),
        };
        Ok((server, server_first))
    }

    /// Takes the client-final message from SASLResponse. On success gives the server-final message to send in
    /// AuthenticationSASLFinal, and the keys with which the router logs in to servers in the client's name.
    ///
    /// # Errors
    /// [`AuthenticationError::WrongPassword`] when the proof does not hold, or the verifier is a mock; others when the
    /// message is malformed or belongs to another exchange.
    pub fn finish(self, client_final: &[u8]) -> Result<(String, ScramKeys), AuthenticationError> {
        let client_final = parse_client_final(client_final)?;
        if client_final.gs2_header != self.gs2_header {
            return Err(AuthenticationError::ChannelBindingMismatch);
        }
        if client_final.nonce != self.nonce {
            return Err(AuthenticationError::NonceMismatch(CLIENT_FINAL));
        }
        let signed = [&self.client_first_bare, self.server_first.as_bytes(), client_final.without_proof].join(&b',');
        let verifier = self.verifier;
        let client_key = client_final.proof.xor(&verifier.stored_key.sign(&signed));
        // Both are evaluated for mocks as well, so that a mock takes as long as a real role.
        let proved = client_key.hash() == verifier.stored_key;
        let server_signature = verifier.server_key.sign(&signed);
        if !proved || verifier.doomed {
            return Err(AuthenticationError::WrongPassword);
        }
        let keys = ScramKeys {
            client_key,
            server_key: verifier.server_key,
            salt: verifier.salt,
            iterations: verifier.iterations,
        };
        Ok((format!("v={}", to_base64(&server_signature.0)), keys))
    }
}
