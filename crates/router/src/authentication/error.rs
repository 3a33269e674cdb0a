//! Why a login was refused, on either side.

/// Longest message of an exchange that is looked at, in bytes (`PG_MAX_SASL_MESSAGE_LENGTH`).
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// Most PBKDF2 iterations done for a server, about half a second of one core; PostgreSQL's default is 4096.
pub const ITERATIONS_MAX: u32 = 1_000_000;

/// A verifier or a message that cannot be used, or a proof that does not hold. No variant carries a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum AuthenticationError {
    #[error("the role has no password: set one with ALTER ROLE ... PASSWORD")]
    NoPassword,
    #[error(
        "the role's password is stored as MD5: set password_encryption = 'scram-sha-256' and set the password again"
    )]
    Md5Verifier,
    #[error("the role's stored password is not a SCRAM-SHA-256 verifier ({0}): set the password again")]
    MalformedVerifier(&'static str),
    #[error("the client chose SASL mechanism {0:?}, which was not offered: use SCRAM-SHA-256")]
    UnknownMechanism(String),
    #[error("{message} has {bytes} bytes, more than {MESSAGE_BYTES_MAX}")]
    MessageTooLong { message: &'static str, bytes: usize },
    #[error("malformed {message}: {reason}")]
    Malformed { message: &'static str, reason: &'static str },
    #[error(
        "the client requires channel binding, which is not offered: connect with channel_binding=prefer or disable"
    )]
    ChannelBindingRequired,
    #[error("the channel-binding attribute in client-final differs from the flag in client-first")]
    ChannelBindingMismatch,
    #[error("the client uses a SASL authorization identity, which is not supported: log in as that role")]
    AuthorizationIdentity,
    #[error("{0} requires an unsupported SCRAM extension")]
    MandatoryExtension(&'static str),
    #[error("the nonce in {0} does not belong to this exchange")]
    NonceMismatch(&'static str),
    #[error("password authentication failed")]
    WrongPassword,
    #[error("the server asks for {0} SCRAM iterations, more than {ITERATIONS_MAX}: set the password again with fewer")]
    TooManyIterations(u32),
    #[error(
        "the server holds another verifier for this role than the leader: \
         it is not a physical copy, or lags behind a change of password"
    )]
    VerifierDiffers,
    #[error("the server refused the SCRAM exchange: {0:?}")]
    RefusedByServer(String),
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
