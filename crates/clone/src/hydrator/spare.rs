//! A directory that is prepared before anybody wants a clone: then only what has changed since must be made.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::ServiceUser;

use super::removal::{self, Remains, blocking};
use super::{Hydrator, lock};
use crate::CloneError;
use crate::image::Image;
use crate::plan::Plan;
use crate::service::SpareWanted;
use crate::target::{CloneLocation, Marker, Skeleton};

/// The name under which the keeper holds what is wanted.
pub const SPARE_KEPT: &str = "spare";

/// The next one is begun only then: the clone that has got this one is about to start, and the disk is its own.
const NEXT_PAUSE: Duration = Duration::from_secs(5);
/// How often it is looked whether what was left before is gone.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(100);

/// What is wanted and what is there.
#[derive(Debug, Default)]
pub struct Spare {
    wanted: Option<SpareWanted>,
    skeleton: Option<Skeleton>,
}

impl Spare {
    /// Whether there shall be one.
    pub fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Changes what is wanted.
    pub fn set_wanted(&mut self, wanted: Option<SpareWanted>) {
        self.wanted = wanted;
    }

    /// Where one is or will be.
    pub fn directory(&self) -> Option<PathBuf> {
        let location = self.skeleton.as_ref().map(|skeleton| skeleton.location().directory.clone());
        location.or_else(|| self.wanted.as_ref().map(|wanted| wanted.directory.clone()))
    }

    /// One that is there and is not what is wanted.
    fn take_unwanted(&mut self) -> Option<Skeleton> {
        let wanted = self.wanted.as_ref().map(|wanted| (&wanted.directory, wanted.user_name.as_str()));
        let location = self.skeleton.as_ref()?.location();
        if wanted == Some((&location.directory, location.user.name())) {
            return None;
        }
        self.skeleton.take()
    }
}

/// Makes what is wanted and not there, removes what is there and not wanted, whenever that changes.
pub async fn provide(hydrator: Arc<Hydrator>) {
    loop {
        hydrator.spare_changed.notified().await;
        let _lingering = hydrator.linger();
        // What an earlier service had prepared may be going at this moment.
        while !lock(&hydrator.removing).is_empty() {
            tokio::time::sleep(REMOVAL_INTERVAL).await;
        }
        let unwanted = lock(&hydrator.spare).take_unwanted();
        if let Some(skeleton) = unwanted {
            remove(&hydrator, skeleton).await;
        }
        let missing = {
            let spare = lock(&hydrator.spare);
            spare.wanted.clone().filter(|_| spare.skeleton.is_none())
        };
        hydrator.write_targets();
        if let Some(wanted) = missing {
            match make(&hydrator, &wanted).await {
                Ok(skeleton) => lock(&hydrator.spare).skeleton = Some(skeleton),
                // The next clone is made without; then it is tried again.
                Err(error) => tracing::warn!(%error, "no directory could be prepared for the next clone"),
            }
        }
    }
}

async fn make(hydrator: &Arc<Hydrator>, wanted: &SpareWanted) -> Result<Skeleton, CloneError> {
    let directory = wanted.source.data_directory.clone();
    let image = blocking(move || Ok(Image::scan(&directory)?.image)).await?;
    // Those of the source, too: the clone that gets it needs them.
    let reservation = hydrator.reserve_descriptors(&wanted.source.data_directory, image.files.len(), 2)?;
    // Watched and adopted long before it is needed, too.
    hydrator.watched(&wanted.source).await?.adopt(&wanted.source).await?;
    let (wanted, service_directory) = (wanted.clone(), hydrator.rendezvous.directory().to_owned());
    blocking(move || {
        let _reservation = reservation;
        let user = ServiceUser::resolve(Some(&wanted.user_name))?;
        let tablespaces = tablespaces_of(&wanted.directory);
        let location = CloneLocation { directory: wanted.directory, tablespaces, user };
        let marker = Marker {
            made_by: format!("onecopy {}", env!("CARGO_PKG_VERSION")),
            source_data_directory: wanted.source.data_directory.clone(),
            tablespaces: location.tablespaces.clone(),
            user_name: wanted.user_name,
            service_directory,
            slot: None,
            source: wanted.source.connection,
        };
        Skeleton::make(location, Arc::new(image), &marker)
    })
    .await
}

/// Where the tablespaces of a prepared directory are.
pub fn tablespaces_of(directory: &Path) -> PathBuf {
    let mut tablespaces = directory.as_os_str().to_owned();
    tablespaces.push(".tablespaces");
    tablespaces.into()
}

async fn remove(hydrator: &Hydrator, skeleton: Skeleton) {
    let location = skeleton.location().clone();
    drop(skeleton);
    let remains = Remains {
        directory: location.directory,
        tablespaces: location.tablespaces,
        has_planned_tablespaces: true,
        user_name: location.user.name().to_owned(),
        service_directory: hydrator.rendezvous.directory().to_owned(),
    };
    if let Err(error) = removal::remove(remains, None).await {
        tracing::warn!(%error, "a prepared directory is left");
    }
}

impl Hydrator {
    /// The prepared directory, if a clone of this plan can have it; the next one is then begun.
    pub(super) fn take_spare(self: &Arc<Self>, plan: &Plan) -> Option<Skeleton> {
        let mut spare = lock(&self.spare);
        let location = spare.skeleton.as_ref()?.location();
        let fits = location.user.name() == plan.user_name && same_device(&location.directory, &plan.target);
        let skeleton = if fits { spare.skeleton.take() } else { None };
        if skeleton.is_some() {
            let hydrator = Arc::clone(self);
            tokio::spawn(async move {
                tokio::time::sleep(NEXT_PAUSE).await;
                hydrator.spare_changed.notify_one();
            });
        }
        skeleton
    }
}

/// Whether a directory can be moved there: the nearest directory above that exists decides.
fn same_device(directory: &Path, target: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.dev()).ok();
    let found = device(directory);
    found.is_some() && found == target.ancestors().find_map(device)
}
