//! A protected machine's other host: follows it, epoch by epoch, and lets it go on here when it is known that it does
//! not run where it comes from.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use onecopy_checkpoint::delta::Decoder;
use onecopy_checkpoint::link::Received;
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;

use super::arriving::{Arriving, Coming, CopyLink, load, note_prefix};
use super::backup::Copy;
use super::link::{Answered, DestinationLink, Said, message, set_protected, understand};
use super::protection::{ProtectionRole, ProtectionState, ProtectionStatus};
use super::restore::Restored;
use super::state::Keeper;
use super::unresponsive::unix_ms;
use super::verdict::{discard, failed, go_on, keep_there, wait_verdict};
use super::words;
use crate::migration::{Arrival, Verdict};
use crate::{MachineError, MachineHome};

/// What has come.
enum Next {
    /// An epoch, and when it was about to be acknowledged.
    Epoch(Instant),
    Said(Said),
}

/// Why nothing more comes.
enum Broken {
    /// The source is lost: what is held counts.
    Link(String),
    /// What is held is of no use.
    Copy(String),
}

/// Takes what comes next; an epoch counts when this returns.
fn next(link: &mut DestinationLink, decoder: &mut Decoder, copy: &Copy) -> Result<Next, Broken> {
    let lost = |error| Broken::Link(words(error));
    match link.receive(decoder, copy, copy).map_err(lost)? {
        Received::Epoch(held) => {
            copy.apply().map_err(|error| Broken::Copy(words(error)))?;
            let acknowledged = Instant::now();
            link.acknowledge(held).map_err(lost)?;
            Ok(Next::Epoch(acknowledged))
        }
        Received::Message(said) => understand(&said).map(Next::Said).map_err(lost),
    }
}

fn unwritten(reason: &str) -> String {
    format!("the copy of it cannot be written: {reason}")
}

/// Closes the copy beside: what of the memory is not written back goes to its server then, and that may take long.
pub(super) fn close(copy: Option<Copy>) {
    tokio::task::spawn_blocking(move || drop(copy));
}

/// How following a machine has ended.
enum Ended {
    /// Its last epoch is here, and it stands where it comes from.
    Last,
    /// It is protected no more, or the copy is of no use.
    Void(String),
    /// The source is lost.
    Lost(String),
}

/// Takes epoch after epoch; with since when the source may have missed this side: it has sent the newest epoch once it
/// had heard of the one before, however long that has lain here.
fn follow(
    (link, stream): (&mut DestinationLink, &UnixStream),
    decoder: &mut Decoder,
    copy: &Copy,
    keeper: &Keeper,
    detection_s: Option<u64>,
) -> (Ended, Instant) {
    let mut heard = Instant::now();
    let mut acknowledged = heard;
    if let Err(error) = link.say(&message(&Answered::Waiting {})) {
        return (Ended::Lost(words(error)), heard);
    }
    let ended = loop {
        match next(link, decoder, copy) {
            Ok(Next::Epoch(at)) => {
                heard = std::mem::replace(&mut acknowledged, at);
                // Those before have no devices: nothing could go on from them.
                let is_whole = !decoder.devices().is_empty();
                if is_whole && let Err(error) = set_protected(stream, detection_s) {
                    break Ended::Lost(words(error));
                }
                keeper.change_protection(|status| {
                    status.epochs += 1;
                    if is_whole {
                        status.state = ProtectionState::Protected;
                        status.newest_unix_ms = Some(unix_ms());
                    }
                });
            }
            // Until it is here, the one before it counts.
            Ok(Next::Said(Said::Last {})) => match next(link, decoder, copy) {
                Ok(Next::Epoch(_)) => {
                    heard = acknowledged;
                    break Ended::Last;
                }
                Ok(Next::Said(other)) => break Ended::Lost(format!("{other:?} came instead of its last epoch")),
                Err(Broken::Link(reason)) => break Ended::Lost(reason),
                Err(Broken::Copy(reason)) => break Ended::Void(unwritten(&reason)),
            },
            Ok(Next::Said(Said::End {})) => break Ended::Void("it is protected no more".to_owned()),
            Ok(Next::Said(other)) => break Ended::Lost(format!("{other:?} came instead of an epoch")),
            Err(Broken::Link(reason)) => break Ended::Lost(reason),
            Err(Broken::Copy(reason)) => break Ended::Void(unwritten(&reason)),
        }
    };
    (ended, heard)
}

impl Arriving {
    /// Follows the machine until it goes on here, which is no error.
    pub(super) async fn stand_by(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
    ) -> Result<(), MachineError> {
        let Arriving { coming, stream, failures, prefix, record, keeper, has_snapshot, restored } = self;
        let Coming::Copy(coming) = coming else { return Err(failed(home, "there is no copy of it")) };
        let CopyLink { mut link, mut decoder, copy } = *coming;
        let status = ProtectionStatus::new(ProtectionRole::Backup, record.origin.clone());
        keeper.change(|told| told.protection = Some(status));
        let own = stream.try_clone().map_err(|error| failed(home, error))?;
        let told = Arc::clone(&keeper);
        let detection_s = record.detection_s;
        let mut following = tokio::task::spawn_blocking(move || {
            let ended = follow((&mut link, &own), &mut decoder, &copy, &told, detection_s);
            (link, decoder, copy, ended)
        });
        let (joined, word) = tokio::select! {
            joined = &mut following => (joined, None),
            goes = keeper.decided(&record.token) => {
                let _ = stream.shutdown(Shutdown::Both);
                (following.await, Some(goes))
            }
            ending = machine.wait_ended() => {
                let _ = stream.shutdown(Shutdown::Both);
                discard(home, &record);
                return Err(failed(home, format!("the QEMU that waits for it has ended: {ending}")));
            }
        };
        let (link, decoder, copy, (ended, heard)) = joined.map_err(|error| {
            discard(home, &record);
            MachineError::Task(format!("following a machine ended: {error}"))
        })?;
        let lost = match (word, ended) {
            (Some(false), _) => {
                close(Some(copy));
                return Err(keep_there(home, &record));
            }
            (None, Ended::Last) => {
                let told = Arc::clone(&keeper);
                // Nothing more comes: where the source is lost now, a person decides.
                told.change_protection(|status| status.state = ProtectionState::Unprotected);
                let coming = Coming::Copy(Box::new(CopyLink { link, decoder, copy }));
                let arriving = Arriving { coming, stream, failures, prefix, record, keeper, has_snapshot, restored };
                arriving.arrive(home, user, machine, heard).await?;
                told.change(|told| told.protection = None);
                return Ok(());
            }
            (_, Ended::Void(reason)) => {
                close(Some(copy));
                discard(home, &record);
                return Err(failed(home, reason));
            }
            (Some(true), Ended::Last | Ended::Lost(_)) => None,
            (None, Ended::Lost(reason)) => Some(reason),
        };
        // The source hears that nobody is there any more.
        let _ = stream.shutdown(Shutdown::Both);
        drop(link);
        let left = Left { decoder, prefix, record, keeper, copy, restored };
        left.go_on_alone(home, user, machine, lost.map(|reason| (reason, heard))).await
    }
}

/// A machine's copy whose source says nothing more.
struct Left {
    decoder: Decoder,
    prefix: Vec<u8>,
    record: Arrival,
    keeper: Arc<Keeper>,
    copy: Copy,
    restored: Restored,
}

impl Left {
    /// Lets it go on here, once it is known that it may: `lost` says why that is not known, and until when the source
    /// cannot have missed this side.
    async fn go_on_alone(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
        lost: Option<(String, Instant)>,
    ) -> Result<(), MachineError> {
        let Left { decoder, prefix, record, keeper, copy, restored } = self;
        if decoder.devices().is_empty() {
            close(Some(copy));
            discard(home, &record);
            return Err(failed(home, "the source was lost before all of it was here"));
        }
        if let Some((reason, heard)) = lost {
            tracing::warn!(reason, "the source is lost, and whether the machine runs there is not known");
            keeper.change_protection(|status| {
                (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason));
            });
            let verdict = wait_verdict(home, machine, &keeper, &record, Some(heard)).await;
            if !matches!(verdict, Ok(Verdict::Given)) {
                close(Some(copy));
                return Err(verdict.err().unwrap_or_else(|| keep_there(home, &record)));
            }
        }
        let began = async {
            let synchronized = tokio::task::spawn_blocking(move || (copy.synchronize(), copy)).await;
            let (synchronized, copy) = synchronized.map_err(|error| MachineError::Task(error.to_string()))?;
            let loaded = match synchronized {
                Ok(()) => load(home, machine, restored, (&prefix, decoder.devices())).await,
                Err(error) => Err(failed(home, error)),
            };
            close(Some(copy));
            loaded
        };
        if let Err(error) = began.await {
            // It was given away, and nothing of it has run: the source's host may have it back.
            discard(home, &record);
            return Err(error);
        }
        go_on(home, user, machine, &keeper, &record, true).await?;
        keeper.change(|told| told.protection = None);
        note_prefix(home, machine, &prefix);
        Ok(())
    }
}
