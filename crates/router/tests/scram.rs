//! SCRAM-SHA-256 with real partners: our client side against PostgreSQL, our server side against libpq, and the keys of
//! the one used for the other, which is how the router passes a client's identity on.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};

use onecopy_postgres::{Binaries, Server};
use onecopy_router::authentication::{
    AuthenticationError, MECHANISM, MockSecret, ScramClient, ScramCredential, ScramKeys, ScramServer, ScramVerifier,
};
use onecopy_testing::{TestDirectory, create, server_options};

/// Role and password: plain, changed by SASLprep, and prohibited by it (a control character).
const ROLES: [(&str, &str); 3] =
    [("plain", "it's a secret"), ("prepared", "I\u{AD}X \u{2168}\u{A0}\u{AA}"), ("raw", "bell\u{7}")];

/// A PostgreSQL server that goes away with the test.
struct TestServer {
    server: Server,
    _directory: TestDirectory,
    runtime: tokio::runtime::Runtime,
}

impl TestServer {
    fn start() -> TestServer {
        let directory = TestDirectory::new().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let options = server_options(Binaries::find(None).unwrap(), directory.join("server")).unwrap();
        let server = runtime.block_on(create(options)).unwrap();
        runtime.block_on(server.start()).unwrap();
        TestServer { server, _directory: directory, runtime }
    }

    /// Runs statements as superuser; gives the first column of the rows.
    fn sql(&self, text: &str) -> Vec<String> {
        self.runtime.block_on(async {
            let client = self.server.connection().connect_as_client().await.unwrap();
            let messages = client.simple_query(text).await.unwrap();
            let row = |message: &tokio_postgres::SimpleQueryMessage| match message {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            };
            messages.iter().filter_map(row).collect()
        })
    }

    fn stored(&self, role: &str) -> String {
        self.sql(&format!("SELECT rolpassword FROM pg_authid WHERE rolname = '{role}'")).remove(0)
    }

    /// Logs in as `role` with our client side.
    fn log_in(&self, role: &str, credential: ScramCredential) -> Result<ScramKeys, Refusal> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.options().port))?;
        let parameters = format!("user\0{role}\0database\0postgres\0\0");
        let length = u32::try_from(parameters.len() + 8).unwrap();
        stream.write_all(&[&length.to_be_bytes()[..], &[0, 3, 0, 0], parameters.as_bytes()].concat())?;
        let offered = expect_authentication(&mut stream, 10)?;
        assert_eq!(offered, [MECHANISM.as_bytes(), b"\0\0"].concat());
        let client = ScramClient::new(credential);
        let first = client.client_first();
        let length = u32::try_from(first.len()).unwrap().to_be_bytes();
        send(&mut stream, b'p', &[MECHANISM.as_bytes(), b"\0", &length, first.as_bytes()].concat())?;
        let (client, last) = client.client_final(&expect_authentication(&mut stream, 11)?)?;
        send(&mut stream, b'p', last.as_bytes())?;
        let keys = client.verify(&expect_authentication(&mut stream, 12)?)?;
        expect_authentication(&mut stream, 0)?;
        Ok(keys)
    }
}

#[derive(Debug)]
enum Refusal {
    /// SQLSTATE of the server's ErrorResponse.
    Server(String),
    Authentication(AuthenticationError),
    Transport(#[expect(dead_code, reason = "shown when a test fails")] io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Transport(error)
    }
}

impl From<AuthenticationError> for Refusal {
    fn from(error: AuthenticationError) -> Refusal {
        Refusal::Authentication(error)
    }
}

fn send(stream: &mut TcpStream, tag: u8, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len() + 4).unwrap();
    stream.write_all(&[&[tag], &length.to_be_bytes()[..], body].concat())
}

fn receive(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let mut body = vec![0; length - 4];
    stream.read_exact(&mut body)?;
    Ok((head[0], body))
}

fn expect_authentication(stream: &mut TcpStream, code: u32) -> Result<Vec<u8>, Refusal> {
    let (tag, body) = receive(stream)?;
    if tag == b'E' {
        let fields = body.split(|byte| *byte == 0);
        let state = fields.filter_map(|field| field.strip_prefix(b"C")).next().unwrap();
        return Err(Refusal::Server(String::from_utf8(state.to_vec()).unwrap()));
    }
    assert_eq!((tag, &body[..4]), (b'R', &code.to_be_bytes()[..]));
    Ok(body[4..].to_vec())
}

/// Takes one connection of a client and logs it in with our server side; then answers one empty query.
fn serve_one_client(listener: &TcpListener, verifier: ScramVerifier) -> Result<ScramKeys, AuthenticationError> {
    let (mut stream, _) = listener.accept().unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut startup = vec![0; u32::from_be_bytes(length) as usize - 4];
    stream.read_exact(&mut startup).unwrap();
    send(&mut stream, b'R', &[&10_u32.to_be_bytes()[..], MECHANISM.as_bytes(), b"\0\0"].concat()).unwrap();
    let (tag, body) = receive(&mut stream).unwrap();
    assert_eq!(tag, b'p');
    let name_bytes = body.iter().position(|byte| *byte == 0).unwrap();
    let (server, first) = ScramServer::start(verifier, &body[..name_bytes], &body[name_bytes + 5..])?;
    send(&mut stream, b'R', &[&11_u32.to_be_bytes()[..], first.as_bytes()].concat()).unwrap();
    let (_, body) = receive(&mut stream).unwrap();
    match server.finish(&body) {
        Ok((last, keys)) => {
            send(&mut stream, b'R', &[&12_u32.to_be_bytes()[..], last.as_bytes()].concat()).unwrap();
            send(&mut stream, b'R', &0_u32.to_be_bytes()).unwrap();
            send(&mut stream, b'Z', b"I").unwrap();
            assert_eq!(receive(&mut stream).unwrap().0, b'Q');
            send(&mut stream, b'I', b"").unwrap();
            send(&mut stream, b'Z', b"I").unwrap();
            Ok(keys)
        }
        Err(error) => {
            let fields = format!("SFATAL\0VFATAL\0C{}\0M{error}\0\0", error.sqlstate());
            send(&mut stream, b'E', fields.as_bytes()).unwrap();
            Err(error)
        }
    }
}

/// Runs psql, and so libpq, against our server side.
fn psql_logs_in(
    verifier: ScramVerifier,
    role: &str,
    password: &str,
) -> (Output, Result<ScramKeys, AuthenticationError>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let psql = Command::new(Binaries::find(None).unwrap().program("psql"))
        .args(["-X", "-h", "127.0.0.1", "-p", &port, "-U", role, "-d", "postgres", "-c", ""])
        .env("PGPASSWORD", password)
        .env("PGSSLMODE", "disable")
        .env("PGGSSENCMODE", "disable")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let outcome = serve_one_client(&listener, verifier);
    (psql.wait_with_output().unwrap(), outcome)
}

#[test]
fn a_login_at_the_router_is_a_login_at_every_server_with_the_same_verifier() {
    let server = TestServer::start();
    for (role, password) in ROLES {
        // One role's password is hashed by PostgreSQL, the other's by us.
        let quoted = password.replace('\'', "''");
        server.sql(&format!("CREATE ROLE {role} LOGIN PASSWORD '{quoted}'"));
        let encoded = ScramVerifier::encode(password.as_bytes(), b"a salt of ours", 4096).unwrap();
        server.sql(&format!("CREATE ROLE {role}_encoded LOGIN PASSWORD '{encoded}'"));
        assert_eq!(server.stored(&format!("{role}_encoded")), encoded);

        for role in [role.to_owned(), format!("{role}_encoded")] {
            let with_password = ScramCredential::Password(password.as_bytes().to_vec());
            let derived = server.log_in(&role, with_password).unwrap();

            let verifier = ScramVerifier::parse(&server.stored(&role)).unwrap();
            let (psql, learned) = psql_logs_in(verifier, &role, password);
            assert!(psql.status.success(), "{role}: {}", String::from_utf8_lossy(&psql.stderr));
            let learned = learned.unwrap();
            assert_eq!(learned, derived, "{role}");
            assert_eq!(server.log_in(&role, ScramCredential::Keys(learned)).unwrap(), derived, "{role}");
        }
    }

    // A changed password makes the keys worthless, and says so.
    let keys = server.log_in("plain", ScramCredential::Password(ROLES[0].1.as_bytes().to_vec())).unwrap();
    server.sql("ALTER ROLE plain PASSWORD 'another'");
    let refusal = server.log_in("plain", ScramCredential::Keys(keys)).unwrap_err();
    assert!(matches!(refusal, Refusal::Authentication(AuthenticationError::VerifierDiffers)), "{refusal:?}");
}

#[test]
fn wrong_passwords_are_refused_alike_by_postgresql_and_by_us() {
    let server = TestServer::start();
    server.sql("CREATE ROLE plain LOGIN PASSWORD 'right'; SET password_encryption = md5; CREATE ROLE old PASSWORD 'x'");
    for role in ["plain", "nobody"] {
        let refusal = server.log_in(role, ScramCredential::Password(b"wrong".to_vec())).unwrap_err();
        assert!(matches!(&refusal, Refusal::Server(state) if state == "28P01"), "{role}: {refusal:?}");
    }
    let real = ScramVerifier::parse(&server.stored("plain")).unwrap();
    let mock = ScramVerifier::mock(&MockSecret::random(), "nobody");
    for (role, verifier) in [("plain", real), ("nobody", mock)] {
        let (psql, outcome) = psql_logs_in(verifier, role, "wrong");
        assert_eq!(outcome, Err(AuthenticationError::WrongPassword));
        assert_eq!(psql.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&psql.stderr).contains("password authentication failed"));
    }
    assert_eq!(ScramVerifier::parse(&server.stored("old")).unwrap_err(), AuthenticationError::Md5Verifier);
}
