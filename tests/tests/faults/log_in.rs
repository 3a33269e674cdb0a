//! Who may not log in is told so as PostgreSQL tells it, and learns nothing about roles.

use onecopy_router::wire::ErrorFields;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};

use crate::harness::{start_usual, try_until};
use crate::wire::{Wire, message, startup, with_length};

/// Names and values of a start-up packet.
type Parameters<'a> = &'a [(&'a str, &'a str)];

async fn refusal(cluster: &TestCluster, parameters: Parameters<'_>, password: &str) -> anyhow::Result<ErrorFields> {
    match Wire::log_in(cluster, parameters, password).await? {
        Ok(_) => anyhow::bail!("{parameters:?} could log in"),
        Err(error) => Ok(error),
    }
}

/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_log_ins_get_postgresqls_sqlstates() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let session = cluster.updater("setup").await?;
    session.run("CREATE ROLE nologin PASSWORD 'nologin'").await?;
    session.run("CREATE ROLE expired LOGIN PASSWORD 'expired' VALID UNTIL '2001-01-01'").await?;
    session.run("CREATE ROLE guest LOGIN PASSWORD 'guest'").await?;
    session.run("CREATE DATABASE closed").await?;
    session.run("REVOKE CONNECT ON DATABASE closed FROM PUBLIC").await?;
    let cases: [(Parameters, &str, &str); 10] = [
        (&[("user", USER), ("database", DATABASE)], "wrong", "28P01"),
        (&[("user", USER), ("database", DATABASE)], "", "28P01"),
        (&[("user", "nobody"), ("database", DATABASE)], PASSWORD, "28P01"),
        (&[("user", "nologin"), ("database", DATABASE)], "nologin", "28P01"),
        (&[("user", "expired"), ("database", DATABASE)], "expired", "28P01"),
        (&[("user", USER), ("database", "nowhere")], PASSWORD, "3D000"),
        (&[("user", "guest"), ("database", "closed")], "guest", "42501"),
        (&[("user", USER), ("database", DATABASE), ("replication", "true")], PASSWORD, "0A000"),
        (&[("database", DATABASE)], PASSWORD, "28000"),
        (&[("user", USER), ("database", DATABASE), ("work_mem", "much")], PASSWORD, "22023"),
    ];
    for (parameters, password, code) in cases {
        let error = refusal(&cluster, parameters, password).await?;
        assert_eq!((error.code.as_str(), error.severity.as_str()), (code, "FATAL"), "{parameters:?}: {error:?}");
    }
    let wrong = refusal(&cluster, &[("user", "guest"), ("database", DATABASE)], "wrong").await?;
    let unknown = refusal(&cluster, &[("user", "nobody"), ("database", DATABASE)], "wrong").await?;
    assert_eq!(wrong.message.replace("guest", "nobody"), unknown.message);
    let mut guest = Wire::log_in(&cluster, &[("user", "guest"), ("database", DATABASE)], "guest").await?.expect("may");
    assert_eq!(guest.query("SELECT current_user").await?.text_rows(), ["guest"]);
    try_until("all others are forgotten", || async { Ok(cluster.router().status().clients == 2) }).await
}

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_ups_that_are_none_are_refused_and_others_go_on() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut bystander = Wire::connect(&cluster).await?;
    let endless = vec![b'a'; 9_000];
    let cases: [(&str, Vec<u8>); 9] = [
        ("a length of 0", vec![0, 0, 0, 0]),
        ("a length of 7", vec![0, 0, 0, 7, 0, 3, 0]),
        ("a length of 10001", 10_001_u32.to_be_bytes().to_vec()),
        ("a length of 4 GiB", vec![0xff; 16]),
        ("another protocol", with_length(&[0, 2, 0, 0, 0])),
        ("parameters without an end", with_length(&[&[0, 3, 0, 0][..], &endless[..]].concat())),
        ("a name without a value", with_length(b"\0\x03\0\0user\0")),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("nothing but zeros", vec![0; 64]),
    ];
    for (what, bytes) in cases {
        let mut wire = Wire::unauthenticated(&cluster).await?;
        wire.send(&bytes).await?;
        let answer = wire.until_closed().await?;
        // PostgreSQL closes the connection without a word where the length is none (`ProcessStartupPacket`).
        let (tags, code) = match what {
            "another protocol" => ("E", "0A000"),
            "parameters without an end" | "a name without a value" => ("E", "08P01"),
            _ => ("", "00000"),
        };
        assert_eq!((answer.tags().as_str(), answer.code().as_str()), (tags, code), "{what}: {answer:?}");
    }
    assert_eq!(bystander.query("SELECT 1").await?.text_rows(), ["1"]);
    Ok(())
}

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_log_in_nothing_runs_and_no_large_message_is_taken() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let begin = startup(&[("user", USER), ("database", DATABASE)]);
    let cases: [(&str, Vec<u8>); 5] = [
        ("a query instead of a password", crate::wire::query("INSERT INTO numbers VALUES (99, 99)")),
        ("a password of 1 GiB", vec![b'p', 0x40, 0, 0, 0]),
        ("a length below 4", vec![b'p', 0, 0, 0, 3]),
        ("an empty password", message(b'p', b"")),
        ("a mechanism that nobody offered", message(b'p', b"PLAIN\0\0\0\0\x04abcd")),
    ];
    for (what, bytes) in cases {
        let mut wire = Wire::unauthenticated(&cluster).await?;
        wire.send(&begin).await?;
        assert_eq!(wire.next().await?.tag, b'R', "{what}");
        wire.send(&bytes).await?;
        let answer = wire.until_closed().await?;
        assert_eq!((answer.tags().as_str(), answer.code().as_str()), ("E", "08P01"), "{what}: {answer:?}");
    }
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("SELECT count(*) FROM numbers").await?.text_rows(), ["10"]);
    Ok(())
}

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_encryption_are_declined_and_the_log_in_goes_on() -> anyhow::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let cluster = start_usual(0).await?;
    for code in [80_877_103_u32, 80_877_104] {
        let mut stream = tokio::net::TcpStream::connect(cluster.router().local_address()).await?;
        stream.write_all(&with_length(&code.to_be_bytes())).await?;
        let mut answer = [0];
        stream.read_exact(&mut answer).await?;
        assert_eq!(&answer, b"N");
        stream.write_all(&startup(&[("user", USER), ("database", DATABASE)])).await?;
        stream.read_exact(&mut answer).await?;
        assert_eq!(&answer, b"R");
    }
    Ok(())
}
