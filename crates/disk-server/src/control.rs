//! The control socket of a disk's server.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use onecopy_control::{Answer, server, socket};
use onecopy_disk::{At, Attachment, Disk, DiskError, Epoch};
use serde::Serialize;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::DiskServerError;
use crate::protocol::{ChangedBlocks, RANGES_MAX, Request};
use crate::served::Served;

/// The socket, listened to until it is stopped.
pub(crate) struct Control {
    path: PathBuf,
    serving: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Control {
    /// Listens and answers.
    pub(crate) fn listen(path: &Path, served: Arc<Served>) -> Result<Control, DiskServerError> {
        let (end, ended) = oneshot::channel();
        let (listens, listening) = mpsc::channel();
        let to_listen_on = path.to_owned();
        let serve = move || match prepare(&to_listen_on) {
            Ok((runtime, listener)) => {
                // Whoever has started this waits for it.
                let _ = listens.send(Ok(()));
                let respond = move |request| respond(&served, &request);
                runtime.block_on(server::serve(listener, respond, async { drop(ended.await) }));
                // Whoever still waits for the disk ends with the process.
                runtime.shutdown_background();
            }
            Err(error) => {
                let _ = listens.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new().name("disk-control".to_owned());
        let thread = thread.spawn(serve).map_err(DiskServerError::io("start a thread for", path))?;
        let prepared = listening.recv().unwrap_or_else(|_| Err(io::Error::other("its thread has ended")));
        prepared.map_err(DiskServerError::io("listen on", path))?;
        Ok(Control { path: path.to_owned(), serving: Some((end, thread)) })
    }

    /// Listens no more; returns when those who were being answered have their answers.
    pub(crate) fn stop(&mut self) {
        let Some((end, thread)) = self.serving.take() else { return };
        drop(end);
        if thread.join().is_err() {
            tracing::error!("the thread of the control socket panicked");
        }
        // A next server would remove it as well.
        let _ = socket::remove(&self.path);
    }
}

/// What the thread of the socket needs: the caller may be no place for a runtime.
fn prepare(path: &Path) -> io::Result<(Runtime, UnixListener)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = {
        let _runtime = runtime.enter();
        socket::listen(path)?
    };
    Ok((runtime, listener))
}

fn respond(served: &Served, request: &Request) -> Answer {
    let outcome = match request {
        Request::Info => Ok(value(served.info())),
        Request::Metrics => Ok(value(served.metrics())),
        Request::Snapshot { name } => with_disk(&served.attachment, |disk| disk.snapshot(name).map(value)),
        Request::DeleteSnapshot { name } => with_disk(&served.attachment, |disk| disk.delete_snapshot(name).map(value)),
        Request::Find { snapshot, wanted } => {
            let at = At::Snapshot(snapshot.clone());
            with_disk(&served.attachment, |disk| served.find(disk, &at, wanted).map(value))
        }
        Request::FindSinceEpoch { epoch, wanted } => {
            let at = At::Epoch(Epoch(*epoch));
            with_disk(&served.attachment, |disk| served.find(disk, &at, wanted).map(value))
        }
        Request::Cut => with_disk(&served.attachment, |disk| disk.cut().map(value)),
        Request::Changed { from, to, first } => with_disk(&served.attachment, |disk| {
            disk.changed(Epoch(*from), Epoch(*to)).map(|ranges| value(changed(ranges, *first)))
        }),
        Request::ReleaseEpochs { through } => {
            with_disk(&served.attachment, |disk| disk.release_through(Epoch(*through)).map(value))
        }
        Request::Flush => with_disk(&served.attachment, |disk| disk.flush().map(value)),
        Request::SetLimit { bytes_per_second } => {
            served.set_limit(*bytes_per_second);
            Ok(value(()))
        }
        Request::Hold { what } => {
            served.transports.hold((*what).into());
            Ok(value(()))
        }
        Request::Release { epoch } => {
            served.transports.release(Epoch(*epoch));
            Ok(value(()))
        }
        Request::Stop => {
            let stopped = served.stop().map(value);
            served.ask_for_end();
            stopped
        }
    };
    Answer::from(outcome)
}

/// As much of it as one answer tells, from this block on.
fn changed(ranges: Vec<Range<u64>>, first: u64) -> ChangedBlocks {
    let mut rest =
        ranges.into_iter().filter(|range| range.end > first).map(|range| (range.start.max(first), range.end));
    let ranges: Vec<_> = rest.by_ref().take(RANGES_MAX).collect();
    ChangedBlocks { ranges, next: rest.next().map(|(start, _)| start) }
}

/// Does something with the disk; takes it for that time where no transport has it.
fn with_disk<T>(
    attachment: &Attachment,
    work: impl FnOnce(&Disk) -> Result<T, DiskError>,
) -> Result<T, DiskServerError> {
    let named = |error| DiskServerError::disk(attachment.directory())(error);
    let disk = attachment.attach().map_err(named)?;
    let attached = Attached(Some(attachment));
    let outcome = work(&disk);
    drop(disk);
    attached.give_back().map_err(named)?;
    outcome.map_err(named)
}

/// A share in the attached disk. A panic gives it back as well: otherwise nobody else could ever have the disk.
struct Attached<'a>(Option<&'a Attachment>);

impl Attached<'_> {
    fn give_back(mut self) -> Result<(), DiskError> {
        self.0.take().map_or(Ok(()), Attachment::detach)
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(Attachment::detach) {
            tracing::error!(%error, "the disk is not closed in order");
        }
    }
}

fn value(of: impl Serialize) -> serde_json::Value {
    serde_json::to_value(of).expect("answers are strings and numbers")
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use onecopy_disk::{CreateOptions, OpenOptions};

    use super::*;

    fn create(directory: &Path) -> PathBuf {
        let disk = directory.join("disk");
        Disk::create(&disk, &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        disk
    }

    #[test]
    fn what_has_changed_is_told_in_as_many_answers_as_it_needs() {
        let count = 2 * RANGES_MAX as u64 + 1;
        let all: Vec<Range<u64>> = (0..count).map(|at| at * 3..at * 3 + 2).collect();
        let (mut told, mut first) = (Vec::new(), 1);
        loop {
            let ChangedBlocks { ranges, next } = changed(all.clone(), first);
            assert!(!ranges.is_empty() && ranges.len() <= RANGES_MAX);
            told.extend(ranges);
            match next {
                Some(next) => first = next,
                None => break,
            }
        }
        assert_eq!(told[..2], [(1, 2), (3, 5)]);
        assert_eq!((told.len() as u64, told.last()), (count, Some(&(count * 3 - 3, count * 3 - 1))));
        let none = ChangedBlocks { ranges: Vec::new(), next: None };
        assert_eq!([changed(all, count * 3), changed(Vec::new(), 0)], [none.clone(), none]);
    }

    #[test]
    fn a_panic_gives_the_disk_back() {
        let directory = tempfile::tempdir().unwrap();
        let attachment = Attachment::new(create(directory.path()), OpenOptions::default);
        let panicked = catch_unwind(AssertUnwindSafe(|| with_disk::<()>(&attachment, |_| panic!("as it happens"))));
        assert!(panicked.is_err());
        assert!(attachment.current().is_none());
    }
}
