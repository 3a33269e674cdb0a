//! What a session has set, made and prepared stays right wherever its statements run, and goes when it should.

use onecopy_tests::cluster::TestCluster;

use crate::harness::{session_back_ends, start, start_usual, try_until};
use crate::wire::{Wire, expect, message};

const SERVERS: [&str; 3] = ["leader", "follower-1", "follower-2"];

async fn expect_everywhere(wire: &mut Wire, sql: &str, value: &str) -> anyhow::Result<()> {
    for server in SERVERS {
        wire.query(&format!("SET onecopy.server = '{server}'")).await?;
        expect(wire, sql, &[value]).await?;
    }
    wire.query("RESET onecopy.server").await?;
    wire.query("BEGIN").await?;
    expect(wire, sql, &[value]).await?;
    wire.query("COMMIT").await?;
    Ok(())
}

/// Statements and what `work_mem` is after each.
type Steps = &'static [(&'static str, &'static str)];

const SETTINGS: &str = "SELECT current_setting('work_mem'), current_setting('search_path'), \
     current_setting('TimeZone'), coalesce(current_setting('shop.tenant', true), '')";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_follow_the_session_to_every_server_and_back() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut other = Wire::connect(&cluster).await?;
    expect(&mut wire, "SHOW work_mem", &["4MB"]).await?;
    for sql in [
        "SET work_mem = '6MB'",
        "SET search_path = one, \"Two\", public",
        "SET TIME ZONE 'Asia/Tokyo'",
        "SET shop.tenant = '42'",
    ] {
        assert_eq!(wire.query(sql).await?.commands(), ["SET"], "{sql}");
    }
    let set = "6MB|one, \"Two\", public|Asia/Tokyo|42";
    expect_everywhere(&mut wire, SETTINGS, set).await?;
    let usual = "4MB|\"$user\", public|Etc/UTC|";
    let usual_zone = other.query("SHOW TimeZone").await?.text_rows()[0].clone();
    let usual = usual.replace("Etc/UTC", &usual_zone);
    expect_everywhere(&mut other, SETTINGS, &usual).await?;
    assert_eq!(wire.query("SET work_mem = 'much'").await?.code(), "22023");
    assert_eq!(wire.query("SET no_such_setting = 1").await?.code(), "42704");
    expect_everywhere(&mut wire, SETTINGS, set).await?;
    wire.query("RESET work_mem").await?;
    expect_everywhere(&mut wire, SETTINGS, &set.replace("6MB", "4MB")).await?;
    wire.query("SET work_mem TO DEFAULT").await?;
    expect_everywhere(&mut wire, SETTINGS, &set.replace("6MB", "4MB")).await?;
    assert_eq!(wire.query("DISCARD ALL").await?.commands(), ["DISCARD ALL"]);
    expect_everywhere(&mut wire, SETTINGS, &usual).await?;
    wire.query("SET work_mem = '7MB'; SET shop.tenant = '43'").await?;
    assert_eq!(wire.query("RESET ALL").await?.commands(), ["RESET"]);
    expect_everywhere(&mut wire, SETTINGS, &usual).await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_of_a_transaction_last_as_long_as_postgresql_says() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let show = "SELECT current_setting('work_mem')";
    for begin in ["BEGIN", "BEGIN READ ONLY"] {
        let mut wire = Wire::connect(&cluster).await?;
        // The last column: what holds after each statement; then after the end.
        let cases: [(&str, Steps, &str); 7] = [
            ("COMMIT", &[("SET work_mem = '5MB'", "5MB")], "5MB"),
            ("ROLLBACK", &[("SET work_mem = '6MB'", "6MB")], "4MB"),
            ("COMMIT", &[("SET LOCAL work_mem = '7MB'", "7MB")], "4MB"),
            ("COMMIT", &[("SET work_mem = '8MB'", "8MB"), ("SET LOCAL work_mem = '9MB'", "9MB")], "8MB"),
            ("COMMIT", &[("SAVEPOINT a", "4MB"), ("SET work_mem = '5MB'", "5MB"), ("ROLLBACK TO a", "4MB")], "4MB"),
            (
                "COMMIT",
                &[
                    ("SET work_mem = '5MB'", "5MB"),
                    ("SAVEPOINT a", "5MB"),
                    ("SET work_mem = '6MB'", "6MB"),
                    ("ROLLBACK TO a", "5MB"),
                ],
                "5MB",
            ),
            ("COMMIT", &[("SET work_mem = '5MB'", "5MB"), ("RESET work_mem", "4MB")], "4MB"),
        ];
        for (number, (end, statements, after)) in cases.iter().enumerate() {
            let what = format!("{begin}, case {number}");
            wire.query("DISCARD ALL").await?;
            wire.query(begin).await?;
            for (sql, value) in *statements {
                assert_eq!(wire.query(sql).await?.code(), "00000", "{what}: {sql}");
                assert_eq!(wire.query(show).await?.text_rows(), [*value], "{what}: {sql}");
            }
            wire.query(end).await?;
            for _ in 0..6 {
                assert_eq!(wire.query(show).await?.text_rows(), [*after], "{what}");
            }
            wire.query("BEGIN").await?;
            assert_eq!(wire.query(show).await?.text_rows(), [*after], "{what}, on the leader");
            wire.query("COMMIT").await?;
        }
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_of_a_session_stays_with_it() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut other = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE SEQUENCE counter",
        "SELECT nextval('counter')",
        "CREATE TEMP TABLE mine AS SELECT 1 AS a",
        "PREPARE twice(int) AS SELECT 2 * $1",
        "BEGIN; DECLARE held CURSOR WITH HOLD FOR SELECT id FROM numbers ORDER BY id; COMMIT",
        "SELECT pg_advisory_lock(7)",
    ] {
        assert_eq!(wire.query(sql).await?.code(), "00000", "{sql}");
    }
    for round in 0..5 {
        expect(&mut other, "SELECT count(*) FROM numbers", &["10"]).await?;
        expect(&mut wire, "SELECT currval('counter')", &["1"]).await?;
        expect(&mut wire, "SELECT count(*) FROM mine", &[&(round + 1).to_string()]).await?;
        wire.query("INSERT INTO mine VALUES (2)").await?;
        expect(&mut wire, "EXECUTE twice(21)", &["42"]).await?;
        expect(&mut wire, "FETCH 1 FROM held", &[&(round + 1).to_string()]).await?;
        expect(&mut other, "SELECT pg_try_advisory_lock(7)", &["f"]).await?;
    }
    assert_eq!(other.query("SELECT currval('counter')").await?.code(), "55000");
    assert_eq!(other.query("SELECT count(*) FROM mine").await?.code(), "42P01");
    assert_eq!(other.query("EXECUTE twice(1)").await?.code(), "26000");
    assert_eq!(other.query("FETCH 1 FROM held").await?.code(), "34000");
    assert_eq!(wire.query("DISCARD ALL").await?.code(), "00000");
    expect(&mut other, "SELECT pg_try_advisory_lock(7)", &["t"]).await?;
    assert_eq!(wire.query("SELECT count(*) FROM mine").await?.code(), "42P01");
    assert_eq!(wire.query("EXECUTE twice(1)").await?.code(), "26000");
    expect(&mut wire, "SELECT count(*) FROM numbers", &["10"]).await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_reach_an_idle_listener() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut listener = Wire::connect(&cluster).await?;
    let mut sender = Wire::connect(&cluster).await?;
    listener.query("LISTEN news").await?;
    for (sql, payload) in [("NOTIFY news, 'one'", "one"), ("SELECT pg_notify('news', 'two')", "two")] {
        assert_eq!(sender.query(sql).await?.code(), "00000");
        let frame = listener.next().await?;
        assert_eq!(frame.tag, b'A');
        let body = String::from_utf8_lossy(&frame.body()[4..]).into_owned();
        assert_eq!(body, format!("news\0{payload}\0"));
    }
    sender.query("BEGIN; NOTIFY news, 'rolled back'; ROLLBACK; NOTIFY news, 'three'").await?;
    assert!(listener.next().await?.body().ends_with(b"news\0three\0"));
    listener.query("UNLISTEN *").await?;
    sender.query("NOTIFY news, 'unheard'").await?;
    assert_eq!(listener.query("SELECT 1").await?.tags(), "TDCZ");
    Ok(())
}

/// Drivers tell their own notifications from others' by the number that they got at log-in.
///
/// The number that a client gets at log-in is the one that its notifications carry, and no server process has it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f66_a_notification_comes_from_the_session_that_its_client_knows() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let (mut listener, mut sender) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    listener.query("LISTEN news").await?;
    let heard = |answer: &crate::wire::Answer| {
        answer.frames.iter().find(|frame| frame.tag == b'A').map(|frame| frame.body().slice(..4))
    };
    for _ in 0..2 {
        let own = listener.query("NOTIFY news, 'own'").await?;
        assert_eq!(heard(&own), Some(listener.cancel_key.slice(..4)), "{own:?}");
        sender.query("BEGIN; NOTIFY news, 'other'; COMMIT").await?;
        assert_eq!(listener.next().await?.body().slice(..4), sender.cancel_key.slice(..4), "while it is idle");
    }
    assert_ne!(sender.cancel_key.slice(..4), listener.cancel_key.slice(..4));
    // No server process has the number of a session, and one that no session has means nobody.
    expect(&mut listener, "SELECT pg_terminate_backend(2147483647)", &["f"]).await
}

/// What a client is told at log-in is in force, also where another session has had the same settings before.
///
/// The settings that are reported at log-in are those in force; a parameter counts more than the same among the
/// options, as with PostgreSQL.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f67_what_is_reported_at_log_in_is_in_force() -> anyhow::Result<()> {
    use onecopy_tests::servers::{DATABASE, PASSWORD, USER};
    let cluster = start_usual(0).await?;
    let base = [("user", USER), ("database", DATABASE)];
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[("options", "-c client_encoding=LATIN1 -c TimeZone=Asia/Tokyo")], "LATIN1|Asia/Tokyo"),
        (&[("client_encoding", "latin-1"), ("TimeZone", "Asia/Tokyo")], "LATIN1|Asia/Tokyo"),
        (&[("client_encoding", "'utf-8'"), ("timezone", "UTC")], "UTF8|UTC"),
        (&[("client_encoding", "UTF8"), ("options", "-c client_encoding=LATIN1 -c timezone=UTC")], "UTF8|UTC"),
        (&[("options", "--client-encoding=unicode --timezone=UTC")], "UTF8|UTC"),
        (&[("options", "-c client_encoding=LATIN1"), ("timezone", "UTC")], "LATIN1|UTC"),
    ];
    for (parameters, expected) in cases {
        for round in 0..2 {
            let mut wire =
                Wire::log_in(&cluster, &[&base[..], parameters].concat(), PASSWORD).await?.expect("may log in");
            let told = |name: &str| {
                wire.reported.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.clone())
            };
            let told =
                format!("{}|{}", told("client_encoding").unwrap_or_default(), told("TimeZone").unwrap_or_default());
            assert_eq!(told, expected, "{parameters:?}, round {round}");
            for begin in ["SELECT", "BEGIN"] {
                wire.query(begin).await?;
                expect(
                    &mut wire,
                    "SELECT current_setting('client_encoding'), current_setting('TimeZone')",
                    &[expected],
                )
                .await?;
                wire.query("ROLLBACK").await?;
            }
        }
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_objects_are_written_and_read_in_transactions() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("BEGIN").await?;
    let id = wire.query("SELECT lo_create(0)").await?.text_rows()[0].clone();
    expect(&mut wire, &format!("SELECT lo_open({id}, 131072)"), &["0"]).await?;
    expect(&mut wire, "SELECT lowrite(0, 'large')", &["5"]).await?;
    wire.query("COMMIT").await?;
    wire.query("BEGIN").await?;
    expect(&mut wire, &format!("SELECT lo_open({id}, 262144)"), &["0"]).await?;
    expect(&mut wire, "SELECT encode(loread(0, 10), 'escape')", &["large"]).await?;
    wire.query("COMMIT").await?;
    expect(&mut wire, &format!("SELECT encode(lo_get({id}), 'escape')"), &["large"]).await?;
    expect(&mut wire, &format!("SELECT lo_unlink({id})"), &["1"]).await?;
    assert_eq!(wire.query(&format!("SELECT lo_get({id})")).await?.code(), "42704");
    Ok(())
}

/// `FunctionCall` of the function with this number: arguments and result are binary.
fn call(function: u32, arguments: &[&[u8]]) -> Vec<u8> {
    let mut body = function.to_be_bytes().to_vec();
    body.extend([0, 1, 0, 1, 0, arguments.len() as u8]);
    for argument in arguments {
        body.extend((argument.len() as u32).to_be_bytes());
        body.extend(*argument);
    }
    body.extend([0, 1]);
    message(b'F', &body)
}

/// libpq and pgjdbc read and write large objects by messages that call functions by their numbers.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn functions_are_called_by_their_numbers() -> anyhow::Result<()> {
    const MODE: [u8; 4] = 0x6_0000_u32.to_be_bytes();
    const DESCRIPTOR: [u8; 4] = [0; 4];
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let result = |answer: &crate::wire::Answer| {
        let frame = answer.frames.iter().find(|frame| frame.tag == b'V');
        frame.unwrap_or_else(|| panic!("no result: {answer:?}")).body().slice(4..)
    };
    wire.query("BEGIN").await?;
    let answer = wire.ask(&call(957, &[&MODE])).await?;
    assert_eq!((answer.tags().as_str(), answer.status()?), ("VZ", 'T'), "{answer:?}");
    let object = result(&answer);
    assert_eq!(result(&wire.ask(&call(952, &[&object, &MODE])).await?), DESCRIPTOR[..]);
    assert_eq!(result(&wire.ask(&call(955, &[&DESCRIPTOR, b"large"])).await?), [0, 0, 0, 5][..]);
    assert_eq!(wire.query("COMMIT").await?.commands(), ["COMMIT"]);
    wire.query("BEGIN").await?;
    wire.ask(&call(952, &[&object, &MODE])).await?;
    assert_eq!(result(&wire.ask(&call(954, &[&DESCRIPTOR, &[0, 0, 0, 9]])).await?), b"large"[..]);
    let answer = wire.ask(&call(952, &[&[0, 0, 0, 1], &MODE])).await?;
    assert_eq!((answer.code().as_str(), answer.status()?), ("42704", 'E'), "there is no such object");
    assert_eq!(wire.ask(&call(954, &[&DESCRIPTOR, &[0, 0, 0, 9]])).await?.code(), "25P02");
    wire.query("ROLLBACK").await?;
    // Outside a transaction each call commits by itself.
    assert_eq!(result(&wire.ask(&call(964, &[&object])).await?), [0, 0, 0, 1][..]);
    expect(&mut wire, "SELECT count(*) FROM pg_largeobject_metadata", &["0"]).await?;
    // What any other function leaves behind is there for the session's next statement: pg_advisory_lock(bigint).
    let answer = wire.ask(&call(2880, &[&7_u64.to_be_bytes()])).await?;
    assert_eq!((answer.code().as_str(), answer.status()?), ("00000", 'I'));
    let mut other = Wire::connect(&cluster).await?;
    expect(&mut other, "SELECT pg_try_advisory_lock(7)", &["f"]).await?;
    expect(&mut wire, "SELECT pg_advisory_unlock(7)", &["t"]).await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_with_transactions_inside_end_as_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let add = |by: i32| format!("UPDATE numbers SET value = value + {by} WHERE id = 1");
    // Message, SQLSTATE, status afterwards, value afterwards (after a rollback of what is open).
    let cases = [
        (format!("{}; {}", add(1), add(1)), "00000", 'I', 2),
        (format!("{}; SELECT 1/0; {}", add(1), add(1)), "22012", 'I', 2),
        (format!("BEGIN; {}; COMMIT; {}; SELECT 1/0", add(1), add(10)), "22012", 'I', 3),
        (format!("{}; BEGIN; {}", add(1), add(1)), "00000", 'T', 3),
        (format!("{}; COMMIT; {}", add(1), add(1)), "00000", 'I', 5),
        (format!("BEGIN; {}; SELECT 1/0; COMMIT; {}", add(1), add(1)), "22012", 'E', 5),
        (format!("BEGIN; {}; ROLLBACK; {}", add(1), add(1)), "00000", 'I', 6),
        (format!("{}; ROLLBACK; SELECT 1", add(1)), "00000", 'I', 6),
        (format!("BEGIN; SAVEPOINT a; {}; ROLLBACK TO a; {}; RELEASE a; COMMIT", add(10), add(1)), "00000", 'I', 7),
        (format!("BEGIN READ ONLY; {}", add(1)), "25006", 'E', 7),
        ("BEGIN; SELECT 1; COMMIT; BEGIN; SELECT 2".to_owned(), "00000", 'T', 7),
        (" ; ;; ".to_owned(), "00000", 'I', 7),
    ];
    for (sql, code, status, value) in cases {
        let answer = wire.query(&sql).await?;
        assert_eq!((answer.code().as_str(), answer.status()?), (code, status), "{sql}: {:?}", answer.errors());
        if status != 'I' {
            wire.query("ROLLBACK").await?;
        }
        expect(&mut wire, "SELECT value FROM numbers WHERE id = 1", &[&value.to_string()]).await?;
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn savepoints_take_back_what_came_after_them() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("BEGIN").await?;
    wire.query("UPDATE numbers SET value = 1 WHERE id = 1").await?;
    wire.query("SAVEPOINT one").await?;
    assert_eq!(wire.query("UPDATE numbers SET value = 1 / 0").await?.status()?, 'E');
    assert_eq!(wire.query("SELECT 1").await?.code(), "25P02");
    assert_eq!(wire.query("ROLLBACK TO one").await?.status()?, 'T');
    expect(&mut wire, "SELECT value FROM numbers WHERE id = 1", &["1"]).await?;
    assert_eq!(wire.query("ROLLBACK TO missing").await?.code(), "3B001");
    assert_eq!(wire.query("ROLLBACK TO one").await?.status()?, 'T');
    wire.query("UPDATE numbers SET value = 2 WHERE id = 2").await?;
    assert_eq!(wire.query("COMMIT").await?.commands(), ["COMMIT"]);
    expect(&mut wire, "SELECT value FROM numbers WHERE id < 3 ORDER BY id", &["1", "2"]).await?;
    assert_eq!(wire.query("SAVEPOINT outside").await?.code(), "25P01");
    // In a read-only transaction at an epoch as well.
    wire.query("BEGIN READ ONLY").await?;
    expect(&mut wire, "SELECT value FROM numbers WHERE id = 1", &["1"]).await?;
    wire.query("SAVEPOINT one").await?;
    assert_eq!(wire.query("SELECT 1 / 0").await?.code(), "22012");
    wire.query("ROLLBACK TO one").await?;
    expect(&mut wire, "SELECT value FROM numbers WHERE id = 2", &["2"]).await?;
    assert_eq!(wire.query("COMMIT").await?.commands(), ["COMMIT"]);
    Ok(())
}

/// With fewer back ends than sessions each gets one when it needs it, and nobody sees another's state.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn back_ends_passed_between_idle_sessions_keep_their_states_apart() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.leader_backends_max = 2).await?;
    let mut sessions = Vec::new();
    for number in 0..6 {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query(&format!("SET work_mem = '{}MB'", 10 + number)).await?;
        let prepare = crate::wire::parse("mine", &format!("SELECT {number} + value FROM numbers WHERE id = $1"));
        wire.ask(&[prepare, crate::wire::sync()].concat()).await?;
        sessions.push(wire);
    }
    for round in 0..4 {
        for (number, wire) in sessions.iter_mut().enumerate() {
            wire.query("BEGIN").await?;
            expect(wire, "SHOW work_mem", &[&format!("{}MB", 10 + number)]).await?;
            wire.query("UPDATE numbers SET value = value + 1 WHERE id = 1").await?;
            let run =
                [crate::wire::bind("", "mine", &["1"]), crate::wire::execute("", 0), crate::wire::sync()].concat();
            let value = round * 6 + number + 1 + number;
            assert_eq!(wire.ask(&run).await?.text_rows(), [value.to_string()]);
            assert_eq!(wire.query("COMMIT").await?.commands(), ["COMMIT"]);
        }
    }
    // One that was ended for another is seen for a moment more.
    try_until("no more back ends than may be", || async { Ok(session_back_ends(&cluster).await? <= 2) }).await?;
    // Sessions with state that cannot be moved keep theirs.
    let mut first = sessions.remove(0);
    first.query("CREATE TEMP TABLE mine (a int)").await?;
    let mut second = sessions.remove(0);
    second.query("CREATE SEQUENCE counter").await?;
    expect(&mut second, "SELECT nextval('counter')", &["1"]).await?;
    for wire in &mut sessions {
        let _ = wire.query("SELECT count(*) FROM numbers").await?;
    }
    expect(&mut first, "SELECT count(*) FROM mine", &["0"]).await?;
    // A sequence's last value goes with the back end that was passed on: told clearly, and never another session's.
    let answer = second.query("SELECT currval('counter')").await?;
    assert!(answer.text_rows() == ["1"] || answer.code() == "55000", "{answer:?}");
    second.query("BEGIN").await?;
    expect(&mut second, "SELECT nextval('counter')", &["2"]).await?;
    expect(&mut second, "SELECT currval('counter')", &["2"]).await
}

/// Logs in as a role to which the table `letters` shows what is of the tenant that `tenant` gives.
async fn of_a_tenant(cluster: &TestCluster, tenant: &str) -> anyhow::Result<Wire> {
    use onecopy_tests::servers::{DATABASE, PASSWORD};
    let mut owner = Wire::connect(cluster).await?;
    for sql in [
        "CREATE TABLE letters (tenant text, letter text)",
        "INSERT INTO letters VALUES ('a', 'x'), ('a', 'y'), ('b', 'z')",
        "ALTER TABLE letters ENABLE ROW LEVEL SECURITY",
        "CREATE FUNCTION tenant() RETURNS text LANGUAGE sql VOLATILE RETURN current_setting('app.tenant', true)",
        &format!("CREATE POLICY by_tenant ON letters USING (tenant = {tenant})"),
        &format!("CREATE ROLE application LOGIN PASSWORD '{PASSWORD}'"),
        "GRANT SELECT ON letters, numbers TO application",
    ] {
        assert_eq!(owner.query(sql).await?.code(), "00000", "{sql}");
    }
    let parameters = [("user", "application"), ("database", DATABASE)];
    Ok(Wire::log_in(cluster, &parameters, PASSWORD).await?.expect("may log in"))
}

/// A READ ONLY transaction that begins with SET LOCAL reads what the same on one server reads, also what runs on the
/// leader only (row security by a VOLATILE function), wherever its setting ran first, and leaves nothing of it behind.
///
/// Settings before its first read never decide what a READ ONLY transaction may read.
///
/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f85_settings_before_a_read_never_decide_what_a_read_only_transaction_may_read() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = of_a_tenant(&cluster, "tenant()").await?;
    let mut moved = 0;
    for round in 0..20 {
        let (tenant, count) = if round % 2 == 0 { ("a", "2") } else { ("b", "1") };
        expect(&mut wire, "SELECT count(*) FROM numbers", &["10"]).await?;
        for sql in ["BEGIN READ ONLY", &format!("SET LOCAL app.tenant = '{tenant}'")] {
            assert_eq!(wire.query(sql).await?.code(), "00000", "{round}: {sql}");
        }
        let is_at_epoch = wire.query("SHOW onecopy.served_by").await?.text_rows()[0].contains("at epoch");
        expect(&mut wire, "SET search_path = public", &[]).await?;
        expect(&mut wire, "SELECT count(*) FROM letters", &[count]).await?;
        let is_still = wire.query("SHOW onecopy.served_by").await?.text_rows()[0].contains("at epoch");
        assert!(!is_still, "{round}: the leader has answered");
        moved += usize::from(is_at_epoch);
        expect(&mut wire, "SELECT current_setting('search_path')", &["public"]).await?;
        assert_eq!(wire.query("UPDATE numbers SET value = 1").await?.code(), "25006", "{round}: it is READ ONLY");
        wire.query("ROLLBACK").await?;
        // Neither here nor on the back end that the leader has lent.
        expect(&mut wire, "SELECT count(*) FROM letters", &["0"]).await?;
        expect(&mut wire, "SELECT current_setting('search_path')", &["\"$user\", public"]).await?;
        wire.query("BEGIN").await?;
        expect(&mut wire, "SELECT current_setting('search_path')", &["\"$user\", public"]).await?;
        wire.query("COMMIT").await?;
    }
    assert!(moved > 0, "no setting was placed at an epoch");
    Ok(())
}

/// A READ ONLY transaction that has read an epoch reads there under row security as well, by the settings that it has
/// made for itself, and nobody after it does.
///
/// A READ ONLY transaction that reads an epoch reads there under row security as well, by the settings that it has made
/// for itself.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f89_row_security_by_a_setting_holds_in_a_transaction_that_reads_an_epoch() -> anyhow::Result<()> {
    const LETTERS: &str = "SELECT count(*) FROM letters";
    let cluster = start_usual(1).await?;
    let mut wire = of_a_tenant(&cluster, "current_setting('app.tenant', true)").await?;
    let mut at_epochs = 0;
    for round in 0..20 {
        for sql in ["BEGIN READ ONLY", "SELECT count(*) FROM numbers"] {
            assert_eq!(wire.query(sql).await?.code(), "00000", "{round}: {sql}");
        }
        let place = wire.query("SHOW onecopy.served_by").await?.text_rows()[0].clone();
        at_epochs += usize::from(place.contains("at epoch"));
        expect(&mut wire, LETTERS, &["0"]).await?;
        let sets = ["SET LOCAL app.tenant = 'a'", "SELECT set_config('app.tenant', 'a', true)"][round % 2];
        assert_eq!(wire.query(sets).await?.code(), "00000", "{round}: {sets}");
        expect(&mut wire, LETTERS, &["2"]).await?;
        assert_eq!(wire.query("SET LOCAL app.tenant = 'b'").await?.code(), "00000", "{round}");
        expect(&mut wire, "SELECT letter FROM letters", &["z"]).await?;
        expect(&mut wire, "SHOW onecopy.served_by", &[&place]).await?;
        wire.query(["COMMIT", "ROLLBACK"][round % 2]).await?;
        expect(&mut wire, LETTERS, &["0"]).await?;
    }
    assert!(at_epochs > 0, "no transaction was placed at an epoch");
    Ok(())
}
