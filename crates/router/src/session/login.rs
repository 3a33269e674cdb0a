//! A client's way in: encryption refused, SCRAM, a first look at a server, `ReadyForQuery`.
//!
//! Nothing runs SQL for a client before it is authenticated, and until then it can make the router hold no more than a
//! start-up packet.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use super::cancel::{CancelSlot, process_id};
use super::epoch_read::InFlight;
use super::presence::Presence;
use super::registration::{ConnectionSlot, Place, SessionRegistration, too_many_clients};
use super::relay::{self, Ended, FROM_CLIENT_IN_PARTS, Hold, Relay};
use super::request::put_own;
use super::role::{DatabaseAccess, look_up_admission, may_look};
use super::startup::{StartupOptions, negotiate};
use super::unit::switch;
use super::{Characteristics, IdleLimits, Session, limit};
use crate::authentication::{AuthenticationError, MECHANISM, ScramServer, ScramVerifier};
use crate::backend::{Backend, Credentials};
use crate::config::Freshness;
use crate::console;
use crate::database::Database;
use crate::servers::Health;
use crate::settings::{Settings, is_on, is_readable_with, is_utf8};
use crate::sql::Isolation;
use crate::state::RouterState;
use crate::wire::{
    Channel, ChannelError, Reply, Socket, SqlError, StartupPacket, begin_message, end_message, sqlstate,
};

/// Largest message of a client that is not yet logged in, in bytes.
const LOGIN_MESSAGE_BYTES_MAX: usize = 10_000;

/// As many clients as may log in may be waited for at once, and so many at least; for a further one the oldest of those
/// is sent away that come from where most come from.
const UNAUTHENTICATED_MIN: usize = 128;

/// How long a log-in waits for a back end.
const FIRST_BACKEND_WAIT: Duration = Duration::from_secs(5);

/// A log-in that does not become a session.
#[derive(Debug, thiserror::Error)]
enum LoginError {
    #[error("lost the client: {0}")]
    Client(#[from] ChannelError),
    #[error("refused: {0}")]
    Refused(SqlError),
}

impl From<std::io::Error> for LoginError {
    fn from(error: std::io::Error) -> Self {
        LoginError::Client(error.into())
    }
}

/// Serves one connection until it ends.
pub async fn serve(router: Arc<RouterState>, socket: Socket) {
    let _slot = ConnectionSlot::take(&router);
    let settings = router.settings();
    let keepalive_s = settings.client_keepalive_s;
    if keepalive_s > 0
        && let Err(error) = socket.keep_alive(Duration::from_secs(keepalive_s.into()))
    {
        tracing::warn!(%error, "a client is not asked whether it is there");
    }
    let address = socket.peer_address();
    let mut client = Channel::new(socket, LOGIN_MESSAGE_BYTES_MAX);
    let presence = Arc::new(Presence::of(&client));
    let timeout = Duration::from_secs(settings.authentication_timeout_s);
    let mut place = None;
    let log_in = tokio::time::timeout(timeout, log_in(&router, &mut client, address, &mut place));
    let Some(Ok(logged_in)) = presence.while_there(&CancelSlot::default(), log_in).await else {
        return;
    };
    match logged_in {
        Ok(LogIn::Session(session)) => {
            let number = session.inside.number;
            let mut session = session.into_session(client, presence.clone());
            session.client.message_bytes_max = settings.message_bytes_max;
            session.client.in_parts = FROM_CLIENT_IN_PARTS;
            session.client.stall_max = limit(settings.client_stall_s);
            let running = session.cancel.clone();
            match presence.while_there(&running, session.run()).await {
                Some(end) => tracing::debug!(session = number, %end, "session ended"),
                None => tracing::debug!(session = number, "session cut off: its client has gone"),
            }
        }
        Ok(LogIn::Console) => {
            let console = console::serve(&router, &mut client);
            if let Some(Err(error)) = presence.while_there(&CancelSlot::default(), console).await {
                tracing::debug!(%error, "lost a client of the console");
            }
        }
        Ok(LogIn::Cancel) => {}
        Err(LoginError::Refused(error)) => {
            router.counters.refused.fetch_add(1, Relaxed);
            tracing::info!(%error, "a client was refused");
            error.encode(&mut client.output);
            // The client may be gone already.
            let _ = relay::flush(&mut client).await;
        }
        // One server says nothing to what is no start-up packet, as that of a client which has changed its mind.
        Err(LoginError::Client(error @ ChannelError::Length { tag: '-', .. })) => {
            tracing::debug!(%error, "a client did not begin to log in");
        }
        Err(LoginError::Client(error @ ChannelError::Length { .. })) => {
            SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, error.to_string()).encode(&mut client.output);
            let _ = relay::flush(&mut client).await;
        }
        Err(LoginError::Client(error)) => tracing::debug!(%error, "lost a client while it logged in"),
    }
}

/// A session that is ready but for its channel.
struct LoggedIn {
    router: Arc<RouterState>,
    database: Arc<Database>,
    inside: SessionRegistration,
    user: String,
    credentials: Arc<Credentials>,
    settings: Arc<Settings>,
    freshness: Freshness,
    server_choice: Option<Arc<str>>,
    /// As the client has asked for.
    isolation: Option<Isolation>,
    cancel: Arc<CancelSlot>,
    /// Transactions of this role in this database are read-only unless they say otherwise.
    is_read_only: bool,
}

impl LoggedIn {
    fn into_session(self, client: Channel, presence: Arc<Presence>) -> Session {
        let read_only = self.settings.get("default_transaction_read_only").map_or(self.is_read_only, is_on);
        let deferrable = self.settings.get("default_transaction_deferrable").is_some_and(is_on);
        let characteristics = Characteristics { read_only, deferrable, isolation: self.isolation };
        Session {
            number: self.inside.number,
            settings_at_login: self.settings.clone(),
            characteristics,
            characteristics_at_login: characteristics,
            statements: Default::default(),
            portals: Default::default(),
            transaction: None,
            own_backend: None,
            pinned: None,
            kept: Vec::new(),
            holds_backend: false,
            settings_of_statements: Default::default(),
            has_state_there: false,
            // Who logs in knows, maybe, what others were told before: a script's next psql, an application's next
            // connection.
            commits_before: self.database.commit_barrier.commits_begun(),
            commits_seen: 0,
            skips_until_sync: false,
            failed_with: String::new(),
            in_doubt: None,
            in_extended_batch: false,
            may_be_cancelled_late: false,
            went_out: false,
            took_sync: false,
            began_copy: false,
            is_followed: false,
            behind: 0,
            notifications: BytesMut::new(),
            endings: self.database.servers.leader().watch_endings(),
            ends_processes: false,
            ended_by: None,
            stopping: self.router.stopping.subscribe(),
            idle: IdleLimits::of(&self.router.settings()),
            parsed: 0,
            _inside: self.inside,
            router: self.router,
            database: self.database,
            client,
            user: self.user.into(),
            credentials: self.credentials,
            settings: self.settings,
            freshness: self.freshness,
            freshness_at_login: self.freshness,
            server_choice_at_login: self.server_choice.clone(),
            server_choice: self.server_choice,
            served_by: None,
            cancel: self.cancel,
            presence,
        }
    }
}

/// What a connection has come for.
enum LogIn {
    Session(Box<LoggedIn>),
    /// The router's console.
    Console,
    /// The cancel request was passed on.
    Cancel,
}

/// Who has shown who he is.
struct Authenticated {
    startup: StartupOptions,
    credentials: Arc<Credentials>,
    access: DatabaseAccess,
}

async fn log_in(
    router: &Arc<RouterState>,
    client: &mut Channel,
    address: Option<SocketAddr>,
    place: &mut Option<Place>,
) -> Result<LogIn, LoginError> {
    let network = address.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), |address| address.ip());
    let introduced = introduce(router, client, network).await?;
    let Some(Authenticated { startup, credentials, access }) = introduced else { return Ok(LogIn::Cancel) };
    *place = Some(Place::take(router).map_err(LoginError::Refused)?);
    if startup.database == console::DATABASE {
        if !may_look(router, &startup.user).await {
            let text = format!("role \"{}\" may not look at the router", startup.user);
            let error = SqlError::fatal(sqlstate::INSUFFICIENT_PRIVILEGE, text);
            return Err(LoginError::Refused(
                error.hint("GRANT pg_monitor to the role, or connect to another database."),
            ));
        }
        return Ok(LogIn::Console);
    }
    // Before anything is made there, or learnt of it, in the router's own name.
    let is_template = access.check(&startup.database).map_err(LoginError::Refused)?;
    let logged_in = open_session(router, client, address, startup, credentials, is_template).await?;
    router.counters.logins.fetch_add(1, Relaxed);
    Ok(LogIn::Session(Box::new(logged_in)))
}

/// What a client says that has not shown who it is; while it says nothing it may be sent away for others.
async fn heard<T>(
    router: &RouterState,
    network: IpAddr,
    saying: impl Future<Output = Result<T, LoginError>>,
) -> Result<T, LoginError> {
    let max = router.settings().clients_max.max(UNAUTHENTICATED_MIN);
    router
        .unauthenticated
        .admit(network, max)
        .greet(saying)
        .await
        .unwrap_or_else(|| Err(LoginError::Refused(too_many_clients())))
}

/// Hears who a client is; none when that was a request to cancel.
async fn introduce(
    router: &Arc<RouterState>,
    client: &mut Channel,
    network: IpAddr,
) -> Result<Option<Authenticated>, LoginError> {
    let parameters = loop {
        let packet = heard(router, network, async { Ok(client.startup_packet().await?) }).await?;
        let refused = |error: crate::wire::FrontendError| {
            LoginError::Refused(SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, error.to_string()))
        };
        match StartupPacket::parse(&packet).map_err(refused)? {
            StartupPacket::Ssl | StartupPacket::Gss => client.answer_byte(b'N').await?,
            StartupPacket::Cancel { process_id, secret } => {
                router.cancel(process_id, secret).await;
                return Ok(None);
            }
            StartupPacket::Session { version: (3, minor), parameters } => {
                negotiate(client, minor, &parameters);
                break parameters;
            }
            StartupPacket::Session { version: (major, minor), .. } => {
                let text = format!("unsupported frontend protocol {major}.{minor}: this router speaks 3.0");
                return Err(LoginError::Refused(SqlError::fatal(sqlstate::FEATURE_NOT_SUPPORTED, text)));
            }
        }
    };
    let (max, authenticated) = (router.settings().clients_max, router.authenticated.load(SeqCst));
    // Those, too, whose turn to be looked up has not come.
    let others = router.clients.load(SeqCst).saturating_sub(authenticated);
    if authenticated >= max || others > 2 * max.max(UNAUTHENTICATED_MIN) {
        return Err(LoginError::Refused(too_many_clients()));
    }
    let startup = StartupOptions::of(parameters).map_err(LoginError::Refused)?;
    let (credentials, access) = authenticate(router, client, network, &startup).await?;
    Ok(Some(Authenticated { startup, credentials, access }))
}

async fn authenticate(
    router: &Arc<RouterState>,
    client: &mut Channel,
    network: IpAddr,
    startup: &StartupOptions,
) -> Result<(Arc<Credentials>, DatabaseAccess), LoginError> {
    let user = &startup.user;
    let admission = look_up_admission(router, user, &startup.database)
        .await
        .map_err(|error| LoginError::Refused(SqlError { severity: "FATAL", ..error.to_sql() }))?;
    let verifier = match admission.verifier {
        Some(stored) => ScramVerifier::parse(&stored).unwrap_or_else(|error| {
            tracing::info!(user, %error, "this role has no SCRAM verifier; set its password anew");
            ScramVerifier::mock(&router.mock_secret, user)
        }),
        None => ScramVerifier::mock(&router.mock_secret, user),
    };
    let refused = |error: AuthenticationError| LoginError::Refused(refusal(user, &error));
    let start = begin_message(&mut client.output, b'R');
    client.output.put_u32(10);
    client.output.put_slice(MECHANISM.as_bytes());
    client.output.put_slice(b"\0\0");
    end_message(&mut client.output, start);
    let first = heard(router, network, password_message(client)).await?;
    let end = first.iter().position(|&byte| byte == 0).unwrap_or(first.len());
    let (server, answer) =
        ScramServer::start(verifier, &first[..end], first.get(end + 5..).unwrap_or_default()).map_err(refused)?;
    put_authentication(client, 11, answer.as_bytes());
    let last = heard(router, network, password_message(client)).await?;
    let (answer, keys) = server.finish(&last).map_err(refused)?;
    put_authentication(client, 12, answer.as_bytes());
    put_authentication(client, 0, b"");
    if let Some(server) = admission.asked_instead {
        let text =
            format!("the leader is away: role \"{user}\" was looked up on {server}, by what the leader last said");
        tracing::warn!("{text}");
        client.output.warning(sqlstate::WARNING, &text);
    }
    Ok((router.live_credentials.proved(user.clone(), admission.role, keys), admission.access))
}

fn refusal(user: &str, error: &AuthenticationError) -> SqlError {
    match error.sqlstate() {
        sqlstate::INVALID_PASSWORD => {
            SqlError::fatal(sqlstate::INVALID_PASSWORD, format!("password authentication failed for user \"{user}\""))
        }
        code => SqlError::fatal(code, error.to_string()),
    }
}

fn put_authentication(client: &mut Channel, code: u32, data: &[u8]) {
    let start = begin_message(&mut client.output, b'R');
    client.output.put_u32(code);
    client.output.put_slice(data);
    end_message(&mut client.output, start);
}

async fn password_message(client: &mut Channel) -> Result<Bytes, LoginError> {
    relay::flush(client).await?;
    let frame = client.frame().await?;
    if frame.tag == b'p' {
        return Ok(frame.body());
    }
    let text = format!("expected password response, got message type {}", frame.tag);
    Err(LoginError::Refused(SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, text)))
}

async fn open_session(
    router: &Arc<RouterState>,
    client: &mut Channel,
    address: Option<SocketAddr>,
    startup: StartupOptions,
    credentials: Arc<Credentials>,
    is_template: bool,
) -> Result<LoggedIn, LoginError> {
    let fatal = |error: SqlError| LoginError::Refused(SqlError { severity: "FATAL", ..error });
    let cancel = Arc::new(CancelSlot::of(startup.database.as_str().into(), credentials.clone(), address));
    let (database, inside) = loop {
        let database = router.database(&startup.database).await.map_err(|error| fatal(error.to_sql()))?;
        let inside = SessionRegistration::enter(router, &database, &cancel, is_template);
        // It may have been closed before this one was counted.
        if router.is_open(&database) {
            break (database, inside);
        }
    };
    let mut logged_in = LoggedIn {
        router: router.clone(),
        freshness: router.settings().freshness,
        inside,
        database,
        user: startup.user,
        credentials,
        settings: Arc::default(),
        server_choice: None,
        isolation: None,
        cancel,
        is_read_only: false,
    };
    greet(&mut logged_in, client, startup.settings).await?;
    let SessionRegistration { number, secret, .. } = &logged_in.inside;
    client.output.message(b'K', &[process_id(*number).to_be_bytes(), secret.to_be_bytes()].concat());
    client.output.ready_for_query(b'I');
    relay::flush(client).await?;
    Ok(logged_in)
}

/// Bytes of an identifier that PostgreSQL keeps.
const IDENTIFIER_BYTES_MAX: usize = 63;

/// Checks that the servers let this role into the database with these settings, and passes on what they report.
async fn greet(
    session: &mut LoggedIn,
    client: &mut Channel,
    settings: Vec<(String, String)>,
) -> Result<(), LoginError> {
    let fatal = |error: SqlError| LoginError::Refused(SqlError { severity: "FATAL", ..error });
    for (name, value) in settings {
        let invalid = || {
            fatal(SqlError::error(
                sqlstate::INVALID_PARAMETER_VALUE,
                format!("invalid value for parameter \"{name}\": \"{value}\""),
            ))
        };
        match name.as_str() {
            "onecopy.freshness" => session.freshness = value.parse().map_err(|_| invalid())?,
            "onecopy.server" => {
                let chosen = session.database.servers.named(&value).ok_or_else(invalid)?;
                session.server_choice = Some(chosen.name.as_str().into());
            }
            // The client gets SERIALIZABLE whatever it asks for, and is shown what it has asked for.
            "default_transaction_isolation" => {
                session.isolation = Some(Isolation::from_setting(&value).ok_or_else(invalid)?);
            }
            "client_encoding" if is_utf8(&value) => session.settings.reset(&name),
            _ if !is_readable_with(&name, &value) => {
                return Err(fatal(SqlError::error(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("{name} = {value} is not supported: the router could misread SQL"),
                )));
            }
            _ => {
                let value = if name == "application_name" { kept_of(value, client) } else { value };
                if !session.settings.set(&name, value) {
                    return Err(fatal(SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, "too many settings")));
                }
            }
        }
    }
    let (mut backend, _in_flight) = first_backend(session).await.map_err(fatal)?;
    if let Some(change) = switch(&backend, &session.settings) {
        let mut expected = VecDeque::new();
        let end = if backend.in_transaction { "ROLLBACK; " } else { "" };
        put_own(&mut backend, &format!("{end}{change}"), false, &mut expected);
        let Ended { result, .. } = Relay::new(client, &mut backend, expected, Hold::InCommitBarrier).run().await;
        match result {
            Ok(relayed) => {
                if let Some(fields) = relayed.own_error {
                    client.output.clear();
                    return Err(fatal(SqlError::from(fields)));
                }
            }
            Err(error) => return Err(fatal(SqlError::error(sqlstate::CANNOT_CONNECT_NOW, error.to_string()))),
        }
        backend.settings = session.settings.clone();
        backend.stale_plans = false;
        backend.epoch = None;
    }
    // Those of now: another session may have had these settings there before.
    for (name, value) in &backend.parameters {
        if !is_readable_with(name, value) {
            return Err(fatal(
                SqlError::error(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("{name} = {value} is not supported: the router could misread SQL"),
                )
                .hint("It is the default of the server, the database or the role."),
            ));
        }
        let value = if name == "in_hot_standby" { "off" } else { value };
        session.is_read_only |= name == "default_transaction_read_only" && is_on(value);
        client.output.parameter_status(name, value);
    }
    session.database.readers.give_back(backend);
    Ok(())
}

/// As much of a name as PostgreSQL keeps (`truncate_identifier`). The client is told so once, as by one server, and not
/// whenever another one is told the name.
fn kept_of(name: String, client: &mut Channel) -> String {
    if name.len() <= IDENTIFIER_BYTES_MAX {
        return name;
    }
    let kept = &name[..name.floor_char_boundary(IDENTIFIER_BYTES_MAX)];
    let text = format!("identifier \"{name}\" will be truncated to \"{kept}\"");
    client.output.notice("NOTICE", sqlstate::NAME_TOO_LONG, &text);
    kept.to_owned()
}

/// A reader's back end on any server that reads go to, followers first; the leader's refusal is the one that counts.
async fn first_backend(session: &LoggedIn) -> Result<(Backend, InFlight), SqlError> {
    let mut refusal = None;
    for pool in session.database.readers.all().iter().rev() {
        let server = &pool.server;
        let is_asked_for = session.server_choice.as_deref() == Some(server.name.as_str());
        let takes_reads = is_asked_for || !server.read_share.is_none();
        if server.health() == Health::Unresponsive || !server.has_caught_up() || !takes_reads {
            continue;
        }
        let Some(in_flight) = InFlight::on(server) else { continue };
        match pool.take(&session.credentials, &session.settings, FIRST_BACKEND_WAIT).await {
            Ok(backend) => return Ok((backend, in_flight)),
            Err(error) => refusal = Some(error.to_sql()),
        }
    }
    Err(refusal.unwrap_or_else(|| SqlError::error(sqlstate::CANNOT_CONNECT_NOW, "no server is there")))
}
