//! Why a login was refused, on either side.

use super::keys::ITERATIONS_MAX;
use super::message::MESSAGE_BYTES_MAX;

/// A verifier or a message that cannot be used, or a proof that does not hold. No variant carries a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthenticationError {
    /// The role has no password at all.
    #[error("the role has no password: set one with ALTER ROLE ... PASSWORD")]
    NoPassword,
    /// The role's password is stored as an MD5 hash.
    #[error(
        "the role's password is stored as MD5: set password_encryption = 'scram-sha-256' and set the password again"
    )]
    Md5Verifier,
    /// The stored password is neither SCRAM-SHA-256 nor another known form.
    #[error("the role's stored password is not a SCRAM-SHA-256 verifier ({0}): set the password again")]
    MalformedVerifier(&'static str),
    /// The client chose a mechanism that was not offered.
    #[error("the client chose SASL mechanism {0:?}, which was not offered: use SCRAM-SHA-256")]
    UnknownMechanism(String),
    /// A message of the exchange is longer than any honest one.
    #[error("{message} has {bytes} bytes, more than {MESSAGE_BYTES_MAX}")]
    MessageTooLong {
        /// Which message of the exchange.
        message: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// A message of the exchange breaks the grammar of RFC 5802.
    #[error("malformed {message}: {reason}")]
    Malformed {
        /// Which message of the exchange.
        message: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The client insists on channel binding.
    #[error(
        "the client requires channel binding, which is not offered: connect with channel_binding=prefer or disable"
    )]
    ChannelBindingRequired,
    /// The channel-binding attribute of client-final is not that of client-first.
    #[error("the channel-binding attribute in client-final differs from the flag in client-first")]
    ChannelBindingMismatch,
    /// The client wants to act as another role than the one it logs in as.
    #[error("the client uses a SASL authorization identity, which is not supported: log in as that role")]
    AuthorizationIdentity,
    /// The peer requires an extension that nobody has defined.
    #[error("{0} requires an unsupported SCRAM extension")]
    MandatoryExtension(&'static str),
    /// A nonce is not the one of this exchange: a replay, or an answer to somebody else.
    #[error("the nonce in {0} does not belong to this exchange")]
    NonceMismatch(&'static str),
    /// The proof does not hold: wrong password, or no such role (the two look the same on purpose).
    #[error("password authentication failed")]
    WrongPassword,
    /// The server asks for more key derivation than the router is willing to do.
    #[error("the server asks for {0} SCRAM iterations, more than {ITERATIONS_MAX}: set the password again with fewer")]
    TooManyIterations(u32),
    /// The server does not hold the verifier that the client's keys were proved against.
    #[error(
        "the server holds another verifier for this role than the leader: \
         it is not a physical copy, or lags behind a change of password"
    )]
    VerifierDiffers,
    /// The server ended the exchange with an error attribute.
    #[error("the server refused the SCRAM exchange: {0:?}")]
    RefusedByServer(String),
    /// The server could not prove that it knows the verifier.
    #[error("the server's signature is wrong: it does not know the role's verifier, do not trust it")]
    WrongServerSignature,
}

impl AuthenticationError {
    /// The SQLSTATE that a client gets for this error (PostgreSQL's appendix A), as PostgreSQL itself reports it.
    ///
    /// A role without a usable verifier answers like a wrong password; [`super::ScramVerifier::mock`] says why.
    pub fn sqlstate(&self) -> &'static str {
        use AuthenticationError as E;
        match self {
            E::NoPassword | E::Md5Verifier | E::MalformedVerifier(_) | E::WrongPassword => "28P01",
            E::AuthorizationIdentity | E::MandatoryExtension(_) => "0A000",
            E::UnknownMechanism(_)
            | E::MessageTooLong { .. }
            | E::Malformed { .. }
            | E::ChannelBindingRequired
            | E::ChannelBindingMismatch
            | E::NonceMismatch(_) => "08P01",
            E::TooManyIterations(_) | E::VerifierDiffers | E::RefusedByServer(_) | E::WrongServerSignature => "28000",
        }
    }
}
