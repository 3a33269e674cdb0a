//! The control socket of a disk's server.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use onecopy_disk::{Attachment, Disk, DiskError, Epoch};
use serde::Serialize;

use crate::protocol::{Answer, LINE_BYTES_MAX, Request};
use crate::server::Served;
use crate::{DiskServerError, socket};

/// Connections at once; one more is closed at once.
const CONNECTIONS_MAX: usize = 16;

/// A client that neither asks nor takes its answer for so long is let go: its place is for others.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// After a failed accept (no descriptors left) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The socket, listened to until it is stopped.
pub(crate) struct Control {
    path: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Listens and answers.
    pub(crate) fn listen(path: &Path, served: Arc<Served>) -> Result<Control, DiskServerError> {
        let listener = socket::listen(path).map_err(DiskServerError::io("listen on", path))?;
        let ended = Arc::new(AtomicBool::new(false));
        let (seen, name) = (Arc::clone(&ended), std::thread::Builder::new().name("disk-control".to_owned()));
        let thread = name
            .spawn(move || accept(&listener, &served, &seen))
            .map_err(DiskServerError::io("start a thread for", path))?;
        Ok(Control { path: path.to_owned(), ended, thread: Some(thread) })
    }

    /// Listens no more. Connections that are there end with the process.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.ended.store(true, Ordering::Release);
        // The listener wakes by one more connection. Where that fails there is no listener.
        let _ = socket::connect(&self.path);
        if thread.join().is_err() {
            tracing::error!("the thread of the control socket panicked");
        }
        // A next server would remove it as well.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, served: &Arc<Served>, ended: &AtomicBool) {
    let connections = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if ended.load(Ordering::Acquire) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "the control socket");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            tracing::warn!("too many connections on the control socket");
            connections.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (served, place) = (Arc::clone(served), Place(Arc::clone(&connections)));
        let spawned = std::thread::Builder::new().name("disk-client".to_owned()).spawn(move || {
            let _place = place;
            // A client that is gone does not want an answer.
            let _ = converse(&stream, &served, IDLE_TIMEOUT);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a client of the control socket");
        }
    }
}

/// A client's place among those that are allowed; given back also where its thread panics.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Answers one client until it goes, or does nothing for as long as `idle_timeout`.
fn converse(stream: &UnixStream, served: &Served, idle_timeout: Duration) -> std::io::Result<()> {
    stream.set_read_timeout(Some(idle_timeout))?;
    stream.set_write_timeout(Some(idle_timeout))?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Ok(());
        }
        let request = serde_json::from_slice(&line);
        let answer = match &request {
            Ok(request) => respond(served, request),
            Err(error) => Answer::Error(format!("this is no request: {error}")),
        };
        let mut line = serde_json::to_vec(&answer).expect("answers are strings and numbers");
        line.push(b'\n');
        (&*stream).write_all(&line)?;
        if matches!(request, Ok(Request::Stop)) {
            served.ask_for_end();
            return Ok(());
        }
    }
}

fn respond(served: &Served, request: &Request) -> Answer {
    let outcome = match request {
        Request::Info => Ok(value(served.info())),
        Request::Metrics => Ok(value(served.metrics())),
        Request::Snapshot { name } => with_disk(&served.attachment, |disk| disk.snapshot(name).map(value)),
        Request::DeleteSnapshot { name } => with_disk(&served.attachment, |disk| disk.delete_snapshot(name).map(value)),
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
        Request::Stop => served.stop().map(value),
    };
    outcome.map_or_else(|error| Answer::Error(error.to_string()), Answer::Ok)
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
    use crate::{DiskServer, ServeOptions};

    fn create(directory: &Path) -> PathBuf {
        let disk = directory.join("disk");
        Disk::create(&disk, &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        disk
    }

    #[test]
    fn a_panic_gives_the_disk_back() {
        let directory = tempfile::tempdir().unwrap();
        let attachment = Attachment::new(create(directory.path()), OpenOptions::default);
        let panicked = catch_unwind(AssertUnwindSafe(|| with_disk::<()>(&attachment, |_| panic!("as it happens"))));
        assert!(panicked.is_err());
        assert!(attachment.current().is_none());
    }

    #[test]
    fn clients_that_do_nothing_are_let_go() {
        let directory = tempfile::tempdir().unwrap();
        let disk = create(directory.path());
        let options = ServeOptions {
            nbd: vec![format!("unix:{}", directory.path().join("nbd.sock").display()).parse().unwrap()],
            scan_bytes_per_second: 0,
            ..ServeOptions::default()
        };
        let server = DiskServer::start(&disk, &options).unwrap();
        let (ours, idle) = UnixStream::pair().unwrap();
        let error = converse(&ours, &server.served(), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        drop(idle);
        server.stop().unwrap();
    }
}
