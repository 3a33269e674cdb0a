//! What is sent of a machine's memory to another host, epoch by epoch, not faster than was allowed.

use std::io::{BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::migrate::wire::{Counts, Encoder};

use super::link::Link;
use super::migrate::{Work, words};
use crate::machine::CHECKPOINT_TIMEOUT;
use crate::memory_server::{MemoryClient, PAGES_END, Request};

/// How long a round may take whose pages go on coming.
const SEND_MAX: Duration = Duration::from_secs(24 * 3600);

/// How long a wait for the pace goes on before it is looked whether the migration is wanted.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

impl Work {
    /// Sends pages of an epoch, as fast as was allowed.
    pub(super) fn send(
        &self,
        link: &mut Link,
        sender: &mut Sender,
        epoch: u64,
        since: Option<u64>,
    ) -> Result<Counts, String> {
        let (near, far) = UnixStream::pair().map_err(words)?;
        near.set_read_timeout(Some(CHECKPOINT_TIMEOUT)).map_err(words)?;
        let (home, handle) = (self.kept.home().clone(), self.handle.clone());
        let (process_id, descriptor) = (std::process::id(), far.as_raw_fd());
        let (goes_on, is_given_up) = tokio::sync::oneshot::channel::<()>();
        let asking = std::thread::spawn(move || {
            let request = Request::Send { epoch, since, process_id, descriptor };
            let asked = handle.block_on(async {
                // As long as pages come: each wait for them has a bound.
                let deadline = Instant::now() + SEND_MAX;
                let asking = async { MemoryClient::connect(&home).await?.ask_until::<u64>(request, deadline).await };
                tokio::select! {
                    asked = asking => asked,
                    _ = is_given_up => Err("its pages are not wanted any more".to_owned()),
                }
            });
            // The other end is read to its end where the server has died.
            drop(far);
            asked
        });
        let sent = self.forward(&near, link, sender);
        drop(near);
        if sent.is_err() {
            drop(goes_on);
        }
        let asked = asking.join().map_err(|_| "sending pages panicked".to_owned())?;
        // Where this side gives up, the server's complaint is that nobody takes its pages.
        let counts = sent?;
        asked.map(|_| counts)
    }

    /// Waits as the bandwidth wants, for as long as the migration is wanted.
    fn pace(&self, sender: &mut Sender, bytes: u64) -> Result<(), String> {
        let mut ahead = sender.ahead(bytes, self.order.bytes_per_second);
        while !ahead.is_zero() {
            let slice = ahead.min(LOOK_INTERVAL);
            std::thread::sleep(slice);
            ahead -= slice;
            self.check_wanted()?;
        }
        Ok(())
    }

    fn forward(&self, near: &UnixStream, link: &mut Link, sender: &mut Sender) -> Result<Counts, String> {
        let mut from = BufReader::with_capacity(256 << 10, near);
        let (mut number, mut content) = ([0; 4], [0; PAGE_BYTES]);
        loop {
            from.read_exact(&mut number).map_err(words)?;
            let page = u32::from_le_bytes(number);
            if page == PAGES_END {
                break;
            }
            from.read_exact(&mut content).map_err(words)?;
            let bytes = sender.encoder.page(link.stream(), page, &content).map_err(words)?;
            if bytes > 0 {
                self.check_wanted()?;
                self.pace(sender, bytes)?;
            }
        }
        let bytes = sender.encoder.flush(link.stream()).map_err(words)?;
        self.pace(sender, bytes)?;
        Ok(sender.encoder.take_counts())
    }
}

/// What is sent, not faster than it may be.
pub(super) struct Sender {
    pub(super) encoder: Encoder,
    pub(super) begun: Instant,
    pub(super) sent: u64,
}

impl Sender {
    /// How much sooner than it may be so many bytes more were sent.
    fn ahead(&mut self, bytes: u64, bytes_per_second: Option<u64>) -> Duration {
        self.sent += bytes;
        let Some(rate) = bytes_per_second else { return Duration::ZERO };
        let due = Duration::from_secs_f64(self.sent as f64 / rate.max(1) as f64);
        let ahead = due.saturating_sub(self.begun.elapsed());
        // What was not used up is not saved up: a pause would be followed by a burst.
        if ahead.is_zero() {
            self.begun = Instant::now();
            self.sent = 0;
        }
        ahead
    }
}
