//! What the account of a clone may have put in its way.

use super::*;

/// A clone's directory, and beside it what is root's alone.
fn with_precious(fixture: &CloneFixture) -> (CloneLocation, PathBuf) {
    let location = fixture.make("clone", &image(&[5], &[(1, 10, false)], None)).location().clone();
    let precious = fixture.directory.path().join("precious");
    fs::create_dir(&precious).expect("made");
    fs::write(precious.join("1"), "mine").expect("written");
    fs::set_permissions(precious.join("1"), fs::Permissions::from_mode(0o640)).expect("set");
    (location, precious)
}

/// Mode and owner of a directory and of the file in it, and what that holds.
fn state(precious: &Path) -> (Vec<Listed>, u32, u32, Vec<u8>) {
    let mut found = Vec::new();
    list(precious, precious, &mut found);
    let metadata = fs::metadata(precious).expect("there");
    (found, metadata.mode(), metadata.uid(), fs::read(precious.join("1")).expect("read"))
}

/// In the place of a name in the clone's directory stands a link, a second name of a foreign file, a fifo, or a
/// directory of root's.
///
/// Nor does root write, own, give a mode to, move or remove anything outside of the directories of that account, or
/// wait for a fifo there.
///
/// Spec: C4
#[test]
fn k25_nothing_outside_of_a_clone_is_written_owned_or_given_a_mode() {
    let fixture = CloneFixture::new();
    let (location, precious) = with_precious(&fixture);
    let before = state(&precious);
    let at = |name: &str| location.directory.join(name);
    let named = |outcome: Result<(), CloneError>, name: &str| {
        let error = outcome.expect_err(name).to_string();
        assert!(error.contains(name), "{name} is named: {error}");
    };
    // A directory that is a link.
    std::os::unix::fs::symlink(&precious, at("link")).expect("laid");
    named(location.make_directory(Path::new("link"), 0o777), "link");
    named(location.create(Path::new("link/new"), 0o600).map(drop), "link/new");
    named(location.write(Path::new("link/1"), b"yours", 0o777), "link/1");
    // A file that is a link, or another name of a foreign file: the name is the clone's, the file is not.
    std::os::unix::fs::symlink(precious.join("1"), at("global/pg_control")).expect("laid");
    location.write(Path::new("global/pg_control"), b"ours", 0o600).expect("written");
    fs::hard_link(precious.join("1"), at("backup_label")).expect("a second name");
    location.write(Path::new("backup_label"), b"ours", 0o600).expect("written");
    assert_eq!(fs::read(at("backup_label")).expect("read"), b"ours");
    assert_eq!(state(&precious), before);
    // No bit by which a program runs as somebody else.
    location.write(Path::new("program"), b"#!", 0o4755).expect("written");
    location.make_directory(Path::new("sticky"), 0o3777).expect("made");
    for name in ["program", "sticky"] {
        assert_eq!(fs::metadata(at(name)).expect("there").mode() & 0o7000, 0, "{name}");
    }
}

/// Spec: C4
#[test]
fn k25_a_directory_of_roots_that_was_moved_into_a_clone_is_not_taken_for_its_own() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_a_directory_of_roots_that_was_moved_into_a_clone_is_not_taken_for_its_own",
            "only root has servers of another account",
        );
        return;
    }
    let fixture = CloneFixture::new();
    let (location, precious) = with_precious(&fixture);
    let (before, moved) = (state(&precious), location.directory.join("pg_stat"));
    fs::rename(&precious, &moved).expect("moved");
    let error = location.make_directory(Path::new("pg_stat"), 0o777).expect_err("root's").to_string();
    assert!(error.contains("pg_stat"), "{error}");
    fs::rename(&moved, &precious).expect("moved back");
    assert_eq!(state(&precious), before);
}

/// A service may be killed before it has given to the account what it has made.
///
/// Spec: C4
#[test]
fn k25_of_what_is_not_given_to_the_account_only_what_is_empty_is_removed() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_of_what_is_not_given_to_the_account_only_what_is_empty_is_removed",
            "only root can give a file to another account",
        );
        return;
    }
    let fixture = CloneFixture::new();
    let location = fixture.location("clone");
    location.user.create_directory(location.directory.parent().expect("a home")).expect("made");
    let at = |name: &str| location.directory.with_file_name(name);
    for (name, owner, is_empty, goes) in
        [("empty", 0, true, true), ("full", 0, false, false), ("given", location.user.user_id(), true, false)]
    {
        fs::create_dir(at(name)).expect("made");
        std::os::unix::fs::chown(at(name), Some(owner), None).expect("given");
        if !is_empty {
            fs::write(at(name).join("precious"), "mine").expect("written");
        } else {
            let owner = Marker::owner(&at(name), &marker().service_directory).expect("known");
            assert_eq!(owner, Owner::Nobody, "{name}");
        }
        remove_ungiven(&at(name), &location.user).expect("looked at");
        assert_eq!(at(name).exists(), !goes, "{name}");
    }
    let outside = fixture.directory.path().join("outside");
    fs::create_dir(&outside).expect("made");
    std::os::unix::fs::symlink(&outside, at("link")).expect("laid");
    for left in [at("link"), at("nothing")] {
        remove_ungiven(&left, &location.user).expect("looked at");
    }
    assert!(outside.exists() && at("link").exists());
}

/// The account puts a link where the directory was in which the clone's one was to be made.
///
/// Spec: C4
#[test]
fn k25_an_empty_directory_elsewhere_is_not_taken_for_one_that_was_begun() {
    if !is_root() {
        onecopy_testing::skip(
            "k25_an_empty_directory_elsewhere_is_not_taken_for_one_that_was_begun",
            "only root has servers of another account",
        );
        return;
    }
    let fixture = CloneFixture::new();
    let user = fixture.location("clone").user;
    let (home, elsewhere) = (fixture.directory.path().join("home"), fixture.directory.path().join("elsewhere"));
    user.create_directory(&home).expect("made");
    fs::create_dir_all(elsewhere.join("data")).expect("made");
    std::os::unix::fs::symlink(&elsewhere, home.join("clone")).expect("laid");
    std::os::unix::fs::lchown(home.join("clone"), Some(user.user_id()), None).expect("given");
    let target = home.join("clone/data");
    Marker::owner(&target, &marker().service_directory).expect_err("behind a link");
    remove_unmarked(&target).expect_err("behind a link");
    assert!(elsewhere.join("data").exists());
}

/// A fifo that somebody laid is not waited for.
///
/// Spec: C4
#[test]
fn k25_a_fifo_in_a_clone_is_not_waited_for() {
    let fixture = CloneFixture::new();
    let (location, _) = with_precious(&fixture);
    for name in ["global/pg_control", MARKER_FILE] {
        let path = location.directory.join(name);
        let _ = fs::remove_file(&path);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("made");
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    let also = location.clone();
    std::thread::spawn(move || {
        let marker = Marker::read(&also.directory);
        let written = also.write(Path::new("global/pg_control"), b"ours", 0o600);
        let _ = sender.send((marker.map(drop), written));
    });
    let (marker, written) = receiver.recv_timeout(std::time::Duration::from_secs(5)).expect("not waited for");
    assert!(marker.expect_err("no marker").to_string().contains(MARKER_FILE));
    written.expect("in its place");
    assert_eq!(fs::read(location.directory.join("global/pg_control")).expect("read"), b"ours");
}

/// What an image has no more is removed by its name: not where a directory on the way has become a link.
///
/// Spec: C4
#[test]
fn k25_nothing_outside_of_a_clone_is_removed() {
    let fixture = CloneFixture::new();
    let whole = image(&[5], &[(1, 10, false)], Some(16400));
    let mut skeleton = fixture.make("clone", &whole);
    let location = skeleton.location().clone();
    let precious = fixture.directory.path().join("precious");
    fs::create_dir_all(precious.join("16400")).expect("made");
    fs::write(precious.join("1"), "mine").expect("written");
    fs::write(precious.join("16400/1"), "mine").expect("written");
    fs::rename(location.directory.join("base/5"), fixture.directory.path().join("away")).expect("moved");
    std::os::unix::fs::symlink(&precious, location.directory.join("base/5")).expect("laid");
    let error = skeleton.reconcile(Arc::new(image(&[5], &[], Some(16400)))).expect_err("a link");
    assert!(error.to_string().contains("base/5/1"), "{error}");
    assert!(precious.join("1").exists() && precious.join("16400/1").exists());
}

/// The account lays a link where the directory of its tablespaces was.
///
/// Spec: C4
#[test]
fn k25_no_tablespace_outside_of_a_clone_is_removed() {
    if !is_root() {
        onecopy_testing::skip("k25_no_tablespace_outside_of_a_clone_is_removed", "only root can give a link away");
        return;
    }
    let fixture = CloneFixture::new();
    let whole = image(&[5], &[(1, 10, false)], Some(16400));
    let skeleton = fixture.make("clone", &whole);
    let location = skeleton.location().clone();
    let precious = fixture.directory.path().join("precious");
    fs::create_dir_all(precious.join("16400")).expect("made");
    fs::write(precious.join("16400/1"), "mine").expect("written");
    fs::rename(&location.tablespaces, fixture.directory.path().join("far")).expect("moved");
    std::os::unix::fs::symlink(&precious, &location.tablespaces).expect("laid");
    std::os::unix::fs::lchown(&location.tablespaces, Some(location.user.user_id()), None).expect("given");
    location.remove_tablespace(&whole.tablespaces[0]).expect_err("not the account's");
    remove(&location).expect_err("not the account's");
    assert!(precious.join("16400/1").exists());
}
