//! A source's host that lies: it speaks the real protocol, and says in every field what a clone must not believe.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::ServiceUser;
use serde_json::{Value, json};
use tokio::io::{DuplexStream, duplex};

use super::client::{Dial, Dialling, RemoteOrigin, Stream};
use super::manifest::{Opening, tests::manifest};
use super::protocol::{Message, PART_BYTES_MAX, SessionId, VERSION, read_message, write_message};
use super::server::tests::SourceHost;
use crate::image::SmallFile;
use crate::plan::Plan;
use crate::target::{CloneLocation, Marker, Skeleton};

/// What the liar says when it is asked for an image.
struct Liar {
    manifest: Value,
    files: Vec<SmallFile>,
}

impl Liar {
    /// The truth, yet.
    fn new() -> Liar {
        let small =
            |path: &str| SmallFile { path: path.into(), mode: 0o600, content: b"archive_command = 'x'".to_vec() };
        let files = ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf", "base/1/PG_VERSION"];
        let manifest = serde_json::to_value(manifest(&[8192, 100])).unwrap();
        Liar { manifest, files: files.map(small).to_vec() }
    }

    /// One field of the manifest is another.
    fn saying(pointer: &str, value: Value) -> Liar {
        let mut liar = Liar::new();
        *liar.manifest.pointer_mut(pointer).expect("the manifest has it") = value;
        liar
    }

    /// Beside the truth there is one thing more in a list of the manifest.
    fn adding(pointer: &str, value: Value) -> Liar {
        let mut liar = Liar::new();
        liar.manifest.pointer_mut(pointer).and_then(Value::as_array_mut).expect("the manifest has it").push(value);
        liar
    }

    /// Beside the truth there is a small file more.
    fn copying(path: &str, mode: u32) -> Liar {
        let mut liar = Liar::new();
        liar.files.push(SmallFile { path: path.into(), mode, content: b"evil".to_vec() });
        liar
    }

    fn messages(&self) -> Vec<Message> {
        let packed = zstd::bulk::compress(&serde_json::to_vec(&self.manifest).unwrap(), 1).unwrap();
        let parts = packed.chunks(PART_BYTES_MAX).map(|part| Message::ManifestPart { bytes: part.to_vec() });
        let files = self.files.iter().map(|file| Message::FilePart {
            path: file.path.clone(),
            mode: file.mode,
            last: true,
            bytes: file.content.clone(),
        });
        parts.chain(files).chain([Message::Opened]).collect()
    }
}

/// Speaks with whoever dials as the liar does.
struct LyingDialler {
    messages: Vec<Message>,
}

impl Dial for LyingDialler {
    fn dial(&self) -> Dialling<'_> {
        let (near, far) = duplex(1 << 20);
        tokio::spawn(lie(far, self.messages.clone()));
        Box::pin(async { Ok(Box::new(near) as Box<dyn Stream>) })
    }

    fn peer(&self) -> String {
        "liar".to_owned()
    }
}

async fn lie(mut stream: DuplexStream, messages: Vec<Message>) {
    let mut buffer = Vec::new();
    let Ok(Message::Hello { .. }) = read_message(&mut stream, &mut buffer).await else { return };
    let session = SessionId::generate().unwrap();
    let welcome = Message::Welcome { version: VERSION, session, lease_seconds: u32::MAX };
    for message in [welcome].into_iter().chain(messages) {
        if write_message(&mut stream, &message, &mut buffer).await.is_err() {
            return;
        }
    }
    // It says no more, and listens until the clone has gone.
    while read_message(&mut stream, &mut buffer).await.is_ok() {}
}

/// A place for one clone, with room to see what is written beside it.
struct Harness {
    directory: tempfile::TempDir,
    plan: Plan,
}

impl Harness {
    fn new() -> Harness {
        let directory = tempfile::tempdir().unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(directory.path(), open).unwrap();
        let host = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1));
        let target = directory.path().join("clone");
        let tablespaces = directory.path().join("clone.tablespaces");
        let user_name = ServiceUser::resolve(None).unwrap().name().to_owned();
        let plan = Plan { target, tablespaces, user_name, ..host.plan() };
        Harness { directory, plan }
    }

    /// Receives and lays down what the liar says, as a hydrator does; what a clone would believe.
    fn receive(&self, liar: &Liar) -> Result<Opening, String> {
        let dialler = Arc::new(LyingDialler { messages: liar.messages() });
        let (origin, opening) = RemoteOrigin::open(dialler, &self.plan).map_err(|error| error.to_string())?;
        let location = CloneLocation::of(&self.plan).unwrap();
        let marker = Marker { slot: None, ..Marker::of(&self.plan, Path::new("/service")) };
        let words = |error: crate::CloneError| format!("only when it was laid down: {error}");
        let skeleton =
            Skeleton::make(location.clone(), Arc::new(opening.manifest.image.clone()), &marker).map_err(words)?;
        skeleton.write_small(&opening.small_files).map_err(words)?;
        opening.manifest.recovery.write(&location).map_err(words)?;
        drop(origin);
        Ok(opening)
    }

    /// What lies beside the clone, and the clone itself.
    fn entries(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

fn file(path: &str) -> Value {
    json!({"path": path, "size_bytes": 1, "mode": 0o600,
        "identity": {"device": 1, "inode": 99, "born_nanoseconds": 0}})
}

fn directory(path: &str) -> Value {
    json!({"path": path, "mode": 0o700})
}

/// Of what another host says about a clone nothing is believed that could do more than fill the clone: account,
/// commands, libraries, addresses, configuration and places are the receiving host's; names, rights, sizes, counts,
/// slot, password and settings are refused by field and value, and nothing is left; its account's passwords go to
/// nobody, and nobody is connected to for a slot.
///
/// Spec: C3
#[test]
fn k22_a_lying_source_is_refused_by_field_and_value_and_nothing_is_made() {
    const FILES: &str = "/image/files";
    const DIRECTORIES: &str = "/image/directories";
    const NAMES: [&str; 9] = [
        "../escaped",
        "/tmp/escaped",
        "base/../../escaped",
        "base/1/../../../escaped",
        "",
        ".",
        "base//x",
        "./x",
        "x\0y",
    ];
    let mut lies: Vec<(Liar, &str, String)> = Vec::new();
    for name in NAMES {
        lies.push((Liar::adding(FILES, file(name)), "file name", format!("{name:?}")));
        lies.push((Liar::adding(DIRECTORIES, directory(name)), "directory name", format!("{name:?}")));
        lies.push((Liar::copying(name, 0o600), "file name", format!("{name:?}")));
    }
    // What decides who a directory belongs to, whether and how a server starts in it, is made here.
    for name in [
        "onecopy.incomplete",
        "onecopy.standby.conf",
        "PG_VERSION",
        "postmaster.pid",
        "postmaster.opts",
        "standby.signal",
        "recovery.signal",
        "backup_label",
        "tablespace_map",
        "global/pg_control",
        "pg_wal/000000010000000000000001",
        "pg_replslot/x",
    ] {
        lies.push((Liar::adding(FILES, file(name)), "file name", format!("{name:?}")));
        lies.push((Liar::copying(name, 0o600), "file name", format!("{name:?}")));
    }
    let long = "x".repeat(5000);
    lies.push((Liar::copying(&long, 0o600), "file name", "\"xxxxxxxx".to_owned()));
    // What is small is not filled, and the other way round.
    lies.push((Liar::adding(FILES, file("postgresql.conf")), "file name", "\"postgresql.conf\"".to_owned()));
    lies.push((Liar::copying("base/1/16384", 0o600), "file name", "\"base/1/16384\"".to_owned()));
    lies.push((Liar::adding(DIRECTORIES, directory("onecopy.d")), "directory name", "\"onecopy.d\"".to_owned()));
    // A directory where a file is made here: whoever finds it there would stumble, or go on in it.
    for name in [
        "PG_VERSION",
        "PG_VERSION.new",
        "postmaster.pid",
        "standby.signal",
        "recovery.signal",
        "backup_label",
        "tablespace_map",
        "postgresql.conf",
        "postgresql.conf.new",
        "postgresql.auto.conf",
        "postgresql.auto.conf.new",
        "pg_hba.conf",
        "pg_hba.conf.new",
        "pg_ident.conf",
        "pg_ident.conf.new",
        "global/pg_control",
    ] {
        let mut liar = Liar::adding(DIRECTORIES, directory(name));
        // Not because it is there twice.
        liar.files.retain(|file| file.path != Path::new(name));
        lies.push((liar, "directory name", format!("{name:?} is not taken from the other host: an image has none")));
    }
    // Names twice, in one list or two; a file as a directory; no directory at all.
    lies.push((Liar::adding(FILES, file("base/1/0")), "file name", "\"base/1/0\"".to_owned()));
    lies.push((Liar::copying("postgresql.conf", 0o600), "file name", "\"postgresql.conf\"".to_owned()));
    lies.push((Liar::adding(DIRECTORIES, directory("base/1")), "directory name", "\"base/1\"".to_owned()));
    lies.push((Liar::adding(DIRECTORIES, directory("base/1/0")), "file name", "\"base/1/0\"".to_owned()));
    lies.push((Liar::adding(FILES, file("base/1/0/2")), "file name", "\"base/1/0/2\"".to_owned()));
    lies.push((Liar::adding(FILES, file("base/7/2")), "file name", "\"base/7/2\"".to_owned()));
    lies.push((Liar::adding(DIRECTORIES, directory("base/7/x")), "directory name", "\"base/7/x\"".to_owned()));
    // Rights.
    lies.push((Liar::saying("/image/files/0/mode", json!(0o4755)), "mode", "0o4755".to_owned()));
    lies.push((Liar::saying("/image/files/0/mode", json!(0o2600)), "mode", "0o2600".to_owned()));
    lies.push((Liar::saying("/image/directories/1/mode", json!(0o4700)), "mode", "0o4700".to_owned()));
    lies.push((Liar::copying("server.crt", 0o104_600), "mode", "0o104600".to_owned()));
    // Sizes.
    lies.push((Liar::saying("/image/files/0/size_bytes", json!(u64::MAX)), "size", u64::MAX.to_string()));
    lies.push((Liar::saying("/image/files/0/size_bytes", json!(1_u64 << 45)), "size", (1_u64 << 45).to_string()));
    lies.push((Liar::saying("/image/files/0/size_bytes", json!(-1)), "manifest", "-1".to_owned()));
    let mut sum = Liar::new();
    let many = (0..9).map(|number| {
        let mut file = file(&format!("base/1/{}", 100 + number));
        file["size_bytes"] = json!(1_u64 << 44);
        file
    });
    sum.manifest["image"]["files"].as_array_mut().unwrap().extend(many);
    lies.push((sum, "size", ((8_u64 << 44) + 8192 + 100).to_string()));
    // Tablespaces.
    let tablespace = |oid: u64| json!({"oid": oid, "location": "/etc"});
    lies.push((Liar::adding("/image/tablespaces", tablespace(0)), "tablespace", "0".to_owned()));
    lies.push((Liar::adding("/image/tablespaces", tablespace(1663)), "tablespace", "1663".to_owned()));
    lies.push((
        Liar::saying("/image/tablespaces", json!([tablespace(20_000), tablespace(20_000)])),
        "tablespace",
        "20000".to_owned(),
    ));
    let mut both = Liar::adding("/image/tablespaces", tablespace(20_000));
    both.manifest["image"]["directories"].as_array_mut().unwrap().push(directory("pg_tblspc/20000"));
    lies.push((both, "directory name", "\"pg_tblspc/20000\"".to_owned()));
    lies.push((
        Liar::adding("/image/tablespaces", json!({"oid": "../../x", "location": "/"})),
        "manifest",
        "../../x".to_owned(),
    ));
    // Where it is recovered.
    let history = |name: &str| json!([name, [49]]);
    for name in ["../../escaped", "/tmp/escaped", "00000002.history/../../x"] {
        lies.push((Liar::saying("/recovery/history", history(name)), "manifest", name.to_owned()));
    }
    lies.push((Liar::saying("/recovery/timeline", json!(0)), "timeline", "0".to_owned()));
    lies.push((Liar::saying("/recovery/backup_label", json!("START")), "backup_label", "\"START\"".to_owned()));
    lies.push((Liar::saying("/recovery/control", json!([1, 2, 3])), "pg_control", "3".to_owned()));
    lies.push((Liar::saying("/recovery/control/20", json!(77)), "pg_control", "checksum".to_owned()));
    lies.push((Liar::saying("/recovery/major_version", json!(17)), "major_version", "17".to_owned()));
    let mut wrong = Vec::new();
    for (liar, field, value) in lies {
        let harness = Harness::new();
        let before = harness.entries();
        match harness.receive(&liar) {
            Err(error) if error.contains(field) && error.contains(&value) && error.len() < 1000 => {}
            Err(error) => wrong.push(format!("{field} {value}: refused as {error}")),
            Ok(_) => wrong.push(format!("{field} {value}: believed")),
        }
        if harness.entries() != before {
            wrong.push(format!("{field} {value}: {:?} is left", harness.entries()));
        }
        for escaped in [harness.directory.path().join("../escaped"), PathBuf::from("/tmp/escaped")] {
            if std::fs::remove_file(&escaped).or_else(|_| std::fs::remove_dir(&escaped)).is_ok() {
                wrong.push(format!("{field} {value}: {} was written", escaped.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} lies\n{}", wrong.len(), wrong.join("\n"));
}

/// Spec: C3
#[test]
fn k22_the_truth_is_received_without_configuration_and_with_the_rights_that_postgresql_gives() {
    let harness = Harness::new();
    let mut open = Liar::copying("server.crt", 0o666);
    open.manifest["image"]["files"][0]["mode"] = json!(0o666);
    // A directory that was made where new ones get the group of the one above.
    open.manifest["image"]["directories"][1]["mode"] = json!(0o2777);
    open.manifest["image"]["directories"].as_array_mut().unwrap().push(directory("pg_tblspc/20000/PG_15_202209061"));
    open.manifest["image"]["tablespaces"] = json!([{"oid": 20_000, "location": "/etc"}]);
    open.manifest["image"]["files"].as_array_mut().unwrap().push(file("pg_tblspc/20000/PG_15_202209061/16390"));
    let opening = harness.receive(&open).unwrap();
    for name in ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf"] {
        let text = std::fs::read_to_string(harness.plan.target.join(name)).unwrap();
        assert_eq!(text, "", "{name} is of the other host");
    }
    let mode = |path: &str| {
        let metadata = std::fs::metadata(harness.plan.target.join(path)).unwrap();
        std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o7777
    };
    assert_eq!((mode("server.crt"), mode("base/1/0"), mode("base/1")), (0o640, 0o640, 0o750));
    assert_eq!(std::fs::read_link(harness.plan.target.join("pg_tblspc/20000")).unwrap(), {
        harness.plan.tablespaces.join("20000")
    });
    assert_eq!(opening.small_files.len(), 6);
}
