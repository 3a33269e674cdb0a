//! Files that share their blocks with the source's: made in moments, nothing to fill.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{Directory, Progress};
use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::filesystem::{Pair, pairs, share_blocks, type_name};
use super::{CloneMethod, MakeFuture, MethodName, PreparedClone, Report};
use crate::CloneError;
use crate::image::{Image, ImageFile, Scan, SmallFile};
use crate::plan::{Plan, Recovery};
use crate::recovery::{self, RecoveryPoint, slot};
use crate::target::{CloneLocation, Marker, Skeleton, finish, remove};

/// The method `reflink`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reflink;

impl CloneMethod for Reflink {
    fn name(&self) -> MethodName {
        MethodName::Reflink
    }

    fn obstacle(&self, plan: &Plan) -> Option<String> {
        obstacle(plan)
    }

    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a> {
        Box::pin(make(plans, report))
    }
}

/// Why blocks cannot be shared between source and clone.
pub(super) fn obstacle(plan: &Plan) -> Option<String> {
    match pairs(plan) {
        Ok(pairs) => pairs.iter().find_map(obstacle_between),
        Err(error) => Some(error.to_string()),
    }
}

fn obstacle_between(pair: &Pair) -> Option<String> {
    let error = share_blocks(pair).err()?;
    let ([directory, _], [source, target]) = (pair.directories(), pair.paths().map(Path::display));
    Some(match Errno::from_io_error(&error) {
        Some(Errno::XDEV) => format!("{source} and {target} are on two file systems"),
        Some(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL) => {
            format!("the file system {} cannot share blocks", type_name(&directory))
        }
        _ => format!("cannot share blocks of {source} with {target}: {error}"),
    })
}

/// What speaks for this method where nothing stands against it.
pub(super) fn merit(plan: &Plan) -> String {
    match type_name(&plan.source.data_directory).as_str() {
        "xfs" => "source and target share an XFS file system".to_owned(),
        name => format!("source and target share a {name} file system"),
    }
}

async fn make(plans: &[Plan], report: Report<'_>) -> Vec<Result<PreparedClone, CloneError>> {
    let Some(first) = plans.first() else { return Vec::new() };
    let slots: Vec<String> = plans.iter().map(|plan| plan.slot.clone()).collect();
    let begun = match recovery::begin(&first.source, &slots, strictest(plans)).await {
        Ok(begun) => begun,
        Err(error) => return all_failed(plans, error),
    };
    let shared = share_all(plans).await;
    // Every page of every clone is older than this.
    let point = match begun.end().await {
        Ok(point) => Arc::new(point),
        Err(error) => {
            plans.iter().zip(&shared).filter(|(_, shared)| shared.is_ok()).for_each(|(plan, _)| discard(plan));
            return all_failed(plans, error);
        }
    };
    let mut results = Vec::with_capacity(plans.len());
    for (plan, shared) in plans.iter().zip(shared) {
        let completed = match shared {
            Ok(bytes) => complete(plan, point.clone()).await.map(|()| bytes),
            Err(error) => Err(error),
        };
        if completed.is_err() {
            slot::drop(&plan.source.connection, &plan.slot).await;
        }
        results.push(completed.map(|bytes| {
            report(plan, Progress { done_bytes: bytes, total_bytes: bytes });
            let consistent_at = Some(point.consistent_at);
            PreparedClone { plan: plan.clone(), consistent_at, pause: Duration::ZERO, inherited: Vec::new() }
        }));
    }
    results
}

/// One recovery serves all: as from a backup if one of them wants that.
fn strictest(plans: &[Plan]) -> Recovery {
    let wanted = |recovery| plans.iter().any(|plan| plan.recovery == recovery);
    [Recovery::Backup, Recovery::Crash].into_iter().find(|recovery| wanted(*recovery)).unwrap_or(Recovery::Auto)
}

fn all_failed(plans: &[Plan], error: CloneError) -> Vec<Result<PreparedClone, CloneError>> {
    let error = Arc::new(error);
    plans.iter().map(|_| Err(CloneError::Shared(error.clone()))).collect()
}

/// The bytes of each clone's files.
async fn share_all(plans: &[Plan]) -> Vec<Result<u64, CloneError>> {
    let plans = plans.to_vec();
    let share = move || plans.iter().map(share).collect();
    tokio::task::spawn_blocking(share).await.expect("sharing blocks does not panic")
}

/// Makes the directory and all its files.
fn share(plan: &Plan) -> Result<u64, CloneError> {
    let source = &plan.source.data_directory;
    let source = &Directory::open(source).map_err(CloneError::file("open", source))?;
    let Scan { mut image, small } = Image::scan_open(source)?;
    // Files are made one by one as they are shared: there may be more of them than descriptors.
    let files = std::mem::take(&mut image.files);
    let skeleton = Skeleton::make(CloneLocation::of(plan)?, Arc::new(image), &Marker::of(plan, Path::new("")))?;
    let mut shared = share_files(source, skeleton.location(), &files);
    for entry in &small {
        shared = shared.and_then(|bytes| Ok(bytes + copy_small(source, &skeleton, &entry.path, entry.mode)?));
    }
    if shared.is_err() {
        discard(plan);
    }
    shared
}

fn share_files(source: &Directory, location: &CloneLocation, files: &[ImageFile]) -> Result<u64, CloneError> {
    let mut bytes = 0;
    for file in files {
        let path = source.path().join(&file.path);
        // What the source has removed since it was listed, replay removes too.
        let from = match source.open_read(&file.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            from => from.map_err(CloneError::file("open", &path))?,
        };
        let target = location.create(&file.path, file.mode)?;
        ioctl_ficlone(&target, &from).map_err(|error| CloneError::file("share the blocks of", &path)(error.into()))?;
        bytes += target.metadata().map_err(CloneError::file("read", &path))?.len();
    }
    Ok(bytes)
}

fn copy_small(source: &Directory, skeleton: &Skeleton, path: &Path, mode: u32) -> Result<u64, CloneError> {
    match source.read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        content => {
            let content = content.map_err(CloneError::file("read", source.path().join(path)))?;
            let bytes = content.len() as u64;
            skeleton.write_small(&[SmallFile { path: path.to_owned(), mode, content }])?;
            Ok(bytes)
        }
    }
}

/// What follows when it is known where the files are consistent.
async fn complete(plan: &Plan, point: Arc<RecoveryPoint>) -> Result<(), CloneError> {
    let plan = plan.clone();
    let complete = move || {
        let location = CloneLocation::of(&plan)?;
        let completed = point.write(&location).and_then(|()| finish(&location, point.major_version));
        if completed.is_err() {
            discard(&plan);
        }
        completed
    };
    tokio::task::spawn_blocking(complete).await.expect("completing a clone does not panic")
}

/// After a failure, whose error counts: what cannot be removed is only logged.
fn discard(plan: &Plan) {
    if let Err(error) = CloneLocation::of(plan).and_then(|location| remove(&location)) {
        tracing::warn!(target_directory = %plan.target.display(), %error, "an incomplete clone is left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use onecopy_postgres::ServiceUser;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// Between the list and the copy the account lays links.
    ///
    /// Spec: C4
    #[test]
    fn k24_what_has_become_a_link_since_it_was_listed_is_not_shared_and_not_copied() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
        let at = |name: &str| directory.path().join(name);
        for name in ["data/base/5", "outside"] {
            fs::create_dir_all(at(name)).expect("made");
        }
        for (name, content) in [("data/PG_VERSION", "15\n"), ("outside/1259", "secret"), ("secret", "secret")] {
            fs::write(at(name), content).expect("written");
        }
        let user = ServiceUser::resolve(None).expect("an account");
        let location = CloneLocation { directory: at("clone/data"), tablespaces: at("clone/tablespaces"), user };
        let marker = Marker::of_test(&location.tablespaces);
        let image = Image::scan(&at("data")).expect("listed").image;
        let skeleton = Skeleton::make(location, Arc::new(image), &marker).expect("made");
        fs::remove_dir(at("data/base/5")).expect("removed");
        symlink(at("outside"), at("data/base/5")).expect("laid");
        symlink(at("secret"), at("data/postgresql.conf")).expect("laid");
        let listed = ImageFile {
            path: "base/5/1259".into(),
            size_bytes: 6,
            mode: 0o600,
            identity: crate::image::FileIdentity { device: 1, inode: 1, born_nanoseconds: 0 },
        };
        let source = Directory::open(&at("data")).expect("opened");
        let shared = share_files(&source, skeleton.location(), &[listed]);
        let small = copy_small(&source, &skeleton, Path::new("postgresql.conf"), 0o600);
        assert!(!at("clone/data/postgresql.conf").exists() && !at("clone/data/base/5/1259").exists());
        for (error, name) in
            [(shared.expect_err("a link"), "base/5/1259"), (small.expect_err("a link"), "postgresql.conf")]
        {
            let error = error.to_string();
            assert!(error.contains(name) && error.contains("symbolic link"), "{error}");
        }
    }
}
