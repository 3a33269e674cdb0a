//! Directories in which somebody lays what does not belong there.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use tempfile::TempDir;

use super::*;

fn account() -> ServiceUser {
    ServiceUser::resolve(None).expect("an account")
}

/// `data` of the servers' account with a file in it, `outside` of root's with one that root alone may read.
fn harness() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
    for name in ["data", "data/pg_tblspc", "outside", "own"] {
        fs::create_dir(directory.path().join(name)).expect("made");
    }
    for name in ["data/file", "outside/secret", "own/file"] {
        fs::write(directory.path().join(name), name).expect("written");
        fs::set_permissions(directory.path().join(name), fs::Permissions::from_mode(0o600)).expect("set");
    }
    for name in ["data", "data/pg_tblspc", "data/file", "own", "own/file"] {
        account().own(&directory.path().join(name)).expect("given");
    }
    directory
}

fn refusal<T>(outcome: io::Result<T>) -> String {
    outcome.err().expect("refused").to_string()
}

/// Spec: C4
#[test]
fn k24_only_files_that_are_the_accounts_are_opened() {
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let data = Directory::open(&at("data")).expect("opened");
    assert_eq!(data.read(Path::new("file")).expect("read"), b"data/file");
    symlink(at("outside/secret"), at("data/link")).expect("laid");
    symlink(at("outside"), at("data/base")).expect("laid");
    for name in ["link", "base/secret", "base"] {
        assert!(refusal(data.open_read(Path::new(name))).contains("symbolic link"), "{name}");
    }
    assert!(refusal(data.open_directory(Path::new("base"))).contains("symbolic link"));
    data.open_read(Path::new("../outside/secret")).expect_err("outside");
    data.open_read(&at("outside/secret")).expect_err("outside");
    data.open_read(Path::new("/etc/hostname")).expect_err("outside");
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, at("data/fifo"), FileType::Fifo, mode, 0).expect("made");
    for name in ["fifo", "pg_tblspc"] {
        assert!(refusal(data.open_read(Path::new(name))).contains("no regular file"), "{name}");
    }
    File::create(at("data/large")).and_then(|file| file.set_len(1 << 40)).expect("a hole");
    assert!(refusal(data.read(Path::new("large"))).contains("more than"));
}

/// Spec: C4
#[test]
fn k24_files_of_others_are_not_opened_under_a_name_in_the_accounts_directory() {
    if !is_root() {
        onecopy_testing::skip(
            "k24_files_of_others_are_not_opened_under_a_name_in_the_accounts_directory",
            "only root has servers of another account",
        );
        return;
    }
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let data = Directory::open(&at("data")).expect("opened");
    fs::hard_link(at("outside/secret"), at("data/name")).expect("a second name");
    assert!(refusal(data.open_read(Path::new("name"))).contains("somebody else"));
    assert!(refusal(data.open_write(Path::new("name"))).contains("somebody else"));
    // What the account could read itself is read, and not written.
    fs::set_permissions(at("outside/secret"), fs::Permissions::from_mode(0o644)).expect("set");
    data.open_read(Path::new("name")).expect("everybody may");
    assert!(refusal(data.open_write(Path::new("name"))).contains("somebody else"));
    fs::hard_link(at("own/file"), at("data/twin")).expect("a second name");
    assert!(refusal(data.open_write(Path::new("twin"))).contains("second name"));
    // A directory of root's that was moved here.
    fs::set_permissions(at("outside"), fs::Permissions::from_mode(0o700)).expect("closed");
    fs::rename(at("outside"), at("data/moved")).expect("moved");
    assert!(refusal(data.open_directory(Path::new("moved"))).contains("somebody else"));
}

/// Spec: C4
#[test]
fn k25_postgresqls_own_links_lead_to_directories_of_the_same_account_alone() {
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let data = Directory::open(&at("data")).expect("opened");
    for link in ["pg_tblspc/16400", "pg_wal"] {
        symlink(at("own"), at("data").join(link)).expect("laid");
        assert_eq!(data.read(&Path::new(link).join("file")).expect("read"), b"own/file", "{link}");
        data.create_new(&Path::new(link).join("new"), &account(), 0o4644).expect("made");
        assert_eq!(fs::metadata(at("own/new")).expect("there").mode() & 0o7777, 0o644, "{link}");
        data.remove_file(&Path::new(link).join("new")).expect("removed");
        // Below it there is no further one.
        symlink(at("outside"), at("own/pg_wal")).expect("laid");
        assert!(refusal(data.open_read(&Path::new(link).join("pg_wal/secret"))).contains("symbolic link"));
        fs::remove_file(at("own/pg_wal")).expect("removed");
        fs::remove_file(at("data").join(link)).expect("removed");
    }
    // No tablespace has such a name.
    symlink(at("own"), at("data/pg_tblspc/name")).expect("laid");
    assert!(refusal(data.open_read(Path::new("pg_tblspc/name/file"))).contains("symbolic link"));
}

/// Spec: C4
#[test]
fn k25_postgresqls_own_links_do_not_lead_to_directories_of_others() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_postgresqls_own_links_do_not_lead_to_directories_of_others",
            "only root has servers of another account",
        );
        return;
    }
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let data = Directory::open(&at("data")).expect("opened");
    for link in ["pg_tblspc/16400", "pg_wal"] {
        symlink(at("outside"), at("data").join(link)).expect("laid");
        assert!(refusal(data.open_read(&Path::new(link).join("secret"))).contains("same account"), "{link}");
        refusal(data.create_new(&Path::new(link).join("new"), &account(), 0o600));
    }
}

/// Spec: C4
#[test]
fn k25_the_way_to_a_directory_is_the_operators() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_the_way_to_a_directory_is_the_operators",
            "only root has servers of another account",
        );
        return;
    }
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let open = |name: &str| Directory::open_for(&at(name), &account());
    // What root has laid is followed; the directory may be root's then, too.
    symlink(at("own"), at("to_own")).expect("laid");
    symlink("outside", at("to_outside")).expect("laid");
    for name in ["own", "to_own", "outside", "to_outside", "to_own/../data/pg_tblspc"] {
        open(name).expect(name);
    }
    assert_eq!(fs::read_link(open("to_outside").expect("opened").by_descriptor()).expect("a name"), at("outside"));
    assert_eq!(open("missing").expect_err("missing").kind(), ErrorKind::NotFound);
    assert_eq!(open("own/file").expect_err("a file").kind(), ErrorKind::NotADirectory);
    // What the account has laid, or may have moved there, is not.
    symlink(at("outside"), at("data/link")).expect("laid");
    assert!(refusal(open("data/link")).contains("symbolic link"));
    symlink(at("data/link"), at("to_link")).expect("laid");
    assert!(refusal(open("to_link")).contains("symbolic link"));
    fs::rename(at("outside"), at("data/moved")).expect("moved");
    assert!(refusal(open("data/moved")).contains("may have put it there"));
    assert!(refusal(Directory::open(&at("data/moved"))).contains("may have put it"));
    remove_tree(&at("data/moved"), &account()).expect_err("not empty, and root's");
    assert!(at("data/moved/secret").exists());
    remove_tree(&at("own"), &account()).expect("removed");
    remove_tree(&at("own"), &account()).expect("removed already");
    assert!(!at("own").exists());
}

/// `/proc/<process>/root` and `cwd` lead to where no name does: into a mount namespace that the account has made, for
/// one, in which a directory of root's lies below its own.
///
/// Spec: C4
#[test]
fn k25_no_way_leads_through_a_process() {
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let process = std::path::Path::new("/proc/self/root");
    let through = |name: &str| process.join(at(name).strip_prefix("/").expect("absolute"));
    refusal(Directory::open(&through("own")));
    symlink(through("own"), at("data/pg_tblspc/16500")).expect("laid");
    let data = Directory::open_for(&at("data"), &account()).expect("opened");
    refusal(data.open_directory(Path::new("pg_tblspc/16500")));
    refusal(data.create_new(Path::new("pg_tblspc/16500/new"), &account(), 0o600));
    assert!(!at("own/new").exists());
}

/// Spec: C4
#[test]
fn k25_what_lies_in_a_directory_of_somebody_else_is_not_changed() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_what_lies_in_a_directory_of_somebody_else_is_not_changed",
            "only root has servers of another account",
        );
        return;
    }
    let harness = harness();
    let at = |name: &str| harness.path().join(name);
    let data = Directory::open_for(&at("data"), &account()).expect("opened");
    // Readable by everybody, and root's: as if root had mounted it there.
    fs::create_dir(at("data/roots")).expect("made");
    fs::set_permissions(at("data/roots"), fs::Permissions::from_mode(0o755)).expect("set");
    fs::write(at("data/roots/file"), "root's").expect("written");
    for name in ["roots/file", "roots/new"] {
        refusal(data.write(Path::new(name), b"the account's", &account(), 0o600));
        refusal(data.make_directory(Path::new(name), &account(), 0o700));
        refusal(data.lay_link(Path::new("/"), Path::new(name), &account()));
        refusal(data.remove_file(Path::new(name)));
        refusal(data.remove_directory(Path::new(name)));
        refusal(data.rename(Path::new(name), Path::new("own_now")));
    }
    data.remove_content(|name| name == "roots").expect_err("not empty, and root's");
    assert_eq!(fs::read_to_string(at("data/roots/file")).expect("there"), "root's");
    assert!(!at("data/roots/new").exists() && !at("data/own_now").exists());
}

/// Spec: C4
#[test]
fn k25_directories_without_a_bottom_are_not_removed() {
    let harness = harness();
    let data = Directory::open_for(&harness.path().join("data"), &account()).expect("opened");
    let deep = |levels| (0..levels).map(|_| "d").collect::<std::path::PathBuf>();
    for level in 1..=DEPTH_MAX + 2 {
        data.make_directory(&deep(level), &account(), 0o700).expect("made");
    }
    assert!(refusal(data.remove_content(|name| name == "d")).contains("nested deeper"));
    for level in [DEPTH_MAX + 2, DEPTH_MAX + 1] {
        data.remove_directory(&deep(level)).expect("removed");
    }
    data.remove_content(|name| name == "d").expect("removed");
    data.look_at(std::ffi::OsStr::new("d")).expect_err("gone");
}
