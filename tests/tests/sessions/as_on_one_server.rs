//! What a client is told message by message, through the router and directly.

use onecopy_tests::cluster::TestCluster;

use super::harness::start_usual;
use super::wire::{Answer, Wire, bind, execute, parse, query, sync};

async fn direct(cluster: &TestCluster) -> anyhow::Result<Wire> {
    Wire::connect_to(cluster.servers.leader().port()).await
}

/// The whole answer, but rows and where in PostgreSQL's source an error comes from.
fn told(answer: &Answer) -> Vec<String> {
    let frames = answer.frames.iter().filter(|frame| !b"SDT".contains(&frame.tag));
    let text = |body: &[u8]| String::from_utf8_lossy(body).replace('\0', " ");
    frames
        .map(|frame| match frame.tag {
            b'E' | b'N' => {
                let body = frame.body();
                let fields =
                    body.split(|byte| *byte == 0).filter(|field| !b"FLR".contains(field.first().unwrap_or(&b'F')));
                format!("{} {}", frame.tag as char, fields.map(text).collect::<Vec<_>>().join(" | "))
            }
            tag => format!("{} {}", tag as char, text(&frame.body())),
        })
        .collect()
}

/// Whatever comes of the messages is the same directly and through the router, and the tables are as before.
async fn compare(cluster: &TestCluster, messages: &[&[u8]]) -> anyhow::Result<Vec<String>> {
    let (mut direct, mut expected) = (direct(cluster).await?, Vec::new());
    for message in messages {
        expected.push(told(&direct.ask(message).await?));
    }
    let (mut routed, mut last) = (Wire::connect(cluster).await?, Vec::new());
    for (message, expected) in messages.iter().zip(expected) {
        last = told(&routed.ask(message).await?);
        assert_eq!(last, expected, "{}", String::from_utf8_lossy(message));
    }
    Ok(last)
}

/// An error at COMMIT names the constraint, as frameworks read it, and hints at no second try where none helps.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_at_commit_says_all_that_it_says_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE du (i int CONSTRAINT du_u UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        "INSERT INTO du VALUES (1)",
        "CREATE TABLE refers (i int CONSTRAINT refers_to REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    let extended = |sql: &str| [parse("", sql), bind("", "", &[]), execute("", 0), sync()].concat();
    for messages in [
        &[&*query("BEGIN"), &query("INSERT INTO du VALUES (1)"), &query("COMMIT")][..],
        &[&query("BEGIN; INSERT INTO du VALUES (1); COMMIT")],
        &[&query("INSERT INTO du VALUES (1); SELECT 1")],
        &[&query("INSERT INTO du VALUES (1)")],
        &[&extended("INSERT INTO du VALUES (1)")],
        &[&*query("BEGIN"), &query("INSERT INTO refers VALUES (99)"), &query("COMMIT")],
    ] {
        let last = compare(&cluster, messages).await?.join("\n");
        assert!(last.contains("DKey (i)=(") && (last.contains("ndu_u") || last.contains("nrefers_to")), "{last}");
        assert!(!last.contains("retried"), "{last}");
    }
    Ok(())
}

/// What PostgreSQL does in several transactions is not wrapped into one.
///
