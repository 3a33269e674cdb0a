//! The method `lazy`, by the service of the source.

use std::path::PathBuf;
use std::time::Duration;

use super::client::{MakingEvent, Service};
use crate::CloneError;
use crate::methods::{LazyMaker, MakeFuture, PreparedClone, Report};
use crate::plan::Plan;

/// Makes clones by the service of their source, which is started when it is not there.
#[derive(Debug)]
pub struct ServiceMaker {
    program: PathBuf,
}

impl ServiceMaker {
    /// `program` is what [`Service::reach`] runs.
    pub fn new(program: PathBuf) -> ServiceMaker {
        ServiceMaker { program }
    }

    async fn make_all(
        &self,
        plans: &[Plan],
        results: &mut [Option<Result<PreparedClone, CloneError>>],
    ) -> Result<(), CloneError> {
        let Some(first) = plans.first() else { return Ok(()) };
        let service = Service::reach(&self.program, &first.source.data_directory).await?;
        let failed = |reason| CloneError::Service { directory: service.rendezvous().directory().to_owned(), reason };
        let mut making = service.clone_all(plans.to_vec()).await?;
        let mut pause_now = Duration::ZERO;
        while let Some(event) = making.next().await? {
            let (target, result) = match event {
                MakingEvent::Preparing => continue,
                MakingEvent::Frozen { pause } => {
                    pause_now = pause;
                    continue;
                }
                MakingEvent::Failed { target: None, reason } => return Err(failed(reason)),
                MakingEvent::Failed { target: Some(target), reason } => (target, Err(failed(reason))),
                MakingEvent::Ready(ready) => (ready.target.clone(), Ok(ready)),
            };
            let Some(place) = plans.iter().position(|plan| plan.target == target) else { continue };
            results[place] = Some(result.map(|ready| PreparedClone {
                plan: plans[place].clone(),
                consistent_at: Some(ready.consistent_at),
                pause: pause_now,
                inherited: ready.descriptors.into_inherited(),
            }));
        }
        Ok(())
    }
}

impl LazyMaker for ServiceMaker {
    /// Nothing is reported: what takes time comes after the clones can be started, see [`Service::watch`].
    fn make<'a>(&'a self, plans: &'a [Plan], _report: Report<'a>) -> MakeFuture<'a> {
        Box::pin(async move {
            let mut results: Vec<_> = plans.iter().map(|_| None).collect();
            let reason = match self.make_all(plans, &mut results).await {
                Ok(()) => "the service said nothing of this clone".to_owned(),
                Err(error) => error.to_string(),
            };
            let unsaid = |plan: &Plan| CloneError::CannotClone { path: plan.target.clone(), reason: reason.clone() };
            results.into_iter().zip(plans).map(|(result, plan)| result.unwrap_or_else(|| Err(unsaid(plan)))).collect()
        })
    }
}
