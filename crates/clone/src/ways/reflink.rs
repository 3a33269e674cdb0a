//! Files that share their blocks with the source's: made in moments, nothing to fill.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::Progress;
use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::filesystem::{Pair, pairs, share_blocks, type_name};
use super::{Made, MakeFuture, Report, Way, WayName};
use crate::CloneError;
use crate::image::{Image, ImageFile, Scan, SmallFile};
use crate::plan::{Plan, Recovery};
use crate::recovery::{self, RecoveryPoint, slot};
use crate::target::{Marker, Place, Skeleton, finish, remove};

/// The way `reflink`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reflink;

impl Way for Reflink {
    fn name(&self) -> WayName {
        WayName::Reflink
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
    let name = type_name(&pair.source);
    Some(match Errno::from_io_error(&error) {
        Some(Errno::XDEV) => format!("{} and {} are on two file systems", pair.source.display(), pair.target.display()),
        Some(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL) => format!("the file system {name} cannot share blocks"),
        _ => format!("cannot share blocks of {} with {}: {error}", pair.source.display(), pair.target.display()),
    })
}

/// What speaks for this way where nothing stands against it.
pub(super) fn merit(plan: &Plan) -> String {
    match type_name(&plan.source.data_directory).as_str() {
        "xfs" => "source and target share an XFS file system".to_owned(),
        name => format!("source and target share a {name} file system"),
    }
}

async fn make(plans: &[Plan], report: Report<'_>) -> Vec<Result<Made, CloneError>> {
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
            drop_slot(plan).await;
        }
        results.push(completed.map(|bytes| {
            report(plan, Progress { done_bytes: bytes, total_bytes: bytes });
            let consistent_at = Some(point.consistent_at);
            Made { plan: plan.clone(), consistent_at, pause: Duration::ZERO, inherited: Vec::new() }
        }));
    }
    results
}

/// One recovery serves all: as from a backup if one of them wants that.
fn strictest(plans: &[Plan]) -> Recovery {
    let wanted = |recovery| plans.iter().any(|plan| plan.recovery == recovery);
    [Recovery::Backup, Recovery::Crash].into_iter().find(|recovery| wanted(*recovery)).unwrap_or(Recovery::Auto)
}

fn all_failed(plans: &[Plan], error: CloneError) -> Vec<Result<Made, CloneError>> {
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
    let Scan { mut image, small } = Image::scan(source)?;
    // Files are made one by one as they are shared: there may be more of them than descriptors.
    let files = std::mem::take(&mut image.files);
    let skeleton = Skeleton::make(Place::of(plan)?, Arc::new(image), &Marker::of(plan, Path::new("")))?;
    let mut shared = share_files(source, skeleton.place(), &files);
    for entry in &small {
        shared = shared.and_then(|bytes| Ok(bytes + copy_small(source, &skeleton, &entry.path, entry.mode)?));
    }
    if shared.is_err() {
        discard(plan);
    }
    shared
}

fn share_files(source: &Path, place: &Place, files: &[ImageFile]) -> Result<u64, CloneError> {
    let mut bytes = 0;
    for file in files {
        let path = source.join(&file.path);
        // What the source has removed since it was listed, replay removes too.
        let Some(from) = open_source(&path)? else { continue };
        let target = place.create(&file.path, file.mode)?;
        ioctl_ficlone(&target, &from).map_err(|error| CloneError::file("share the blocks of", &path)(error.into()))?;
        bytes += target.metadata().map_err(CloneError::file("read", &path))?.len();
    }
    Ok(bytes)
}

fn copy_small(source: &Path, skeleton: &Skeleton, path: &Path, mode: u32) -> Result<u64, CloneError> {
    let from = source.join(path);
    match fs::read(&from) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        content => {
            let content = content.map_err(CloneError::file("read", &from))?;
            let bytes = content.len() as u64;
            skeleton.write_small(&[SmallFile { path: path.to_owned(), mode, content }])?;
            Ok(bytes)
        }
    }
}

fn open_source(path: &Path) -> Result<Option<File>, CloneError> {
    match fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        file => file.map(Some).map_err(CloneError::file("open", path)),
    }
}

/// What follows when it is known where the files are consistent.
async fn complete(plan: &Plan, point: Arc<RecoveryPoint>) -> Result<(), CloneError> {
    let plan = plan.clone();
    let complete = move || {
        let place = Place::of(&plan)?;
        let completed = point.write(&place).and_then(|()| finish(&place, point.major_version));
        if completed.is_err() {
            discard(&plan);
        }
        completed
    };
    tokio::task::spawn_blocking(complete).await.expect("completing a clone does not panic")
}

/// After a failure, whose error counts: what cannot be removed is only logged.
fn discard(plan: &Plan) {
    if let Err(error) = Place::of(plan).and_then(|place| remove(&place)) {
        tracing::warn!(target_directory = %plan.target.display(), %error, "an incomplete clone is left");
    }
}

async fn drop_slot(plan: &Plan) {
    if let Err(error) = slot::drop_on(&plan.source, &plan.slot).await {
        tracing::warn!(slot = %plan.slot, %error, "a replication slot is left");
    }
}
