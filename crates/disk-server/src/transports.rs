//! The transports of one disk's server.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use onecopy_disk::nbd::{self, Content, DiskExports, Export, ExportInformation, Exports};
use onecopy_disk::vhost_user::{CompletionHold, VhostUserBackend, VhostUserOptions};
use onecopy_disk::{At, Attachment, DiskError, Epoch};
use serde::Serialize;

use crate::protocol::Transport;
use crate::{DiskServerError, ServeOptions};

/// How long requests of NBD clients that are under way have to finish when the transport closes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Connections of NBD clients at once.
const NBD_CONNECTIONS_MAX: usize = 128;

/// The transports that are open.
pub(crate) struct Transports {
    vhost: Option<(PathBuf, VhostUserBackend)>,
    nbd: Mutex<Option<nbd::Server>>,
}

impl Transports {
    /// Opens those that are wanted.
    pub(crate) fn open(attachment: &Arc<Attachment>, options: &ServeOptions) -> Result<Transports, DiskServerError> {
        let named = |error| DiskServerError::disk(attachment.directory())(error);
        // First: where a machine could connect over vhost-user-blk, it can over NBD, too.
        let nbd = match options.nbd.is_empty() {
            true => None,
            false => Some(open_nbd(attachment, options).map_err(named)?),
        };
        let vhost = match &options.vhost {
            Some(socket) => {
                let look = VhostUserOptions {
                    queues: options.queues,
                    serial: options.serial.clone().unwrap_or_else(|| VhostUserOptions::default().serial),
                    log_dirty: options.log_dirty,
                    hold: options.hold,
                };
                let transport = VhostUserBackend::serve(Arc::clone(attachment), socket, look).map_err(named)?;
                Some((socket.clone(), transport))
            }
            None => None,
        };
        Ok(Transports { vhost, nbd: Mutex::new(nbd) })
    }

    /// What they are and did.
    pub(crate) fn list(&self) -> Vec<Transport> {
        let mut transports = Vec::new();
        if let Some((socket, transport)) = &self.vhost {
            transports.push(listed("vhost-user-blk", socket.display().to_string(), transport.statistics()));
        }
        let nbd = self.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = nbd.as_ref() {
            // One server at all addresses: its counters are told once.
            let addresses: Vec<String> = server.addresses().iter().map(ToString::to_string).collect();
            transports.push(listed("nbd", addresses.join(" "), server.statistics()));
        }
        transports
    }

    /// Keeps answers back. NBD clients have theirs at once: machines that are protected come by the other transport.
    pub(crate) fn hold(&self, policy: CompletionHold) {
        self.vhost.iter().for_each(|(_, transport)| transport.hold(policy));
    }

    /// Lets go answers up to an epoch.
    pub(crate) fn release(&self, upto: Epoch) {
        self.vhost.iter().for_each(|(_, transport)| transport.release(upto));
    }

    /// Closes them: what is under way is answered, and the disk is theirs no more.
    pub(crate) fn stop(&self) {
        self.vhost.iter().for_each(|(_, transport)| transport.stop());
        let server = self.nbd.lock().unwrap_or_else(PoisonError::into_inner).take();
        if server.is_some_and(|server| !server.stop(DRAIN_TIMEOUT)) {
            tracing::warn!("NBD clients were cut off with requests under way");
        }
    }
}

fn open_nbd(attachment: &Arc<Attachment>, options: &ServeOptions) -> Result<nbd::Server, DiskError> {
    let disk = DiskExports::new(Arc::clone(attachment));
    let exports: Arc<dyn Exports> = match options.read_only {
        true => Arc::new(ReadOnly { disk, attachment: Arc::clone(attachment) }),
        false => Arc::new(disk),
    };
    let look = nbd::ServerOptions {
        addresses: options.nbd.clone(),
        tls: options.tls.clone(),
        connections_max: NBD_CONNECTIONS_MAX,
    };
    nbd::Server::start(&look, exports)
}

/// The same exports without a way to write.
struct ReadOnly {
    disk: DiskExports,
    attachment: Arc<Attachment>,
}

impl Exports for ReadOnly {
    fn names(&self) -> Vec<String> {
        self.disk.names()
    }

    fn information(&self, name: &str) -> Option<ExportInformation> {
        Some(ExportInformation { is_read_only: true, ..self.disk.information(name)? })
    }

    fn open(&self, name: &str) -> Result<Export, DiskError> {
        let export = self.disk.open(name)?;
        match (&export.content, self.attachment.current()) {
            // The share in the attached disk stays with the export.
            (Content::Disk(_), Some(disk)) => {
                Ok(Export { content: Content::Source(Arc::new(disk.view(&At::Current)?)), ..export })
            }
            (Content::Disk(_), None) => Err(DiskError::Closed),
            (Content::Source(_), _) => Ok(export),
        }
    }
}

fn listed(kind: &str, address: String, counters: impl Serialize) -> Transport {
    let counters = serde_json::to_value(counters).expect("counters are numbers");
    Transport { kind: kind.to_owned(), address, counters }
}
