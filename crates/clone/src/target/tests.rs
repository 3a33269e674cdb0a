//! Directories of every shape: made, reshaped, moved, finished, removed.

mod hostile;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onecopy_postgres::{PostgresError, ServiceUser};
use proptest::prelude::*;
use tempfile::TempDir;

use super::marker::UNFINISHED_MARKER_FILE;
use super::{
    CloneLocation, MARKER_FILE, Marker, Owner, Skeleton, VersionGuard, finish, remove, remove_ungiven, remove_unmarked,
};
use crate::CloneError;
use crate::image::{FileIdentity, Image, ImageDirectory, ImageFile, SmallFile, Tablespace};

/// Path, kind or size, permission bits or what a link says.
type Listed = (PathBuf, String, String);

struct CloneFixture {
    directory: TempDir,
}

impl CloneFixture {
    fn new() -> CloneFixture {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
        CloneFixture { directory }
    }

    fn location(&self, name: &str) -> CloneLocation {
        let home = self.directory.path().join(name);
        let user = ServiceUser::resolve(None).expect("an account");
        CloneLocation { directory: home.join("data"), tablespaces: home.join("tablespaces"), user }
    }

    fn make(&self, name: &str, image: &Image) -> Skeleton {
        Skeleton::make(self.location(name), Arc::new(image.clone()), &marker()).expect("made")
    }
}

fn marker() -> Marker {
    let mut marker = Marker { slot: Some("clone".to_owned()), ..Marker::of_test(Path::new("/tablespaces")) };
    marker.source.password = Some("secret".to_owned());
    marker
}

/// An image with the databases `databases`, of which each has the files of `files`: number, size, whether others may
/// read it.
fn image(databases: &[u32], files: &[(u8, u16, bool)], tablespace: Option<u32>) -> Image {
    let mut image = Image::default();
    let mut directory = |path: PathBuf| image.directories.push(ImageDirectory { path, mode: 0o700 });
    directory("base".into());
    directory("pg_tblspc".into());
    let mut homes: Vec<PathBuf> = databases.iter().map(|oid| Path::new("base").join(oid.to_string())).collect();
    if let Some(oid) = tablespace {
        image.tablespaces.push(Tablespace { oid, location: "/elsewhere".into() });
        let version = Path::new("pg_tblspc").join(oid.to_string()).join("PG_15_202209061");
        image.directories.push(ImageDirectory { path: version.clone(), mode: 0o700 });
        homes.push(version.join("5"));
    }
    for home in homes {
        image.directories.push(ImageDirectory { path: home.clone(), mode: 0o750 });
        image.files.extend(files.iter().map(|(number, size, open)| ImageFile {
            path: home.join(number.to_string()),
            size_bytes: u64::from(*size),
            mode: if *open { 0o640 } else { 0o600 },
            identity: FileIdentity { device: 1, inode: u64::from(*number), born_nanoseconds: 0 },
        }));
    }
    image
}

fn list(directory: &Path, root: &Path, found: &mut Vec<Listed>) {
    for entry in fs::read_dir(directory).expect("listed") {
        let path = entry.expect("an entry").path();
        let metadata = fs::symlink_metadata(&path).expect("there");
        let name = path.strip_prefix(root).expect("inside").to_owned();
        let mode = format!("{:o} {}", metadata.mode() & 0o7777, metadata.uid());
        if metadata.is_symlink() {
            let target = fs::read_link(&path).expect("a link");
            found.push((name, "link".to_owned(), target.file_name().expect("a name").to_string_lossy().into_owned()));
        } else if metadata.is_dir() {
            found.push((name, "directory".to_owned(), mode));
            list(&path, root, found);
        } else {
            found.push((name, metadata.len().to_string(), mode));
        }
    }
}

/// Everything in a clone's two directories.
fn listing(location: &CloneLocation) -> Vec<Listed> {
    let mut found = Vec::new();
    for directory in [&location.directory, &location.tablespaces] {
        if directory.exists() {
            list(directory, directory.parent().expect("a home"), &mut found);
        }
    }
    found.sort();
    found
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_skeleton_has_the_image_s_files_and_nothing_in_them() {
    let fixture = CloneFixture::new();
    let image = image(&[5, 16384], &[(1, 0, false), (2, 20_000, true)], Some(16400));
    let skeleton = fixture.make("clone", &image);
    let user_id = skeleton.location().user.user_id();
    for (file, open) in image.files.iter().zip(skeleton.files()) {
        let metadata = fs::metadata(skeleton.location().directory.join(&file.path)).expect("there");
        let found = (metadata.len(), metadata.mode() & 0o7777, metadata.uid(), metadata.blocks());
        assert_eq!(found, (file.size_bytes, file.mode, user_id, 0), "{file:?}");
        assert_eq!(open.metadata().expect("open").ino(), metadata.ino());
    }
    assert!(skeleton.location().tablespaces.join("16400/PG_15_202209061/5/2").exists());
    for needed in ["pg_wal/archive_status", "pg_notify", "pg_stat_tmp"] {
        assert!(skeleton.location().directory.join(needed).is_dir(), "{needed}");
    }
    let content = SmallFile { path: "base/5/PG_VERSION".into(), mode: 0o600, content: b"15\n".to_vec() };
    skeleton.write_small(&[content]).expect("written");
    assert_eq!(fs::read(skeleton.location().directory.join("base/5/PG_VERSION")).expect("read"), b"15\n");
}

#[test]
fn a_place_where_something_lies_is_refused_and_left_alone() {
    let fixture = CloneFixture::new();
    for name in ["data", "tablespaces"] {
        let location = fixture.location(name);
        let occupied = location.directory.parent().expect("a home").join(name);
        fs::create_dir_all(&occupied).expect("made");
        fs::write(occupied.join("precious"), "mine").expect("written");
        let made = Skeleton::make(location, Arc::new(Image::default()), &marker());
        let occupied_error = PostgresError::DataDirectoryNotEmpty { path: occupied.clone() }.to_string();
        assert_eq!(made.expect_err("occupied").to_string(), occupied_error);
        assert_eq!(fs::read(occupied.join("precious")).expect("read"), b"mine");
    }
    // An empty directory is as good as none, and what fails is removed.
    let location = fixture.location("empty");
    fs::create_dir_all(&location.directory).expect("made");
    let mut impossible = image(&[5], &[(1, 1, false)], None);
    impossible.files[0].path = "no/such/directory/1".into();
    let error = Skeleton::make(location.clone(), Arc::new(impossible), &marker()).expect_err("no directory");
    assert!(matches!(error, CloneError::File { .. }), "{error}");
    assert!(!location.directory.exists());
}

#[test]
fn a_marker_tells_who_and_not_the_password() {
    let fixture = CloneFixture::new();
    let location = fixture.location("clone");
    assert_eq!(Marker::read(&location.directory).expect("none"), None);
    fs::create_dir_all(&location.directory).expect("made");
    marker().write(&location).expect("written");
    let text = fs::read_to_string(location.directory.join(MARKER_FILE)).expect("read");
    assert!(!text.contains("secret"), "{text}");
    let mut expected = marker();
    expected.source.password = None;
    assert_eq!(Marker::read(&location.directory).expect("read"), Some(expected));
    fs::write(location.directory.join(MARKER_FILE), "nonsense").expect("written");
    assert!(Marker::read(&location.directory).is_err());
}

/// Every state in which a service that makes a clone's directory can be killed.
#[test]
fn what_has_no_marker_yet_is_known_and_removed() {
    let fixture = CloneFixture::new();
    let service = marker().service_directory;
    let location = fixture.location("clone");
    let owner = || Marker::owner(&location.directory, &service).expect("known");
    for content in [None, Some(""), Some("made_by = ")] {
        assert_eq!(owner(), Owner::Nobody, "it is not there");
        remove_unmarked(&location.directory).expect("removed already");
        fs::create_dir_all(&location.directory).expect("made");
        if let Some(content) = content {
            // It is given to the account before anything is written into it.
            if is_root() {
                std::os::unix::fs::chown(&location.directory, Some(location.user.user_id()), None).expect("given");
            }
            fs::write(location.directory.join(UNFINISHED_MARKER_FILE), content).expect("written");
        }
        assert_eq!(owner(), Owner::Nobody, "{content:?}");
        remove_unmarked(&location.directory).expect("removed");
        assert!(!location.directory.exists(), "{content:?}");
    }
    fs::create_dir_all(&location.directory).expect("made");
    fs::write(location.directory.join(UNFINISHED_MARKER_FILE), "made_by = ").expect("written");
    marker().write(&location).expect("written");
    assert_eq!(owner(), Owner::Service);
    assert_eq!(Marker::owner(&location.directory, Path::new("/run/onecopy/another")).expect("known"), Owner::Other);
    assert!(!location.directory.join(UNFINISHED_MARKER_FILE).exists());
    remove_unmarked(&location.directory).expect_err("something lies there");
    fs::remove_file(location.directory.join(MARKER_FILE)).expect("removed");
    fs::write(location.directory.join("precious"), "mine").expect("written");
    assert_eq!(owner(), Owner::Other);
}

#[test]
fn a_guard_is_no_version_until_it_is_lifted() {
    let fixture = CloneFixture::new();
    let skeleton = fixture.make("clone", &image(&[5], &[(1, 10, false)], Some(16400)));
    let location = skeleton.location().clone();
    let guard = VersionGuard::new(location.clone(), 17);
    assert!(!VersionGuard::is_installed(&location.directory));
    guard.install().expect("laid");
    guard.install().expect("laid again");
    assert!(VersionGuard::is_installed(&location.directory));
    assert!(fs::read(location.directory.join("PG_VERSION")).is_err(), "nobody else reads it");
    let descriptor = guard.descriptor().expect("made").descriptor;
    let mut file =
        File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&descriptor))).expect("opened");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("read");
    assert_eq!(text, "17\n");
    let writable =
        File::options().write(true).open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&descriptor)));
    assert!(writable.is_ok_and(|file| std::os::unix::fs::FileExt::write_at(&file, b"18", 0).is_err()), "sealed");

    finish(&location, 17).expect("finished");
    assert!(!VersionGuard::is_installed(&location.directory));
    assert_eq!(fs::read_to_string(location.directory.join("PG_VERSION")).expect("read"), "17\n");
    assert!(!location.directory.join(MARKER_FILE).exists());
    let rest = listing(&location);
    assert!(rest.iter().all(|(path, ..)| !path.to_string_lossy().contains("onecopy")), "{rest:?}");
}

/// `allow_in_place_tablespaces`: no link, and no directory elsewhere.
#[test]
fn a_clone_with_a_tablespace_in_its_directory_is_finished() {
    let fixture = CloneFixture::new();
    let mut image = image(&[5], &[(1, 10, false)], None);
    image.directories.push(ImageDirectory { path: "pg_tblspc/16400".into(), mode: 0o700 });
    let location = fixture.make("clone", &image).location().clone();
    finish(&location, 17).expect("finished");
    assert!(!location.tablespaces.exists() && location.directory.join("pg_tblspc/16400").is_dir());
}

#[test]
fn a_moved_skeleton_links_to_where_its_tablespaces_are() {
    let fixture = CloneFixture::new();
    let image = image(&[5], &[(1, 10, false)], Some(16400));
    let mut skeleton = fixture.make("spare", &image);
    let target = fixture.location("target");
    skeleton.move_to(&target.directory, &target.tablespaces).expect("moved");
    assert_eq!(
        fs::read_link(target.directory.join("pg_tblspc/16400")).expect("a link"),
        target.tablespaces.join("16400")
    );
    assert_eq!(listing(&target), listing(fixture.make("fresh", &image).location()));
    assert!(!fixture.location("spare").directory.exists());
    let occupied = skeleton.move_to(&fixture.location("fresh").directory, &target.tablespaces);
    assert!(occupied.is_err());
    drop(skeleton);
    remove(&target).expect("removed");
    remove(&target).expect("removed already");
    assert!(!target.directory.exists() && !target.tablespaces.exists());
}

/// What stands in a marker can be written by the account of the clone's server, and root acts on it.
#[test]
fn only_directories_of_the_clone_s_account_are_removed() {
    if !rustix::process::geteuid().is_root() {
        onecopy_testing::skip(
            "only_directories_of_the_clone_s_account_are_removed",
            "only root can give a file to another account",
        );
        return;
    }
    let fixture = CloneFixture::new();
    let location = fixture.make("clone", &image(&[5], &[(1, 10, false)], None)).location().clone();
    let foreign = fixture.directory.path().join("foreign");
    fs::create_dir(&foreign).expect("made");
    fs::write(foreign.join("precious"), "mine").expect("written");
    let link = fixture.directory.path().join("link");
    std::os::unix::fs::symlink(&location.directory, &link).expect("laid");
    for tablespaces in [foreign.clone(), link] {
        let error =
            remove(&CloneLocation { tablespaces: tablespaces.clone(), ..location.clone() }).expect_err("refused");
        assert!(error.to_string().contains(&tablespaces.display().to_string()), "{error}");
    }
    let error = remove(&CloneLocation { directory: foreign.clone(), ..location.clone() }).expect_err("refused");
    assert!(error.to_string().contains("does not belong"), "{error}");
    assert_eq!(fs::read(foreign.join("precious")).expect("read"), b"mine");
    assert!(location.directory.join("base/5/1").exists() && location.directory.join(MARKER_FILE).exists());

    // Nor can a marker speak for an account that has not written it.
    std::os::unix::fs::chown(location.directory.join(MARKER_FILE), Some(0), None).expect("given away");
    let error = Marker::read(&location.directory).expect_err("not believed");
    assert!(error.to_string().contains("belongs to somebody else"), "{error}");
    fs::set_permissions(location.directory.join(MARKER_FILE), fs::Permissions::from_mode(0o644)).expect("readable");
    let error = Marker::read(&location.directory).expect_err("not believed");
    assert!(error.to_string().contains("belongs to another"), "{error}");
    let path = location.directory.join(MARKER_FILE);
    fs::rename(&path, fixture.directory.path().join("marker")).expect("moved");
    std::os::unix::fs::symlink(fixture.directory.path().join("marker"), &path).expect("laid");
    assert!(Marker::read(&location.directory).is_err(), "a link is no marker");
    fs::remove_file(&path).expect("removed");
    remove(&location).expect("removed");
    assert!(!location.directory.exists());
}

fn shapes() -> impl Strategy<Value = Image> {
    let files = proptest::collection::btree_map(0_u8..20, (any::<u16>(), any::<bool>()), 0..12);
    let databases = proptest::collection::btree_set(1_u32..5, 1..4);
    (databases, files, proptest::option::of(16_400_u32..16_402), any::<bool>()).prop_map(
        |(databases, files, tablespace, backwards)| {
            let databases: Vec<u32> = databases.into_iter().collect();
            let mut files: Vec<(u8, u16, bool)> =
                files.into_iter().map(|(number, (size, open))| (number, size, open)).collect();
            if backwards {
                files.reverse();
            }
            image(&databases, &files, tablespace)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_reshaped_skeleton_is_like_a_new_one(before in shapes(), after in shapes()) {
        let fixture = CloneFixture::new();
        let mut skeleton = fixture.make("old", &before);
        skeleton.reconcile(Arc::new(after.clone())).expect("reconciled");
        let fresh = fixture.make("new", &after);
        prop_assert_eq!(listing(skeleton.location()), listing(fresh.location()));
        for (file, open) in after.files.iter().zip(skeleton.into_files()) {
            let named = fs::metadata(fixture.location("old").directory.join(&file.path)).expect("there");
            prop_assert_eq!(open.metadata().expect("open").ino(), named.ino());
        }
    }
}
