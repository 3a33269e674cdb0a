//! Logging in to a server.

use std::fmt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Backend, BackendError, CancelKey, PreparedStatements, Purpose, ServerProcess};
use crate::authentication::{MECHANISM, ScramClient, ScramCredential, ScramKeys};
use crate::servers::{Connection, Server};
use crate::settings::Settings;
use crate::wire::{Channel, ErrorFields, Frame, Reply, Socket, begin_message, end_message, sqlstate};

/// A server that does not complete a log-in within this is taken for dead.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// A server process whose connection was closed in the midst of a statement notices it within this.
pub const NOTICE_INTERVAL: Duration = Duration::from_secs(1);

/// With what the router logs in as a role.
pub struct Credentials {
    /// The role.
    pub user: String,
    /// Its number (`pg_authid.oid`), which no other role ever has, whatever the names are; 0 of the router's own.
    pub role: u32,
    secret: Mutex<Secret>,
}

struct Secret {
    password: Option<String>,
    /// Of the last log-in; they save deriving them from the password again.
    keys: Option<ScramKeys>,
    /// Those before: a client may have proved them before a change of the password, and come in after it.
    former_keys: Option<ScramKeys>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Those of the router itself, from its configuration.
    pub fn of_router(server: &Server) -> Credentials {
        let secret = Secret { password: server.password.clone(), keys: None, former_keys: None };
        Credentials { user: server.user.clone(), role: 0, secret: Mutex::new(secret) }
    }

    /// Those that a client proved to the router.
    pub fn proved(user: String, role: u32, keys: ScramKeys) -> Credentials {
        let secret = Secret { password: None, keys: Some(keys), former_keys: None };
        Credentials { user, role, secret: Mutex::new(secret) }
    }

    /// Takes the keys of a later log-in of the same role: its password may have been changed.
    pub fn renew(&self, keys: ScramKeys) {
        let mut secret = self.secret();
        if secret.keys.as_ref() != Some(&keys) {
            secret.former_keys = secret.keys.replace(keys);
        }
    }

    /// What to try, one after the other; one without anything where there is nothing.
    fn proofs(&self) -> Vec<Option<ScramCredential>> {
        let secret = self.secret();
        let keys = [&secret.keys, &secret.former_keys].into_iter().flatten().cloned().map(ScramCredential::Keys);
        let password = secret.password.clone().map(|password| ScramCredential::Password(password.into_bytes()));
        let proofs: Vec<_> = keys.chain(password).map(Some).collect();
        if proofs.is_empty() { vec![None] } else { proofs }
    }

    /// Keeps keys that were derived from the password.
    fn note_derived(&self, keys: ScramKeys) {
        self.secret().keys = Some(keys);
    }

    fn secret(&self) -> std::sync::MutexGuard<'_, Secret> {
        self.secret.lock().expect("no code panics while it holds this lock")
    }
}

/// A database's owner chooses its settings. In what the router asks for itself no operator or function of somebody
/// else's is found, and what it makes is its own. PostgreSQL would compile the query for its own functions, for two
/// seconds; it runs in 20 ms. Snapshots are held by connections that are idle.
const OWN_SETTINGS: [(&str, &str); 5] = [
    ("search_path", "pg_catalog"),
    ("role", "none"),
    ("jit", "off"),
    ("idle_session_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
];

impl Backend {
    /// Connects to `database` on `server` and logs in. Transactions of this connection have the level of its purpose
    /// unless they say otherwise.
    pub async fn connect(
        server: &Arc<Server>,
        database: &str,
        credentials: &Credentials,
        purpose: Purpose,
    ) -> Result<Backend, BackendError> {
        let timed_out =
            || BackendError::TimedOut { server: server.name.clone(), milliseconds: LOGIN_TIMEOUT.as_millis() };
        let mut proofs = credentials.proofs().into_iter().peekable();
        loop {
            let (proof, mut is_proved) = (proofs.next().flatten(), false);
            let logged_in = login(server, database, (credentials, proof), purpose, &mut is_proved);
            let result = tokio::time::timeout(LOGIN_TIMEOUT, logged_in).await.unwrap_or_else(|_| Err(timed_out()));
            match result {
                // The password may have been set anew, there or elsewhere.
                Err(error) if !is_proved && is_refused(&error) && proofs.peek().is_some() => {}
                result => return result,
            }
        }
    }
}

/// Whether another proof may be taken.
fn is_refused(error: &BackendError) -> bool {
    match error {
        BackendError::Login { .. } => true,
        BackendError::Sql { fields, .. } => fields.code == sqlstate::INVALID_PASSWORD,
        _ => false,
    }
}

async fn login(
    server: &Arc<Server>,
    database: &str,
    (credentials, proof): (&Credentials, Option<ScramCredential>),
    purpose: Purpose,
    is_proved: &mut bool,
) -> Result<Backend, BackendError> {
    let connection = Connection::to(server).ok_or_else(|| BackendError::Removed { server: server.name.clone() })?;
    if purpose.waits_for_predecessors() && server.is_held_back.load(SeqCst) {
        return Err(BackendError::HeldBack { server: server.name.clone() });
    }
    let socket = Socket::connect(&server.address).await.map_err(|source| BackendError::Connect {
        server: server.name.clone(),
        address: server.address.clone(),
        source,
    })?;
    const MESSAGE_BYTES_MAX: usize = 0x3fff_ffff;
    let mut backend = Backend {
        channel: Channel::new(socket, MESSAGE_BYTES_MAX),
        server: server.clone(),
        role: credentials.role,
        process_id: 0,
        started_us: 0,
        cancel_key: Arc::new(CancelKey { address: server.address.clone(), process_id: 0, secret: Bytes::new() }),
        parameters: Vec::new(),
        settings: Arc::new(Settings::default()),
        stale_plans: false,
        prepared: PreparedStatements::default(),
        epoch: None,
        in_transaction: false,
        idle_since: Instant::now(),
        endings: server.endings(),
        session: 0,
        slot: None,
        _connection: connection,
    };
    let own_settings: &[_] = if purpose.is_clients() { &[] } else { &OWN_SETTINGS };
    let check_interval = NOTICE_INTERVAL.as_millis().to_string();
    put_startup(
        &mut backend.channel.output,
        [
            ("user", credentials.user.as_str()),
            ("database", database),
            ("application_name", purpose.application_name()),
            ("client_encoding", "UTF8"),
            // The router reads SQL by these rules, whatever the role's or the database's settings say.
            ("standard_conforming_strings", "on"),
            ("default_transaction_isolation", purpose.default_isolation(server.role)),
            // A server process that waits for a lock, or computes, looks itself whether anybody is here, also when this
            // program was killed.
            ("client_connection_check_interval", check_interval.as_str()),
        ]
        .into_iter()
        .chain(own_settings.iter().copied()),
    );
    authenticate(&mut backend, credentials, proof).await?;
    *is_proved = true;
    loop {
        let frame = next_frame(&mut backend).await?;
        match frame.tag {
            b'S' => {
                if let Some((name, value)) = parameter_status(&frame) {
                    backend.note_parameter(name, value);
                }
            }
            b'K' if frame.bytes.len() >= 9 => {
                let mut body = frame.body();
                backend.process_id = body.get_u32();
                backend.cancel_key = Arc::new(CancelKey {
                    address: server.address.clone(),
                    process_id: backend.process_id,
                    secret: body,
                });
            }
            b'Z' => break,
            _ => {}
        }
    }
    if purpose.is_clients() {
        backend.started_us = check_role(&mut backend).await?;
    }
    Ok(backend)
}

/// Whether the server has let in the role that the client proved to be, and not another one that has its name by now,
/// or still has it on a follower; when the server process was started. Not asked in a serializable transaction: those
/// are counted. Asked as the role that has logged in: to another, which its settings may name, the server does not show
/// it.
async fn check_role(backend: &mut Backend) -> Result<i64, BackendError> {
    let sql = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL ROLE NONE; \
         SELECT {}, usesysid::pg_catalog.int8 OPERATOR(pg_catalog.=) {} \
         FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()); COMMIT",
        ServerProcess::ROW,
        backend.role
    );
    let rows = backend.rows(&sql).await?;
    let refused = |reason: &str| BackendError::Login { server: backend.server.name.clone(), reason: reason.to_owned() };
    let [process @ .., is_role] = rows.first().map_or(&[][..], Vec::as_slice) else {
        return Err(refused("pg_stat_get_activity() does not show its process"));
    };
    if is_role.as_deref() != Some("t") {
        return Err(refused("the role of this name is another one there than the one that has logged in here"));
    }
    let process = ServerProcess::of_row(process);
    process.map(|process| process.started_us).ok_or_else(|| refused("no start of its process is shown"))
}

fn put_startup<'a>(output: &mut BytesMut, parameters: impl Iterator<Item = (&'a str, &'a str)>) {
    let start = output.len();
    output.put_u32(0);
    output.put_u32(3 << 16);
    for (name, value) in parameters {
        for text in [name, value] {
            output.put_slice(text.as_bytes());
            output.put_u8(0);
        }
    }
    output.put_u8(0);
    let length = u32::try_from(output.len() - start).expect("start-up parameters are short");
    output[start..start + 4].copy_from_slice(&length.to_be_bytes());
}

/// The next message; an `ErrorResponse` is an error.
async fn next_frame(backend: &mut Backend) -> Result<Frame, BackendError> {
    let result = async {
        backend.channel.flush().await?;
        backend.channel.frame().await
    };
    let frame = match result.await {
        Ok(frame) => frame,
        Err(error) => return Err(backend.lost(error)),
    };
    if frame.tag == b'E' {
        let fields = ErrorFields::parse(&frame.body());
        return Err(BackendError::Sql { server: backend.server.name.clone(), fields });
    }
    Ok(frame)
}

async fn authenticate(
    backend: &mut Backend,
    credentials: &Credentials,
    proof: Option<ScramCredential>,
) -> Result<(), BackendError> {
    const OK: u32 = 0;
    const SASL: u32 = 10;
    let server = backend.server.name.clone();
    let refused = |reason: String| BackendError::Login { server: server.clone(), reason };
    let frame = next_frame(backend).await?;
    match authentication_code(&frame) {
        Some(OK) => Ok(()),
        Some(SASL) => {
            let proof = proof.ok_or_else(|| {
                refused(format!("it asks for a password of {:?} and none is configured", credentials.user))
            })?;
            let derives = matches!(proof, ScramCredential::Password(_));
            let keys = exchange(backend, proof).await?;
            if derives {
                credentials.note_derived(keys);
            }
            Ok(())
        }
        Some(code) => Err(refused(format!(
            "it asks for authentication method {code}; set password_encryption to scram-sha-256 and the password anew, \
             and scram-sha-256 in pg_hba.conf"
        ))),
        None => Err(refused("its first answer is no authentication message".to_owned())),
    }
}

async fn exchange(backend: &mut Backend, credential: ScramCredential) -> Result<ScramKeys, BackendError> {
    let server = backend.server.name.clone();
    let refused = |reason: String| BackendError::Login { server: server.clone(), reason };
    let client = ScramClient::new(credential);
    let first = client.client_first();
    let output = &mut backend.channel.output;
    let start = begin_message(output, b'p');
    output.put_slice(MECHANISM.as_bytes());
    output.put_u8(0);
    output.put_u32(first.len() as u32);
    output.put_slice(first.as_bytes());
    end_message(output, start);
    let frame = next_frame(backend).await?;
    let (client, last) =
        client.client_final(frame.bytes.get(9..).unwrap_or_default()).map_err(|e| refused(e.to_string()))?;
    backend.channel.output.message(b'p', last.as_bytes());
    let frame = next_frame(backend).await?;
    let keys = client.verify(frame.bytes.get(9..).unwrap_or_default()).map_err(|e| refused(e.to_string()))?;
    let frame = next_frame(backend).await?;
    match authentication_code(&frame) {
        Some(0) => Ok(keys),
        _ => Err(refused("it did not end the exchange".to_owned())),
    }
}

fn authentication_code(frame: &Frame) -> Option<u32> {
    let code = frame.bytes.get(5..9)?;
    (frame.tag == b'R').then(|| u32::from_be_bytes([code[0], code[1], code[2], code[3]]))
}

/// Name and value of a `ParameterStatus`; none of another message.
pub(crate) fn parameter_status(frame: &Frame) -> Option<(String, String)> {
    let body = (frame.tag == b'S').then(|| frame.body())?;
    let mut texts = body.split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
    Some((texts.next()?, texts.next()?))
}
