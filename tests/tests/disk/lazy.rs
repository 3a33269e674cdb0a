//! A disk whose content is on another host: a database in a guest answers from it at once, stands the link's absence,
//! and in the end everything is here.

use std::convert::Infallible;
use std::path::Path;
use std::time::{Duration, Instant};

use onecopy_disk::source::Source;
use onecopy_disk::{BaseSpecification, CreateOptions, Disk, Hydration, OpenOptions, View};
use onecopy_disk_server::DiskClient;
use onecopy_disk_server::protocol::Request;
use onecopy_guest_agent::protocol::StopMode;
use onecopy_hypervisor::configuration::{Disk as GuestDisk, DiskBackend, NbdServer};
use onecopy_testing::{look_until, try_until_async};
use onecopy_tests::guest::{IMAGE, Image, Saved, TestGuest};

use crate::nbd_server::{NbdServerProcess, ask_disk};
use crate::network::Network;

const TIMEOUT: Duration = Duration::from_secs(240);
const PORT: u16 = 10809;
/// How long the wire is out at least; it stays out until that is noticed.
const CUT: Duration = Duration::from_secs(10);
const LIMIT_BYTES_PER_SECOND: u64 = 1 << 20;
/// Reads all of the table.
const QUESTION: &str = "SELECT count(*), sum(hashtext(text)::bigint) FROM kept";

fn root(socket: &Path) -> GuestDisk {
    let server = NbdServer::Unix(socket.to_owned());
    GuestDisk::new("root", DiskBackend::Nbd { server, export: String::new(), reconnect_delay_s: 60 })
}

/// Fills a database on a disk that holds the root file system of a guest with an empty one. What the database answers.
async fn prepare(server: &NbdServerProcess, socket: &Path) -> String {
    let directory = TestGuest::directory().expect("a directory");
    let guest = TestGuest::restored_from(Saved::Initialized, directory, |configuration, _| {
        configuration.disks[0] = root(socket);
        Ok(())
    })
    .await;
    let guest = guest.unwrap_or_else(|error| panic!("{error:#}\n{}", server.said()));
    guest.agent().start_postgres(TIMEOUT).await.expect("the guest does it");
    let rows = "CREATE TABLE kept AS SELECT number, repeat(md5(number::text), 8) AS text \
                FROM generate_series(1, 60000) AS number";
    guest.sql(rows).await.expect("the guest does it");
    guest.sql("VACUUM FREEZE kept").await.expect("the guest does it");
    let answer = guest.sql(QUESTION).await.expect("the guest does it");
    guest.agent().stop_postgres(StopMode::Fast, TIMEOUT).await.expect("the guest does it");
    let (ending, _directory) = guest.power_down().await.expect("the guest ends");
    assert!(ending.is_orderly(), "{ending:?}");
    answer
}

fn hydration(disk: &Path) -> Hydration {
    ask_disk(disk, DiskClient::info).expect("the server answers").hydration.expect("a copy")
}

fn set_limit(disk: &Path, bytes_per_second: Option<u64>) {
    let request = Request::SetLimit { bytes_per_second };
    ask_disk(disk, |server| server.ask::<serde_json::Value>(&request)).expect("the server answers");
}

/// Where two sources differ first.
fn first_difference(one: &dyn Source, other: &dyn Source) -> Option<u64> {
    assert_eq!(one.size_bytes(), other.size_bytes());
    const STEP_BYTES: u64 = 4 << 20;
    let (mut here, mut there) = (vec![0; STEP_BYTES as usize], vec![1; STEP_BYTES as usize]);
    (0..one.size_bytes()).step_by(STEP_BYTES as usize).find(|at| {
        one.read(*at, &mut here).expect("it is read");
        other.read(*at, &mut there).expect("it is read");
        here != there
    })
}

/// A database in a guest answers from a disk whose content is on another host, stands 10 s without the link and a
/// killed server without an error, and in the end the copy equals the original and the other host is needed no more.
///
/// Spec: A5, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b25_a_database_answers_from_a_disk_whose_content_is_on_another_host() {
    let network = Network::make();
    let directory = TestGuest::directory().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (source, source_socket) = (at("source"), at("source.sock"));
    let base = Some(BaseSpecification::Raw { path: Saved::Initialized.root_in(directory.path()).await.unwrap() });
    let size_bytes = std::fs::metadata(at("root.img")).unwrap().len();
    Disk::create(&source, &CreateOptions { size_bytes, base, copy_base: false }).unwrap();
    let space = network.space();
    let address = format!("{}:{PORT}", network.address(2));
    let there = ["ip", "netns", "exec", &space];
    let arguments = ["--no-page-map", "--nbd", &address, "--nbd-unencrypted"];
    let mut far = NbdServerProcess::start_in(&there, &source, &source_socket, &arguments).unwrap();
    let expected = prepare(&far, &source_socket).await;
    ask_disk(&source, |server| server.snapshot("prepared")).unwrap();

    let (lazy, socket) = (at("lazy"), at("lazy.sock"));
    let url = format!("nbd://{address}/snapshot/prepared");
    let base = Some(BaseSpecification::Nbd { url, tls: None });
    Disk::create(&lazy, &CreateOptions { size_bytes, base, copy_base: true }).unwrap();
    // A snapshot before the guest writes: it shows every byte of the base, so all of it must come.
    let disk = Disk::open(&lazy, OpenOptions::default()).unwrap();
    disk.set_hydration_limit(Some(0));
    disk.snapshot("arrived").unwrap();
    disk.close().unwrap();
    let limit = LIMIT_BYTES_PER_SECOND.to_string();
    let mut near = NbdServerProcess::start(&lazy, &socket, &["--no-page-map", "--limit", &limit]).unwrap();
    let before = hydration(&lazy);
    let begun = Instant::now();
    let image = Image::find(IMAGE).unwrap();
    let guest = TestGuest::boot_from(&image, TestGuest::directory().unwrap(), root(&socket), |_, _| Ok(())).await;
    let guest = guest.unwrap_or_else(|error| panic!("{error}\n{}\n{}", near.said(), far.said()));
    guest.agent().start_postgres(TIMEOUT).await.unwrap();
    assert_eq!(guest.sql("SELECT count(*) FROM kept WHERE number < 100").await.unwrap(), "99");
    let answered = hydration(&lazy);
    eprintln!("first answer after {:?}: {before:?}, {answered:?}", begun.elapsed());
    assert!(!answered.is_whole && answered.faults > 0 && answered.copied_bytes < answered.total_bytes, "{answered:?}");

    // The wire is out while the whole table is read.
    network.cut();
    let asking = guest.sql(QUESTION);
    let mending = async {
        tokio::time::sleep(CUT).await;
        let cut = try_until_async("it is noticed", async || Ok(hydration(&lazy)), |cut| cut.trouble.is_some()).await;
        network.mend();
        cut
    };
    let (answer, cut) = tokio::join!(asking, mending);
    eprintln!("cut: {cut:?}");
    assert_eq!(answer.unwrap(), expected);
    assert!(cut.is_ok_and(|cut| cut.copied_bytes < cut.total_bytes));

    // Killed in the middle it goes on where it was.
    near.kill().unwrap();
    near.restart().unwrap();
    assert!(hydration(&lazy).copied_bytes > 0);
    set_limit(&lazy, None);
    let whole = look_until(async || Ok::<_, Infallible>(hydration(&lazy).is_whole));
    let is_in_time = tokio::time::timeout(2 * TIMEOUT, whole).await.is_ok();
    assert!(is_in_time, "{:?}\n{}", hydration(&lazy), near.said());
    eprintln!("whole after {:?}", begun.elapsed());
    // All is here: the other host is needed no more.
    let (arrived, original) = (View::open(&lazy, "arrived").unwrap(), View::open(&source, "prepared").unwrap());
    assert_eq!(first_difference(&arrived, &original), None);
    drop((arrived, original));
    network.cut();
    far.kill().unwrap();
    guest.run("echo 3 > /proc/sys/vm/drop_caches").await.unwrap();
    guest.sql("CREATE TABLE later AS SELECT * FROM kept").await.unwrap();
    assert_eq!(guest.sql(&QUESTION.replace("kept", "later")).await.unwrap(), expected);
    near.kill().unwrap();
    near.restart().unwrap();
    assert_eq!(guest.sql(QUESTION).await.unwrap(), expected);
    guest.agent().stop_postgres(StopMode::Fast, TIMEOUT).await.unwrap();
    let (ending, _directory) = guest.power_down().await.unwrap();
    assert!(ending.is_orderly(), "{ending:?}");
}
