//! What breaks between two hosts while a clone is filled: the wire, the processes on either side.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onecopy_clone::service::CloneState;
use onecopy_host::remote::OrderEvent;
use tokio::task::JoinHandle;

use crate::hosts::{Load, TwoHosts, query};
use crate::order;

/// About 48 MB, 24 seconds at the least.
const NOISE_ROWS: u32 = 88_000;
const CUT: Duration = Duration::from_secs(10);

/// Something that is done once, when the clone answers.
type Blow<T> = Arc<Mutex<Option<JoinHandle<T>>>>;

/// What has travelled when a clone is whole.
struct Travelled {
    /// Bytes of the image.
    total_bytes: u64,
    /// Bytes of everything on the wire since the order.
    sent_bytes: u64,
    /// Bytes of the log among them, headers not counted.
    log_bytes: u64,
}

/// Has a clone made of which all is compared; `strike` begins when it answers. What has travelled and what `strike`
/// gave.
async fn survive<T, F>(hosts: &Arc<TwoHosts>, load: Option<Load>, strike: impl Fn(Arc<TwoHosts>) -> F) -> (Travelled, T)
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let struck: Blow<T> = Arc::default();
    let sent_before = hosts.network.sent_bytes();
    let (events, failure) = order(hosts, &hosts.order("clone"), |event| {
        if let OrderEvent::Answering { .. } = event {
            *struck.lock().expect("nobody panicked with it") = Some(tokio::spawn(strike(Arc::clone(hosts))));
        }
    })
    .await;
    assert_eq!(failure, None, "{:?}\n{}", events.last(), hosts.logs());
    let Some(OrderEvent::Filling(last)) = events.last() else { panic!("{events:?}") };
    assert_eq!(last.state, CloneState::Whole);
    // Before all is compared: reading it sets hint bits on the source, and with checksums each page goes into the log
    // as a whole then. The log first, so that no more of it is taken off than has travelled.
    let log_bytes = hosts.log_bytes("clone").await;
    let sent_bytes = hosts.network.sent_bytes() - sent_before;
    let struck = struck.lock().expect("nobody panicked with it").take().expect("it has answered");
    let struck = struck.await.expect("struck");
    if let Some(load) = load {
        load.end().await;
    }
    hosts.assert_same("clone").await;
    hosts.wait_services_gone(&hosts.order("clone").target).await;
    (Travelled { total_bytes: last.total_bytes, sent_bytes, log_bytes }, struck)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wire_that_is_cut_for_ten_seconds_costs_only_time() {
    let hosts = Arc::new(TwoHosts::start(100).await);
    let noise_bytes = hosts.make_noise(NOISE_ROWS).await;
    let (travelled, (rows, waited)) = survive(&hosts, None, |hosts| async move {
        hosts.network.cut();
        let begin = Instant::now();
        let connection = hosts.clone_connection("clone");
        let asked = tokio::spawn(async move { query(&connection, "SELECT count(bytes) FROM noise").await });
        tokio::time::sleep(CUT).await;
        assert!(!asked.is_finished(), "nothing can have come over a wire that is cut");
        hosts.network.mend();
        (asked.await.expect("answered"), begin.elapsed())
    })
    .await;
    assert_eq!(rows, NOISE_ROWS.to_string());
    let Travelled { total_bytes, sent_bytes, log_bytes } = travelled;
    let image_bytes = sent_bytes - log_bytes;
    eprintln!(
        "{total_bytes} bytes, {noise_bytes} of them noise: {image_bytes} on the wire beside {log_bytes} of log; \
         a read hung for {waited:?}"
    );
    assert!(image_bytes > noise_bytes, "the counter does not count: {image_bytes} of {noise_bytes}");
    // What is not noise is catalogs, which are packed well: were the noise sent twice, or a quarter of it, it would
    // show.
    assert!(image_bytes < total_bytes, "{image_bytes} bytes were sent for {total_bytes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_goes_on_when_the_process_that_fills_it_is_killed() {
    let hosts = Arc::new(TwoHosts::start(100_000).await);
    hosts.make_noise(NOISE_ROWS).await;
    let load = hosts.load().await;
    let (_, rows) = survive(&hosts, Some(load), |hosts| async move {
        hosts.kill_clone_hydrator("clone");
        query(&hosts.clone_connection("clone"), "SELECT count(*) FROM item").await
    })
    .await;
    assert_eq!(rows, "100000");
    assert_eq!(query(&hosts.source_connection(), "SELECT count(*) FROM pg_replication_slots").await, "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_served_on_when_the_process_that_saves_it_is_killed() {
    let hosts = Arc::new(TwoHosts::start(100_000).await);
    hosts.make_noise(NOISE_ROWS).await;
    let load = hosts.load().await;
    let (_, rows) = survive(&hosts, Some(load), |hosts| async move {
        // What is saved until then is not in the source's files any more.
        tokio::time::sleep(Duration::from_millis(500)).await;
        hosts.kill_source_hydrator();
        query(&hosts.clone_connection("clone"), "SELECT count(*) FROM item").await
    })
    .await;
    assert_eq!(rows, "100000");
    assert_eq!(query(&hosts.source_connection(), "SELECT count(*) FROM pg_replication_slots").await, "1");
}
