//! What a successor of this process must know of an image that another host reads, and how it goes on with it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::super::Hydrator;
use super::super::keeper_client::copy_of;
use super::super::record::{from_memory, to_memory};
use super::super::removal::blocking;
use crate::CloneError;
use crate::image::Image;
use crate::keeper::{IMAGE_PREFIX, KeptFiles, SAVED_SUFFIX, STATE_SUFFIX};
use crate::network::image_store::{ImageStore, ImageStoreDescriptors};
use crate::network::protocol::SessionId;
use crate::plan::Plan;
use crate::recovery::slot;
use crate::source::SourceFiles;

/// Parts of an image that the keeper holds.
const KEPT_PARTS: [&str; 4] = [STATE_SUFFIX, "store", SAVED_SUFFIX, "delivered"];

/// An image that another host reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Which one, over all lives of a service.
    pub number: u64,
    /// How the other host calls it.
    pub session: SessionId,
    /// The clone that is made from it.
    pub plan: Plan,
    /// What is frozen; none while it is being frozen: then it cannot be gone on with.
    pub image: Option<Image>,
}

/// An image that can be gone on with.
pub struct ResumedImage {
    /// Which one.
    pub record: ImageRecord,
    /// Its content.
    pub image_store: Arc<ImageStore>,
}

impl ImageRecord {
    /// All that were kept, in the order of their numbers; those that cannot be read are named in the log.
    pub fn all(kept: &KeptFiles) -> Vec<ImageRecord> {
        let states = kept.iter().filter(|(name, _)| name.starts_with(IMAGE_PREFIX) && name.ends_with(STATE_SUFFIX));
        let records = states.filter_map(|(name, file)| {
            let record = file.try_clone().map_err(CloneError::kernel("open an image's state")).and_then(from_memory);
            record.inspect_err(|error| tracing::error!(name, %error, "an image for a clone elsewhere is lost")).ok()
        });
        let mut records: Vec<ImageRecord> = records.collect();
        records.sort_by_key(|record| record.number);
        records
    }

    /// The keeper holds it from now on, instead of what it held of this number; with what is saved, if it is frozen.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub async fn keep(&self, hydrator: &Hydrator, image_store: Option<&ImageStore>) -> Result<(), CloneError> {
        let keep = |part: &str, file: OwnedFd| hydrator.keeper_client.keep(&name(self.number, part), file);
        if let Some(image_store) = image_store {
            let ImageStoreDescriptors { store, saved, delivered } = image_store.descriptors()?;
            keep("store", store);
            keep(SAVED_SUFFIX, saved);
            keep("delivered", delivered);
        }
        // Last: with it, all is there.
        let record = self.clone();
        keep(STATE_SUFFIX, blocking(move || to_memory(&record)).await?);
        Ok(())
    }

    /// Its content as the process before left it.
    ///
    /// # Errors
    /// It was not frozen, or given up; [`CloneError::File`], [`CloneError::Kernel`].
    pub async fn reopen(mut self, kept: &KeptFiles) -> Result<ResumedImage, CloneError> {
        let unfrozen = || CloneError::kernel("go on")(std::io::Error::other("it was not frozen yet"));
        let image = Arc::new(self.image.take().ok_or_else(unfrozen)?);
        let part = |part: &str| copy_of(kept, &name(self.number, part));
        let descriptors =
            ImageStoreDescriptors { store: part("store")?, saved: part(SAVED_SUFFIX)?, delivered: part("delivered")? };
        let directory = self.plan.source.data_directory.clone();
        let image_store = blocking(move || {
            let origin = Arc::new(SourceFiles::reopen(&directory, &image, |_| true)?);
            ImageStore::reopen(image, origin, descriptors)
        });
        Ok(ResumedImage { image_store: Arc::new(image_store.await?), record: self })
    }
}

/// The keeper closes what it held of an image.
pub fn forget(hydrator: &Hydrator, number: u64) {
    KEPT_PARTS.iter().for_each(|part| hydrator.keeper_client.forget(&name(number, part)));
}

/// Drops the slots of all images that were kept: nobody will serve them.
pub async fn clean_up(kept: &KeptFiles) {
    // A source that cannot be reached is waited for once, not once an image.
    let mut drops = JoinSet::new();
    for ImageRecord { plan, .. } in ImageRecord::all(kept) {
        tracing::error!(target = %plan.target.display(), "the image for a clone elsewhere is lost");
        drops.spawn(async move { slot::drop(&plan.source.connection, &plan.slot).await });
    }
    drops.join_all().await;
}

fn name(number: u64, part: &str) -> String {
    format!("{IMAGE_PREFIX}{number}-{part}")
}
