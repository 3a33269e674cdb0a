//! A protected machine's other host: follows it, epoch by epoch, and lets it go on here when it is known that it does
//! not run where it comes from.

use std::net::Shutdown;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use onecopy_checkpoint::delta::{Decoder, NoBlocks};
use onecopy_checkpoint::link::Received;
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use tokio::process::Command;

use super::arrive::{Arriving, discard, failed, go_on, keep_there, load, note_prefix, verdict};
use super::backup::Copy;
use super::link::{Answered, DestinationLink, Said, message, understand};
use super::migrate::words;
use super::protection::{ProtectionRole, ProtectionState, ProtectionStatus};
use super::service::Kept;
use super::unresponsive::unix_ms;
use crate::migration::{Arrival, Verdict};
use crate::{MachineError, MachineHome};

/// How long a command may take that fences a host.
const FENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// What has come.
pub(super) enum Next {
    Epoch,
    Said(Said),
}

/// Why nothing more comes.
pub(super) enum Broken {
    /// The source is lost: what is held counts.
    Link(String),
    /// What is held is of no use.
    Copy(String),
}

impl Broken {
    pub(super) fn words(self) -> String {
        match self {
            Broken::Link(reason) | Broken::Copy(reason) => reason,
        }
    }
}

/// Takes what comes next; an epoch counts when this returns.
pub(super) fn next(link: &mut DestinationLink, decoder: &mut Decoder, copy: &Copy) -> Result<Next, Broken> {
    let lost = |error| Broken::Link(words(error));
    match link.receive(decoder, copy, &NoBlocks).map_err(lost)? {
        Received::Epoch(held) => {
            copy.apply().map_err(|error| Broken::Copy(words(error)))?;
            link.acknowledge(held).map_err(lost)?;
            Ok(Next::Epoch)
        }
        Received::Message(said) => understand(&said).map(Next::Said).map_err(lost),
    }
}

/// How following a machine has ended.
enum Ended {
    /// Its last epoch comes, and it goes on here.
    Last,
    /// It is protected no more, or the copy is of no use.
    Void(String),
    /// The source is lost.
    Lost(String),
}

/// Takes epoch after epoch.
fn follow(link: &mut DestinationLink, decoder: &mut Decoder, copy: &Copy, kept: &Kept) -> Ended {
    if let Err(error) = link.say(&message(&Answered::Waiting {})) {
        return Ended::Lost(words(error));
    }
    loop {
        match next(link, decoder, copy) {
            Ok(Next::Epoch) => kept.change_protection(|status| {
                status.epochs += 1;
                // Those before have no devices: nothing could go on from them.
                if !decoder.devices().is_empty() {
                    status.state = ProtectionState::Protected;
                    status.newest_unix_ms = Some(unix_ms());
                }
            }),
            Ok(Next::Said(Said::Last {})) => return Ended::Last,
            Ok(Next::Said(Said::End {})) => return Ended::Void("it is protected no more".to_owned()),
            Ok(Next::Said(other)) => return Ended::Lost(format!("{other:?} came instead of an epoch")),
            Err(Broken::Link(reason)) => return Ended::Lost(reason),
            Err(Broken::Copy(reason)) => return Ended::Void(format!("the copy of it cannot be written: {reason}")),
        }
    }
}

impl Arriving {
    /// Follows the machine until it goes on here, which is no error.
    pub(super) async fn stand_by(
        self,
        home: &MachineHome,
        user: &ServiceUser,
        machine: &Machine,
    ) -> Result<(), MachineError> {
        let Arriving { mut link, stream, mut decoder, prefix, shared, record, kept, has_snapshot, copy, restored } = self;
        let copy = copy.ok_or_else(|| failed(home, "there is no copy of it"))?;
        let status = ProtectionStatus::new(ProtectionRole::Backup, record.origin.clone());
        kept.change(|told| told.protection = Some(status));
        let told = Arc::clone(&kept);
        let mut following = tokio::task::spawn_blocking(move || {
            let ended = follow(&mut link, &mut decoder, &copy, &told);
            (link, decoder, copy, ended)
        });
        let (joined, word) = tokio::select! {
            joined = &mut following => (joined, None),
            goes = kept.decided(&record.token) => {
                let _ = stream.shutdown(Shutdown::Both);
                (following.await, Some(goes))
            }
            ending = machine.wait_ended() => {
                let _ = stream.shutdown(Shutdown::Both);
                discard(home, &record);
                return Err(failed(home, format!("the QEMU that waits for it has ended: {ending}")));
            }
        };
        let (link, decoder, copy, ended) = joined.map_err(|error| {
            discard(home, &record);
            MachineError::Task(format!("following a machine ended: {error}"))
        })?;
        let lost = match (word, ended) {
            (Some(false), _) => return Err(keep_there(home, &record)),
            (None, Ended::Last) => {
                let copy = Some(copy);
                let arriving =
                    Arriving { link, stream, decoder, prefix, shared, record, kept, has_snapshot, copy, restored };
                return arriving.arrive(home, user, machine).await;
            }
            (_, Ended::Void(reason)) => {
                discard(home, &record);
                return Err(failed(home, reason));
            }
            (Some(true), Ended::Last | Ended::Lost(_)) => None,
            (None, Ended::Lost(reason)) => Some(reason),
        };
        // The source hears that nobody is there any more.
        let _ = stream.shutdown(Shutdown::Both);
        drop(link);
        if decoder.devices().is_empty() {
            discard(home, &record);
            return Err(failed(home, "the source was lost before all of it was here"));
        }
        if let Some(reason) = lost {
            tracing::warn!(reason, "the source is lost, and whether the machine runs there is not known");
            kept.change_protection(|status| {
                (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason));
            });
            match verdict(home, machine, &kept, &record).await? {
                Verdict::Given => {}
                Verdict::Kept | Verdict::Undecided => return Err(keep_there(home, &record)),
            }
        }
        let began = async {
            let synchronized = tokio::task::spawn_blocking(move || copy.synchronize()).await;
            let synchronized = synchronized.map_err(|error| MachineError::Task(error.to_string()))?;
            synchronized.map_err(|error| failed(home, error))?;
            load(home, machine, restored, (&prefix, decoder.devices())).await
        };
        if let Err(error) = began.await {
            // It was given away, and nothing of it has run: the source's host may have it back.
            discard(home, &record);
            return Err(error);
        }
        go_on(home, user, machine, &record).await?;
        kept.change(|told| told.protection = None);
        note_prefix(home, machine, &prefix);
        Ok(())
    }
}

/// Fences the host that a protected machine comes from; it never runs there again when this returns.
///
/// # Errors
/// In words: that is not known.
pub(super) async fn fence(home: &MachineHome, record: &Arrival, command: &str) -> Result<(), String> {
    let mut fencing = Command::new("/bin/sh");
    fencing.arg("-c").arg(command).current_dir("/").stdin(Stdio::null()).kill_on_drop(true);
    fencing.env("ONECOPY_MACHINE", home.name().as_str()).env("ONECOPY_ORIGIN", &record.origin);
    let ended = tokio::time::timeout(FENCE_TIMEOUT, fencing.status()).await;
    match ended.map_err(|_| format!("it has not ended within {} s", FENCE_TIMEOUT.as_secs()))? {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("it has ended with {status}")),
        Err(error) => Err(format!("it cannot be run: {error}")),
    }
}
