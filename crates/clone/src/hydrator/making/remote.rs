//! A clone whose source is on another host: the image comes over the network, all else is as here.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::completing::{make_runnable, notify_ready};
use super::preparing::admit;
use super::{Notification, fail, notify};
use crate::CloneError;
use crate::fill::{Filling, SharedBitmap};
use crate::hydrator::clone_job::{CloneJob, Content, Running};
use crate::hydrator::removal::blocking;
use crate::hydrator::{Hydrator, failed};
use crate::network::RemoteHost;
use crate::network::client::{HostDialler, RemoteOrigin};
use crate::network::manifest::{Manifest, Opening};
use crate::plan::Plan;
use crate::service::Event;
use crate::target::{CloneLocation, Marker, Skeleton};

impl Hydrator {
    /// Wants a clone of a source on another host; its news come until it is ready or has failed.
    pub(in crate::hydrator) fn order_from(
        self: &Arc<Self>,
        host: RemoteHost,
        plan: Plan,
    ) -> mpsc::Receiver<Notification> {
        // All that is ever said fits.
        let (notifications, receiver) = mpsc::channel(4);
        tokio::spawn(make(Arc::clone(self), host, plan, notifications));
        receiver
    }
}

async fn make(hydrator: Arc<Hydrator>, host: RemoteHost, plan: Plan, notifications: mpsc::Sender<Notification>) {
    let lingering = hydrator.linger();
    notify(&notifications, Event::Preparing, None);
    let clone = match admit(&hydrator, plan, Some(host.clone())) {
        Ok(clone) => clone,
        Err((target, error)) => return notify(&notifications, failed(Some(&target), error), None),
    };
    hydrator.write_targets();
    match make_ready(&hydrator, &clone, host, &notifications).await {
        Ok(running) => notify_ready(&hydrator, clone, running, &notifications),
        Err(error) => fail(&hydrator, clone, &notifications, &error).await,
    }
    drop(lingering);
}

async fn make_ready(
    hydrator: &Arc<Hydrator>,
    clone: &Arc<CloneJob>,
    host: RemoteHost,
    notifications: &mpsc::Sender<Notification>,
) -> Result<Arc<Running>, CloneError> {
    let plan = clone.plan.clone();
    let (origin, opening) = blocking(move || RemoteOrigin::open(dialler(&host, &plan)?, &plan)).await?;
    let origin = Arc::new(origin);
    let Opening { manifest: Manifest { image, recovery, pause_us }, small_files } = opening;
    notify(notifications, Event::Frozen { pause_us }, None);
    let (image, point, small) = (Arc::new(image), Arc::new(recovery), Arc::new(small_files));
    let marker = marker_of(&clone.plan, hydrator.rendezvous().directory());
    let (plan, work_image, work_origin) = (clone.plan.clone(), Arc::clone(&image), Arc::clone(&origin));
    // The other files are open on the other host.
    let promised = hydrator.reserve_descriptors(&clone.plan.source.data_directory, image.files.len(), 1);
    let laid = blocking(move || {
        let _reservation = promised?;
        let location = CloneLocation::of(&plan)?;
        let skeleton = Skeleton::make(location.clone(), Arc::clone(&work_image), &marker)?;
        let bitmap = SharedBitmap::create(&work_image)?;
        let origin = Arc::clone(&work_origin);
        let filling = Arc::new(Filling::new(work_image, skeleton.into_files(), origin as _, bitmap)?);
        work_origin.acknowledge(filling.bitmap())?;
        Ok((location, filling))
    });
    let content = Content::Remote(Arc::clone(&origin));
    let made = match laid.await {
        Ok((location, filling)) => {
            make_runnable(hydrator, clone, (location, filling, content), &point, &image, &small).await
        }
        Err(error) => Err(error),
    };
    if made.is_err() {
        let _ = blocking(move || {
            origin.end(false);
            Ok(())
        })
        .await;
    }
    made
}

/// What tells of the clone. Its slot is the other host's to drop: whoever clears the clone away here must not connect
/// where the order said.
fn marker_of(plan: &Plan, service_directory: &Path) -> Marker {
    Marker { slot: None, ..Marker::of(plan, service_directory) }
}

/// How the source's host is reached.
pub(in crate::hydrator) fn dialler(host: &RemoteHost, plan: &Plan) -> Result<Arc<HostDialler>, CloneError> {
    Ok(Arc::new(HostDialler::new(host, plan.source.data_directory.clone())?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::network::server::tests::SourceHost;

    #[test]
    fn the_marker_of_a_clone_from_elsewhere_names_no_slot() {
        let directory = tempfile::tempdir().unwrap();
        let plan = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1)).plan();
        let marker = marker_of(&plan, Path::new("/service"));
        assert_eq!((marker.slot, marker.tablespaces), (None, plan.tablespaces));
    }
}
