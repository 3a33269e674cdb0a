//! The freeze: the only part that the source's server waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::{Candidate, Notification, RecoveryGroup};
use crate::CloneError;
use crate::fill::{Filling, SharedBitmap};
use crate::free_space::SourceDisks;
use crate::hydrator::Hydrator;
use crate::hydrator::clone_job::CloneJob;
use crate::image::{Image, SmallFile};
use crate::source::{Source, SourceFiles};
use crate::target::{CloneLocation, Skeleton};

/// Freezes that are tried when databases are made just then: each costs a barrier of some 100 ms, and an application
/// that makes databases all the time, as tests do, hits several in a row.
const FREEZES_MAX: u32 = 20;
/// One freeze at a time: a clone here and one on another host wait for each other, so long at most.
pub(in crate::hydrator) const OTHER_FREEZE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often it is looked whether it is.
pub(in crate::hydrator) const OTHER_FREEZE_INTERVAL: Duration = Duration::from_millis(20);

/// A clone that was frozen.
pub(super) struct Frozen {
    pub clone: Arc<CloneJob>,
    pub notifications: mpsc::Sender<Notification>,
    pub location: CloneLocation,
    pub filling: Arc<Filling>,
    pub origin: Arc<SourceFiles>,
}

/// What all clones of one freeze share.
pub(super) struct Freeze {
    pub groups: Vec<RecoveryGroup<Frozen>>,
    pub failed: Vec<(Arc<CloneJob>, mpsc::Sender<Notification>, CloneError)>,
    pub image: Arc<Image>,
    pub small: Arc<Vec<SmallFile>>,
    pub pause: Duration,
}

/// The freeze. When it fails nothing has happened to the source, and the clones are given back.
pub(super) async fn freeze(
    hydrator: &Arc<Hydrator>,
    mut groups: Vec<RecoveryGroup<Candidate>>,
) -> Result<Freeze, (Vec<RecoveryGroup<Candidate>>, CloneError)> {
    let (begin, mut attempts) = (Instant::now(), 0);
    loop {
        attempts += 1;
        let server = groups[0].members[0].clone.plan.source.clone();
        let source = match hydrator.watched(&server).await {
            Ok(source) => source,
            Err(error) => return Err((groups, error)),
        };
        let frozen = tokio::task::spawn_blocking(move || freeze_now(&source, groups)).await;
        match frozen.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
            Ok(freeze) => return Ok(freeze),
            Err((again, CloneError::NewDirectory { .. })) if attempts < FREEZES_MAX => {
                // A database was made since the source was adopted.
                groups = again;
                let source = hydrator.source();
                if let Some(source) = source
                    && let Err(error) = source.adopt(&server).await
                {
                    return Err((groups, error));
                }
            }
            Err((again, CloneError::FreezeUnderWay)) if begin.elapsed() < OTHER_FREEZE_TIMEOUT => {
                groups = again;
                tokio::time::sleep(OTHER_FREEZE_INTERVAL).await;
                attempts -= 1;
            }
            Err(failure) => return Err(failure),
        }
    }
}

fn freeze_now(
    source: &Arc<Source>,
    mut groups: Vec<RecoveryGroup<Candidate>>,
) -> Result<Freeze, (Vec<RecoveryGroup<Candidate>>, CloneError)> {
    let mut close = || {
        let disks = SourceDisks::of(source.data_directory())?;
        let ready = source.get_ready()?;
        // The directories are as old as the preparations took, a prepared one far older: what has changed since then is
        // told them while nobody waits.
        for candidate in groups.iter_mut().flat_map(|group| &mut group.members) {
            reshape(&mut candidate.skeleton, ready.image());
        }
        Ok((disks, ready.close_gate()?))
    };
    let (disks, mut freezing) = match close() {
        Ok(closed) => closed,
        Err(error) => return Err((groups, error)),
    };
    let image = Arc::clone(freezing.image());
    let mut failures = Vec::new();
    let mut frozen_groups = Vec::new();
    for group in groups {
        let mut members = Vec::new();
        for Candidate { clone, notifications, mut skeleton } in group.members {
            let frozen = || {
                reshape(&mut skeleton, &image);
                let skeleton = skeleton?;
                let location = skeleton.location().clone();
                let origin = Arc::new(freezing.files());
                let bitmap = SharedBitmap::create(&image)?;
                let files = skeleton.into_files();
                let filling = Filling::new(Arc::clone(&image), files, Arc::clone(&origin) as _, bitmap)?;
                let filling = Arc::new(filling.beside(disks.clone()));
                freezing.follow(Arc::clone(&filling) as _)?;
                Ok((location, filling, origin))
            };
            match frozen() {
                Ok((location, filling, origin)) => {
                    members.push(Frozen { clone, notifications, location, filling, origin })
                }
                Err(error) => failures.push((clone, notifications, error)),
            }
        }
        frozen_groups.push(RecoveryGroup { begun: group.begun, members });
    }
    let small = Arc::new(freezing.small_files().to_vec());
    // Who followed in time is none the worse for a gate that opened by itself.
    let pause = freezing.open_gate().unwrap_or(crate::source::GATE_CLOSED_MAX);
    Ok(Freeze { groups: frozen_groups, failed: failures, image, small, pause })
}

/// Brings a clone's directory into the shape of an image. When that fails the directory must not be touched again: the
/// error stays in its place, and is told at the end.
fn reshape(skeleton: &mut Result<Skeleton, CloneError>, image: &Arc<Image>) {
    if let Ok(shaped) = skeleton
        && let Err(error) = shaped.reconcile(Arc::clone(image))
    {
        *skeleton = Err(error);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use onecopy_postgres::ServiceUser;

    use super::*;
    use crate::image::{FileIdentity, ImageDirectory, ImageFile};
    use crate::target::Marker;

    fn image(files: &[&str]) -> Arc<Image> {
        let mut image = Image::default();
        image.directories.push(ImageDirectory { path: "base/5".into(), mode: 0o700 });
        let identity = FileIdentity { device: 0, inode: 0, born_nanoseconds: 0 };
        let listed = files.iter().map(|path| ImageFile { path: path.into(), size_bytes: 10, mode: 0o600, identity });
        image.files.extend(listed);
        Arc::new(image)
    }

    #[test]
    fn a_directory_that_cannot_be_reshaped_is_left_alone_and_its_own_error_is_told() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| directory.path().join("home").join(name);
        let user = ServiceUser::resolve(None).unwrap();
        let marker = Marker::of_test(&at("tablespaces"));
        let place = CloneLocation { directory: at("clone"), tablespaces: at("tablespaces"), user };
        let mut skeleton = Ok(Skeleton::make(place, image(&["base/5/1"]), &marker).unwrap());
        fs::write(at("clone/base/5/2"), "in its way").unwrap();
        reshape(&mut skeleton, &image(&["base/5/1", "base/5/2"]));
        // What failed would not fail again.
        fs::remove_file(at("clone/base/5/2")).unwrap();
        reshape(&mut skeleton, &image(&["base/5/3"]));
        let error = skeleton.unwrap_err().to_string();
        assert!(error.contains("base/5/2"), "{error}");
        assert!(at("clone/base/5/1").exists() && !at("clone/base/5/3").exists());
    }
}
