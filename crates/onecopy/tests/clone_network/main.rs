//! Clones between two hosts: another network namespace, a wire of 100 Mbit/s, this very program on both ends.

mod breaks;
mod hosts;
mod network;

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onecopy_clone::service::CloneState;
use onecopy_host::remote::{CloneOrder, OrderEvent, order_clone, ping};

use crate::hosts::{SOURCE_PORT, TwoHosts, query};

/// Has the other host make a clone; `tell` hears of it.
async fn order(
    hosts: &TwoHosts,
    order: &CloneOrder,
    tell: impl FnMut(&OrderEvent),
) -> (Vec<OrderEvent>, Option<String>) {
    let (mut events, mut tell) = (Vec::new(), tell);
    let heard = |event: OrderEvent| {
        tell(&event);
        events.push(event);
    };
    let (address, keys) = (hosts.clone_address(), hosts.keys("here"));
    let ordered = order_clone(&address, &keys, order, heard);
    let outcome = tokio::time::timeout(Duration::from_secs(400), ordered).await.expect("it ends");
    (events, outcome.err().map(|error| error.to_string()))
}

/// A clone on another host answers over a slow wire, survives broken connections, and has every row and ctid.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_on_another_host_answers_becomes_whole_and_survives_a_broken_connection() {
    let hosts = TwoHosts::start(100_000).await;
    assert_eq!(
        ping(&hosts.clone_address(), &hosts.keys("here")).await.expect("it is there"),
        env!("CARGO_PKG_VERSION")
    );
    let load = hosts.load().await;
    // `onecopy host` at the source dies while content is missing, and comes back.
    let broken = Mutex::new(Some(hosts.source_host_service()));
    let (again, first_rows) = (Mutex::new(None), Arc::new(Mutex::new(None)));
    let (events, failure) = order(&hosts, &hosts.order("clone"), |event| {
        if let OrderEvent::Answering { .. } = event {
            *again.lock().unwrap() = broken.lock().unwrap().take().map(|host_service| hosts.restart(host_service));
            let (rows, connection) = (Arc::clone(&first_rows), hosts.clone_connection("clone"));
            let asked = async move { query(&connection, "SELECT count(*) FROM item").await };
            *rows.lock().unwrap() = Some(tokio::spawn(asked));
        }
    })
    .await;
    assert_eq!(failure, None, "{events:?}\n{}", hosts.logs());
    load.end().await;
    let place = |wanted: fn(&OrderEvent) -> bool| events.iter().position(wanted);
    assert_eq!(place(|event| matches!(event, OrderEvent::Preparing)), Some(0));
    let frozen = place(|event| matches!(event, OrderEvent::Frozen { .. })).expect("frozen");
    let answering = place(|event| matches!(event, OrderEvent::Answering { .. })).expect("answering");
    assert!(frozen < answering);
    let Some(OrderEvent::Filling(last)) = events.last() else { panic!("{events:?}") };
    assert_eq!(last.state, CloneState::Whole);
    let asked = first_rows.lock().unwrap().take().expect("asked while it was filled");
    assert_eq!(asked.await.expect("asked"), "100000");
    hosts.assert_same("clone").await;
    let target = hosts.order("clone").target;
    assert!(std::fs::symlink_metadata(target.join("PG_VERSION")).expect("a version").is_file());
    assert!(!target.join("onecopy.incomplete").exists());
    hosts.wait_services_gone(&target).await;
    assert_eq!(query(&hosts.source_connection(), "SELECT count(*) FROM pg_replication_slots").await, "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_has_a_clone_made_on_another_host() {
    let hosts = TwoHosts::start(2000).await;
    let (directory, words) = hosts.command_line("clone");
    let output =
        tokio::task::spawn_blocking(move || words.into_command().output().expect("it runs")).await.expect("run");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}\n{complaints}\n{}", hosts.logs());
    assert!(told.contains("\"answering\""), "{told}");
    hosts.assert_same("clone").await;
    hosts.wait_services_gone(&directory).await;
}

/// Hosts talk to hosts of their authority alone, and do what was allowed by name.
///
/// Spec: C3
#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_allowed_is_refused_by_name_and_leaves_nothing() {
    let hosts = TwoHosts::start(100).await;
    let allowed = hosts.order("clone");
    let mut elsewhere = allowed.clone();
    elsewhere.target = hosts.directory.join("not-allowed/data");
    let mut other = allowed.clone();
    other.source = "/etc".into();
    let mut nobody = allowed.clone();
    nobody.origin = nobody.origin.replace(&SOURCE_PORT.to_string(), &(SOURCE_PORT + 1).to_string());
    let mut older = allowed.clone();
    older.major_version = 9;
    let cases = [
        (older, "install PostgreSQL 9 here"),
        (elsewhere, "--target"),
        (other, "--source"),
        (nobody, "cannot connect"),
    ];
    for (wanted, reason) in cases {
        let (events, failure) = order(&hosts, &wanted, |_| {}).await;
        let failure = failure.expect("refused");
        assert!(failure.contains(reason), "{failure}: {events:?}");
        assert!(!wanted.target.exists(), "{}", wanted.target.display());
    }
    let stranger = order_clone(&hosts.clone_address(), &hosts.stranger_keys(), &allowed, |_| {}).await.unwrap_err();
    assert!(stranger.to_string().contains("no trust") || stranger.to_string().contains("broke"), "{stranger}");
    assert_eq!(query(&hosts.source_connection(), "SELECT count(*) FROM pg_replication_slots").await, "0");
}

/// Spec: C3
#[tokio::test(flavor = "multi_thread")]
async fn k22_k23_hosts_do_no_more_for_each_other_than_they_must() {
    let hosts = TwoHosts::start(100).await;
    let marks = hosts.directory.join("marks");
    std::fs::create_dir(&marks).unwrap();
    std::fs::set_permissions(&marks, std::fs::Permissions::from_mode(0o777)).unwrap();
    let source = hosts.source_connection().connect_as_client().await.unwrap();
    // The source is a primary and never runs these; a standby that has its files would.
    for setting in ["restore_command", "archive_cleanup_command", "recovery_end_command"] {
        let command = format!("touch {}/{setting}; false", marks.display());
        source.batch_execute(&format!("ALTER SYSTEM SET {setting} = '{command}'")).await.unwrap();
    }
    for slot in ["of_somebody", "onecopy_of_somebody"] {
        source.execute("SELECT pg_create_physical_replication_slot($1, true)", &[&slot]).await.unwrap();
    }
    let mut wanted = hosts.order("clone");
    wanted.fill.limit_bytes_per_second = None;
    // A slot of somebody else, whose standby is away, whatever its name.
    for slot in ["of_somebody", "onecopy_of_somebody"] {
        let taken = CloneOrder { slot: slot.to_owned(), ..wanted.clone() };
        let failure = order(&hosts, &taken, |_| {}).await.1.expect("refused");
        assert!(failure.contains(&format!("slot \"{slot}\" is not taken")), "{failure}");
        assert!(failure.contains("pg_drop_replication_slot"), "{failure}");
    }
    // The clone's account may have a `.pgpass`: it is not for whom an order names.
    let mut nameless = wanted.clone();
    nameless.connection.password = None;
    let failure = order(&hosts, &nameless, |_| {}).await.1.expect("refused");
    assert!(failure.contains("password \"\" is not taken"), "{failure}");
    // Another host of the same authority has a clone made of what is not its own.
    let third =
        order_clone(&hosts.clone_address(), &hosts.keys("third"), &wanted, |_| {}).await.unwrap_err().to_string();
    assert!(third.contains("another host than the one that ordered"), "{third}");
    let refused = CloneOrder { origin_port: 22, ..wanted.clone() };
    let failure = order(&hosts, &refused, |_| {}).await.1.expect("refused");
    assert!(failure.contains("origin_port 22 is not taken"), "{failure}");
    let mut entries = std::fs::read_dir(hosts.directory.join("clones")).unwrap();
    assert!(entries.next().is_none(), "nothing is left");
    assert_eq!(
        query(
            &hosts.source_connection(),
            "SELECT string_agg(slot_name, ' ' ORDER BY slot_name) FROM pg_replication_slots"
        )
        .await,
        "of_somebody onecopy_of_somebody"
    );
    let (events, failure) = order(&hosts, &wanted, |_| {}).await;
    assert_eq!(failure, None, "{events:?}\n{}", hosts.logs());
    hosts.assert_same("clone").await;
    let clone = hosts.clone_connection("clone");
    for (setting, value) in [
        ("restore_command", "off"),
        ("archive_cleanup_command", "off"),
        ("max_connections", "100"),
        ("shared_buffers", "16MB"),
    ] {
        let shown = query(&clone, &format!("SELECT coalesce(nullif(current_setting('{setting}'), ''), 'off')")).await;
        assert_eq!(shown, value, "{setting}");
    }
    let address = hosts.clone_address().rsplit_once(':').unwrap().0.to_owned();
    assert_eq!(query(&clone, "SHOW listen_addresses").await, address);
    assert_eq!(std::fs::read_to_string(wanted.target.join("postgresql.auto.conf")).unwrap(), "");
    assert_eq!(std::fs::read_dir(&marks).unwrap().count(), 0, "nothing of the source's commands was run");
    hosts.wait_services_gone(&wanted.target).await;
}
