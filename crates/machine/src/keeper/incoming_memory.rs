//! The memory of a machine that comes from another host. The first round is written into its shadow, while the servers
//! and the QEMU start that are to have it; then its server is told so, and the others are written through the memory,
//! into the page cache that QEMU maps.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use onecopy_checkpoint::delta::{Blocks, Decoder, Destination, NoBlocks};
use onecopy_checkpoint::link::Received;
use onecopy_hypervisor::Machine;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::task::JoinHandle;

use super::link::{self, Answered, DestinationLink, Said, message, understand};
use super::memory_file::MemoryFile;
use super::shared_disk::SharedSnapshot;
use super::words;
use crate::MachineHome;
use crate::memory_server::{MemoryClient, Request};

/// A thread that takes what comes. Where it fails it says why; where it is dropped the connection ends, and with that
/// the thread.
pub(super) struct IncomingMemory {
    /// None: it has ended.
    thread: Option<JoinHandle<Result<Taker, String>>>,
    stream: Arc<UnixStream>,
    ender: Ender,
}

/// What takes an epoch.
struct Taker {
    link: DestinationLink,
    decoder: Decoder,
    /// What references to the disk are read from.
    shared: Option<SharedSnapshot>,
}

/// Ends the connection when it is dropped.
struct Ender(Option<Arc<UnixStream>>);

impl Drop for Ender {
    fn drop(&mut self) {
        if let Some(stream) = &self.0 {
            // It may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl IncomingMemory {
    /// Begins with a shadow in which there is nothing.
    pub(super) fn begin(
        (link, stream): (DestinationLink, Arc<UnixStream>),
        shadow: File,
        shared: Option<SharedSnapshot>,
    ) -> IncomingMemory {
        let ender = Ender(Some(Arc::clone(&stream)));
        let mut memory = IncomingMemory { thread: None, stream, ender };
        let decoder = Decoder::new(link.sizes());
        memory.take(Taker { link, decoder, shared }, move |taker| {
            taker.epoch(&MemoryFile { file: shadow, is_new: true })?;
            wish_to_wait(&mut taker.link)
        });
        memory
    }

    /// Goes on in a thread, until this is done.
    fn take(&mut self, mut taker: Taker, work: impl FnOnce(&mut Taker) -> Result<(), String> + Send + 'static) {
        let stream = Arc::clone(&self.stream);
        self.thread = Some(tokio::task::spawn_blocking(move || {
            let failures = taker.link.failure_sender();
            // At once: whoever waits for this may be busy with a QEMU that starts, and nobody reads what comes.
            let failed = |reason: &String| {
                link::refuse(&failures, &stream, reason);
                let _ = stream.shutdown(Shutdown::Both);
            };
            work(&mut taker).inspect_err(failed).map(|()| taker)
        }));
    }

    async fn taken(&mut self, machine: &Machine) -> Result<Taker, String> {
        let Some(thread) = &mut self.thread else { return Err("nobody takes what comes".to_owned()) };
        let taken = tokio::select! {
            taken = thread => taken,
            ending = machine.wait_ended() => return Err(format!("the QEMU that waits for it has ended: {ending}")),
        };
        self.thread = None;
        taken.unwrap_or_else(|error| Err(format!("receiving ended: {error}")))
    }

    /// Takes what is left, into the memory that this QEMU has and waits with, up to the last epoch, which has the
    /// devices' state. `open` is held as long as the memory is open.
    pub(super) async fn rest(
        &mut self,
        home: &MachineHome,
        machine: &Machine,
        open: OwnedRwLockReadGuard<()>,
    ) -> Result<(DestinationLink, Decoder), String> {
        let taker = self.taken(machine).await?;
        MemoryClient::connect(home).await?.ask::<()>(Request::RereadShadow).await?;
        let home = home.clone();
        self.take(taker, move |taker| {
            // Dropped after the memory is closed.
            let _open = open;
            let memory = MemoryFile { file: memory_of(&home).map_err(words)?, is_new: false };
            taker.link.say(&message(&Answered::Waiting {})).map_err(words)?;
            while taker.decoder.devices().is_empty() {
                taker.epoch(&memory)?;
            }
            Ok(())
        });
        let Taker { link, decoder, .. } = self.taken(machine).await?;
        self.ender.0 = None;
        Ok((link, decoder))
    }

    /// Ends it, and the connection: nothing is open any more when this returns.
    pub(super) async fn end(self) {
        let IncomingMemory { thread, ender, .. } = self;
        drop(ender);
        if let Some(thread) = thread {
            // What it has come to is of no use.
            let _ = thread.await;
        }
    }
}

impl Taker {
    fn epoch(&mut self, to: &MemoryFile) -> Result<(), String> {
        let blocks: &dyn Blocks = self.shared.as_ref().map_or(&NoBlocks, |snapshot| &snapshot.blocks);
        epoch(&mut self.link, &mut self.decoder, to, blocks)
    }
}

/// The memory that a QEMU which waits has.
pub(super) fn memory_of(home: &MachineHome) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(home.memory())
}

pub(super) fn said(link: &mut DestinationLink) -> Result<Said, String> {
    link.hear().and_then(|said| understand(&said)).map_err(words)
}

/// All of the memory was sent once.
pub(super) fn wish_to_wait(link: &mut DestinationLink) -> Result<(), String> {
    match said(link)? {
        Said::Wait {} => Ok(()),
        other => Err(format!("{other:?} came instead of the wish to wait")),
    }
}

/// Writes an epoch as it comes.
pub(super) fn epoch(
    link: &mut DestinationLink,
    decoder: &mut Decoder,
    to: &dyn Destination,
    blocks: &dyn Blocks,
) -> Result<(), String> {
    match link.receive(decoder, to, blocks).map_err(words)? {
        Received::Epoch(held) => link.acknowledge(held).map_err(words),
        Received::Message(_) => {
            Err("a message came where an epoch was due; run the same version of onecopy on both hosts".to_owned())
        }
    }
}
