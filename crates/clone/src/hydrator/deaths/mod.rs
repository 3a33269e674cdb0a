//! Hydrators that are killed at every step, and who comes after them: a successor with all that the keeper holds, or,
//! when the keeper was killed with them, the next service, with nothing but the list in its directory. No server runs:
//! what PostgreSQL would be asked is not.

mod ending;
mod making;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_postgres::{ConnectionParameters, Lsn, ServiceUser};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::clone_job::{CloneJob, Content};
use super::keeper_client::KeeperClient;
use super::making::make_runnable;
use super::record::{Record, to_memory};
use super::{Hydrator, supervision, takeover};
use crate::CloneError;
use crate::fanotify::Journal;
use crate::fill::{Filling, SharedBitmap};
use crate::image::{Image, SmallFile};
use crate::keeper::{Channel, KeptFiles, Message};
use crate::plan::{FillOptions, Plan, Recovery, SourceServer, Warm};
use crate::recovery::{Mode, RecoveryPoint};
use crate::service::{CloneState, Rendezvous, state_without_service};
use crate::source::SourceFiles;
use crate::target::{CloneLocation, MARKER_FILE, Marker, Skeleton};

/// What a keeper is told when its hydrator is dead.
const THE_END: &str = "the end";
const CATALOG: &str = "PG_15_202209061";
const MAJOR_VERSION: u32 = 15;
/// Whoever serves next is through by then.
const DEADLINE: Duration = Duration::from_secs(120);

/// The port of a source that sends everybody away; how many have come.
struct CountingListener {
    port: u16,
    connections: Arc<AtomicUsize>,
}

impl CountingListener {
    /// It stays open until the tests end.
    fn open() -> CountingListener {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, connections) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                counted.fetch_add(1, Ordering::SeqCst);
                drop(connection);
            }
        });
        CountingListener { port, connections }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// A source's directory, with a tablespace, and room for one clone.
struct Harness {
    directory: TempDir,
    plan: Plan,
    image: Arc<Image>,
}

impl Harness {
    fn new(listener: &CountingListener) -> Harness {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| directory.path().join(name);
        let tablespace = at("elsewhere").join(CATALOG).join("5");
        for made in [&at("source/base/5"), &at("source/global"), &at("source/pg_tblspc"), &tablespace, &at("service")] {
            fs::create_dir_all(made).unwrap();
        }
        std::os::unix::fs::symlink(at("elsewhere"), at("source/pg_tblspc/16400")).unwrap();
        for (seed, path) in (1..).zip(["base/5/1259", "base/5/16384", "global/1262"]) {
            fs::write(at("source").join(path), vec![seed; 20_000 * usize::from(seed)]).unwrap();
        }
        fs::write(tablespace.join("16385"), vec![9; 8192]).unwrap();
        fs::write(at("source/PG_VERSION"), format!("{MAJOR_VERSION}\n")).unwrap();
        let connection = ConnectionParameters {
            host: "127.0.0.1".to_owned(),
            port: listener.port,
            user: "postgres".to_owned(),
            password: None,
            database: "postgres".to_owned(),
            application_name: None,
        };
        // As where PostgreSQL's packages put it: what is there, its account may have put there.
        let user = ServiceUser::resolve(None).unwrap();
        user.create_directory(&at("home")).unwrap();
        let plan = Plan {
            source: SourceServer { connection, data_directory: at("source"), leader: None, replication: None },
            target: at("home/clone"),
            tablespaces: at("home/clone.tablespaces"),
            user_name: user.name().to_owned(),
            slot: "clone".to_owned(),
            recovery: Recovery::Auto,
            fill: FillOptions { limit_bytes_per_second: None, warm: Warm::Off },
            wal_keep_bytes_max: u64::MAX,
        };
        let image = Arc::new(Image::scan(&at("source")).unwrap().image);
        assert_eq!((image.files.len(), image.tablespaces.len()), (4, 1));
        Harness { directory, plan, image }
    }

    fn hydrator(&self, keeping: &Keeping) -> Arc<Hydrator> {
        let rendezvous = Rendezvous::at(self.directory.path().join("service"));
        Hydrator::new(rendezvous, keeping.keeper_client.clone(), Journal::create().unwrap())
    }

    /// All that somebody could take for a clone, or for its tablespaces.
    fn left(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.path().join("home")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// Nobody may take what is there for a clone that can be started.
    fn assert_not_whole(&self, moment: &dyn std::fmt::Display) {
        let version = fs::symlink_metadata(self.plan.target.join("PG_VERSION"));
        assert!(!version.is_ok_and(|found| found.is_file()), "{moment}: anybody could start it");
        assert_ne!(state_without_service(&self.plan.target), CloneState::Whole, "{moment}");
    }

    /// An ordinary directory with the source's content.
    fn assert_whole(&self, moment: &dyn std::fmt::Display) {
        let at = |path: &Path| self.plan.target.join(path);
        assert_eq!(state_without_service(&self.plan.target), CloneState::Whole, "{moment}");
        assert_eq!(fs::read_to_string(at(Path::new("PG_VERSION"))).unwrap(), format!("{MAJOR_VERSION}\n"), "{moment}");
        for file in &self.image.files {
            let source = fs::read(self.plan.source.data_directory.join(&file.path)).unwrap();
            assert!(fs::read(at(&file.path)).unwrap() == source, "{moment}: {}", file.path.display());
        }
        let names = fs::read_dir(&self.plan.target).unwrap().map(|entry| entry.unwrap().file_name());
        let ours: Vec<_> = names.filter(|name| name.to_string_lossy().contains("onecopy")).collect();
        assert!(ours.is_empty() && !at(Path::new("PG_VERSION.new")).exists(), "{moment}: {ours:?}");
    }
}

/// A keeper in a thread.
struct Keeping {
    keeper_client: KeeperClient,
    /// What the hydrator was given.
    given: KeptFiles,
    thread: JoinHandle<KeptFiles>,
}

impl Keeping {
    fn begin(kept: KeptFiles) -> Keeping {
        let (channel, other) = Channel::pair().unwrap();
        let thread = std::thread::spawn(move || hold(&channel, kept));
        let (keeper_client, given) = KeeperClient::take_over(Channel::over(other).unwrap()).unwrap();
        Keeping { keeper_client, given, thread }
    }

    /// All that it holds when its hydrator is dead.
    fn end(self) -> KeptFiles {
        drop(self.given);
        self.keeper_client.forget(THE_END);
        self.thread.join().unwrap()
    }
}

fn hold(channel: &Channel, mut kept: KeptFiles) -> KeptFiles {
    channel.hand_over(&kept).unwrap();
    loop {
        match channel.receive(true).unwrap().expect("it is told the end") {
            Message::Keep(name, file) => drop(kept.insert(name, file)),
            Message::Forget(name) if name == THE_END => return kept,
            Message::Forget(name) => drop(kept.remove(&name)),
            other => panic!("{other:?}"),
        }
    }
}

/// What became of all clones under whoever served next, and what is kept of them then.
struct Succession {
    states: Vec<CloneState>,
    kept: KeptFiles,
}

/// Serves with what was kept, until nothing is left to do.
fn succeed(harness: &Harness, kept: KeptFiles) -> Succession {
    let keeping = Keeping::begin(kept);
    let hydrator = harness.hydrator(&keeping);
    let states: Vec<CloneState> = runtime().block_on(async {
        takeover::take_over(&hydrator, &keeping.given).await.expect("taken over");
        let supervision = tokio::spawn(supervision::supervise(Arc::clone(&hydrator)));
        let begin = Instant::now();
        while hydrator.is_busy() {
            assert!(begin.elapsed() < DEADLINE, "{:?}", hydrator.progress_of_all());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        supervision.abort();
        hydrator.progress_of_all().into_iter().map(|progress| progress.state).collect()
    });
    drop(hydrator);
    Succession { states, kept: keeping.end() }
}

/// That of one process: its threads are its own.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Takes a clone into the books, as an order is; then its directory is made.
fn lay(hydrator: &Arc<Hydrator>, harness: &Harness) -> Result<(Arc<CloneJob>, Skeleton), CloneError> {
    let Harness { plan, image, .. } = harness;
    let number = hydrator.next_number.fetch_add(1, Ordering::Relaxed);
    let record = Record { number, plan: plan.clone(), elsewhere: None, made: None };
    hydrator.keep(number, "state", to_memory(&record)?);
    let clone = Arc::new(CloneJob::new(number, plan.clone(), None));
    hydrator.add(Arc::clone(&clone));
    hydrator.write_targets();
    let marker = Marker::of(plan, hydrator.rendezvous().directory());
    let skeleton = Skeleton::make(CloneLocation::of(plan)?, Arc::clone(image), &marker)?;
    Ok((clone, skeleton))
}

/// All that is done of a clone until it is ready, but what the source's server is asked.
async fn make(hydrator: &Arc<Hydrator>, harness: &Harness) -> Result<Arc<CloneJob>, CloneError> {
    let Harness { plan, image, .. } = harness;
    let (clone, skeleton) = lay(hydrator, harness)?;
    let location = skeleton.location().clone();
    let origin = Arc::new(SourceFiles::reopen(&plan.source.data_directory, image, |_| true)?);
    let bitmap = SharedBitmap::create(image)?;
    let filling = Filling::new(Arc::clone(image), skeleton.into_files(), Arc::clone(&origin) as _, bitmap)?;
    let parts = (location, Arc::new(filling), Content::Local(origin));
    let small = SmallFile { path: "base/5/PG_VERSION".into(), mode: 0o600, content: b"15\n".to_vec() };
    let point = RecoveryPoint {
        mode: Mode::Backup,
        consistent_at: Lsn(7),
        timeline: 2,
        redo: Lsn(5),
        major_version: MAJOR_VERSION,
        control: vec![1; 8192],
        backup_label: Some("a label".to_owned()),
        history: Some(b"a history".to_vec()),
    };
    make_runnable(hydrator, &clone, parts, &Arc::new(point), image, &Arc::new(vec![small])).await?;
    Ok(clone)
}

fn has_marker(harness: &Harness) -> bool {
    harness.plan.target.join(MARKER_FILE).exists()
}
