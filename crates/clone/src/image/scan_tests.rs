//! A data directory made of empty files, listed.

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use tempfile::TempDir;

use super::*;

/// A directory with `pg` and room for what lies elsewhere; each of `files` has its name's length in bytes.
fn fabricate(files: &[&str]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for name in files.iter().chain(&["pg/PG_VERSION"]) {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(&path, name.rsplit('/').next().expect("a name")).expect("written");
    }
    fs::write(directory.path().join("pg/PG_VERSION"), "15\n").expect("written");
    directory
}

fn scan(directory: &TempDir) -> Result<Scan, CloneError> {
    Image::scan(&directory.path().join("pg"))
}

fn paths<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> BTreeSet<&'a str> {
    paths.map(|path| path.to_str().expect("UTF-8")).collect()
}

#[test]
fn files_are_filled_copied_or_left_out() {
    let directory = fabricate(&[
        "pg/postmaster.pid",
        "pg/postgresql.conf",
        "pg/conf.d/extra.conf",
        "pg/log/postgresql.log",
        "pg/base/1/PG_VERSION",
        "pg/base/1/1259",
        "pg/base/1/1259_fsm",
        "pg/base/1/2600",
        "pg/base/1/2600_init",
        "pg/base/1/2600.1",
        "pg/base/1/t3_2700",
        "pg/base/1/pg_internal.init",
        "pg/base/1/pg_filenode.map",
        "pg/base/pgsql_tmp/pgsql_tmp7.0",
        "pg/global/pg_control",
        "pg/global/1262",
        "pg/pg_wal/000000010000000000000001",
        "pg/pg_wal/archive_status/000000010000000000000001.done",
        "pg/pg_replslot/a/state",
        "pg/pg_xact/0000",
        "pg/pg_multixact/members/0000",
        "pg/pg_subtrans/0000",
        "pg/pg_logical/replorigin_checkpoint",
        "pg/pg_tblspc/16400/PG_15_1/5/16401",
        "pg/pg_tblspc/16400/PG_14_1/5/16401",
        "elsewhere/PG_15_1/5/16403",
        "elsewhere/PG_15_1/pgsql_tmp/pgsql_tmp8.0",
        "elsewhere/lost",
        "certificate",
    ]);
    let at = |name: &str| directory.path().join(name);
    symlink(at("elsewhere"), at("pg/pg_tblspc/16402")).expect("linked");
    symlink(at("certificate"), at("pg/server.crt")).expect("linked");
    symlink(at("nowhere"), at("pg/dangling")).expect("linked");
    let _socket = UnixListener::bind(at("pg/.s.PGSQL.5432")).expect("bound");
    fs::set_permissions(at("pg/base/1"), fs::Permissions::from_mode(0o750)).expect("set");
    fs::set_permissions(at("pg/base/1/1259"), fs::Permissions::from_mode(0o640)).expect("set");

    let Scan { image, small } = scan(&directory).expect("listed");
    assert_eq!(
        paths(image.files.iter().map(|file| &file.path)),
        BTreeSet::from([
            "base/1/1259",
            "base/1/1259_fsm",
            "base/1/2600_init",
            "global/1262",
            "pg_multixact/members/0000",
            "pg_tblspc/16400/PG_15_1/5/16401",
            "pg_tblspc/16402/PG_15_1/5/16403",
            "pg_xact/0000",
        ])
    );
    assert_eq!(
        paths(small.iter().map(|file| &file.path)),
        BTreeSet::from([
            "base/1/PG_VERSION",
            "base/1/pg_filenode.map",
            "conf.d/extra.conf",
            "pg_logical/replorigin_checkpoint",
            "postgresql.conf",
        ])
    );
    assert_eq!(
        paths(image.directories.iter().map(|directory| &directory.path)),
        BTreeSet::from([
            "base",
            "base/1",
            "conf.d",
            "global",
            "log",
            "pg_logical",
            "pg_multixact",
            "pg_multixact/members",
            "pg_replslot",
            "pg_subtrans",
            "pg_tblspc",
            "pg_tblspc/16400",
            "pg_tblspc/16400/PG_15_1",
            "pg_tblspc/16400/PG_15_1/5",
            "pg_tblspc/16402/PG_15_1",
            "pg_tblspc/16402/PG_15_1/5",
            "pg_wal",
            "pg_wal/archive_status",
            "pg_xact",
        ])
    );
    assert_eq!(image.tablespaces, [Tablespace { oid: 16402, location: at("elsewhere") }]);
    let file = image.files.iter().find(|file| file.path.ends_with("1259")).expect("listed above");
    assert_eq!((file.size_bytes, file.mode), (4, 0o640));
    assert_eq!(file.identity, FileIdentity::of(&fs::metadata(at("pg/base/1/1259")).expect("there")));
    assert!(image.directories.contains(&ImageDirectory { path: "base/1".into(), mode: 0o750 }));
    assert!(small.iter().any(|file| file.path.ends_with("extra.conf") && file.size_bytes == 10));
}

#[test]
fn parents_come_first() {
    let directory = fabricate(&["pg/a/b/c/d", "pg/base/5/1", "pg/z/y/x", "pg/pg_tblspc/1/PG_15_1/5/2"]);
    let image = scan(&directory).expect("listed").image;
    assert!(image.directories.len() > 8);
    let mut seen = BTreeSet::from([PathBuf::new()]);
    for found in image.directories {
        assert!(
            seen.contains(found.path.parent().expect("not the root")),
            "{} before its parent",
            found.path.display()
        );
        seen.insert(found.path);
    }
    assert!(image.files.iter().all(|file| seen.contains(file.path.parent().expect("in a directory"))));
}

#[test]
fn what_is_not_handled_is_named() {
    let links = [
        ("pg/base", "elsewhere"),
        ("pg/pg_xact", "elsewhere"),
        ("pg/base/5", "elsewhere"),
        ("pg/base/1/1259", "elsewhere/file"),
        ("pg/pg_logical", "elsewhere"),
        ("pg/pg_tblspc/name", "elsewhere"),
        ("pg/pg_tblspc/16400", "pg/inside"),
    ];
    for (link, target) in links {
        let directory = fabricate(&["elsewhere/file", "pg/inside/file"]);
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at(link).parent().expect("a parent")).expect("made");
        symlink(at(target), at(link)).expect("linked");
        let error = scan(&directory).expect_err(link);
        assert!(matches!(&error, CloneError::CannotClone { path, .. } if *path == at(link)), "{link}: {error}");
    }
}

#[test]
fn links_to_what_is_not_read_are_as_good_as_directories() {
    let directory = fabricate(&["elsewhere/000000010000000000000001"]);
    let at = |name: &str| directory.path().join(name);
    for link in ["pg/pg_wal", "pg/pg_stat_tmp", "pg/log"] {
        symlink(at("elsewhere"), at(link)).expect("linked");
    }
    let Scan { image, small } = scan(&directory).expect("listed");
    assert_eq!(
        paths(image.directories.iter().map(|directory| &directory.path)),
        BTreeSet::from(["log", "pg_stat_tmp", "pg_wal"])
    );
    assert_eq!((image.files, small), (vec![], vec![]));
}

#[test]
fn small_files_are_small() {
    let directory = fabricate(&["pg/core", "pg/postgresql.conf"]);
    let core = directory.path().join("pg/core");
    fs::File::create(&core).and_then(|file| file.set_len(SMALL_FILES_BYTES_MAX + 1)).expect("made");
    let error = scan(&directory).expect_err("too large");
    assert!(matches!(&error, CloneError::CannotClone { path, .. } if *path == core), "{error}");
    assert!(matches!(Image::scan(Path::new("/nonexistent")), Err(CloneError::File { .. })));
}

/// Whatever the account of the server lays into its directory, root reads for a clone what that account could read.
///
/// Whatever PostgreSQL's account lays into its data directory at whatever instant (links, second names of files, fifos,
/// other directories), root reads nothing for a clone that the account could not read, and the path is named;
/// set-user-ID bits are not cloned.
///
/// Spec: C4
#[test]
fn k24_a_scan_follows_no_link_of_the_account_and_keeps_no_setuid_bit() {
    let directory = fabricate(&["pg/base/1/1259", "pg/postgresql.conf", "secret", "conf/secret"]);
    let at = |name: &str| directory.path().join(name);
    symlink(at("secret"), at("pg/server.key")).expect("linked");
    symlink(at("conf"), at("pg/conf.d")).expect("linked");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("pg/fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .expect("made");
    for name in ["pg/base/1/1259", "pg/postgresql.conf", "pg/base/1"] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o7755)).expect("set");
    }
    let Scan { image, small } = scan(&directory).expect("listed");
    assert_eq!(paths(small.iter().map(|file| &file.path)), BTreeSet::from(["postgresql.conf"]));
    assert!(!image.directories.iter().any(|found| found.path.ends_with("conf.d")), "{:?}", image.directories);
    let modes = image.files.iter().map(|file| file.mode).chain(small.iter().map(|file| file.mode));
    let modes: Vec<u32> = modes.chain(image.directories.iter().map(|found| found.mode)).collect();
    assert!(modes.iter().all(|mode| mode & 0o7000 == 0), "{modes:?}");
}

/// Spec: C4
#[test]
fn k24_directories_without_a_bottom_are_refused_by_name() {
    let directory = fabricate(&["pg/base/1/1259"]);
    let deep: PathBuf = (0..=DEPTH_MAX).map(|_| "d").collect();
    fs::create_dir_all(directory.path().join("pg").join(&deep)).expect("made");
    let error = scan(&directory).expect_err("too deep");
    assert!(error.to_string().contains("d/d/d"), "{error}");
    assert!(format!("{error:?}").contains("nested deeper"), "{error:?}");
    fs::remove_dir(directory.path().join("pg").join(&deep)).expect("removed");
    scan(&directory).expect("listed");
}

/// A directory becomes a link and a directory again, all the time.
///
/// Spec: C4
#[test]
fn k24_a_directory_that_becomes_a_link_is_never_listed_through_it() {
    let directory = fabricate(&["pg/base/1/1259", "outside/7777"]);
    let at = |name: &str| directory.path().join(name);
    symlink(at("outside"), at("link")).expect("linked");
    let ended = std::sync::atomic::AtomicBool::new(false);
    let (mut scanned, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let exchange = |from: &str, to: &str| {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, at(from), rustix::fs::CWD, at(to), flags).expect("swapped");
            };
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                exchange("pg/base/1", "link");
            }
        });
        let begin = std::time::Instant::now();
        let mut leaked = Vec::new();
        let is_over = |both: bool| begin.elapsed() >= std::time::Duration::from_secs(1) && both;
        while !is_over(scanned > 0 && refused > 0) && leaked.is_empty() {
            match scan(&directory) {
                Ok(found) => {
                    leaked.extend(found.image.files.into_iter().filter(|file| file.path.ends_with("7777")));
                    scanned += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("pg/base/1"), "it is named: {error}");
                    refused += 1;
                }
            }
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(leaked, [], "after {scanned} scans, and {refused} that were refused");
    });
}

/// A clone that is not whole is refused as a source, by every way, with the remedy.
///
/// Spec: C6
#[test]
fn k32_a_clone_that_is_not_whole_is_refused_as_a_source() {
    let directory = fabricate(&["pg/base/1/1259"]);
    let at = |name: &str| directory.path().join("pg").join(name);
    scan(&directory).expect("it is whole");
    let refused = || scan(&directory).expect_err("refused").to_string();
    fs::write(at(MARKER_FILE), "made_by").expect("written");
    assert!(refused().contains("not whole; wait for it: onecopy clone --watch"), "{}", refused());
    fs::remove_file(at(MARKER_FILE)).expect("removed");
    fs::remove_file(at("PG_VERSION")).expect("removed");
    // Somebody has a version at this number: the link can be read.
    symlink("PG_VERSION.real", at("PG_VERSION")).expect("laid");
    fs::write(at("PG_VERSION.real"), "15\n").expect("written");
    assert!(refused().contains("not whole"), "{}", refused());
}
