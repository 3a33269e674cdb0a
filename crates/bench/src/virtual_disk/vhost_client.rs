//! A client of a vhost-user-blk back end: a virtio driver without a guest.

use std::path::Path;
use std::time::Duration;

use onecopy_testing::vhost_driver::{self, Driver, DriverOptions};

use super::load::{Ask, Client};

/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Room for the largest request.
const SLOT_BYTES: u64 = 128 << 10;

/// The client.
pub struct VhostClient {
    driver: Driver,
    data: Vec<u8>,
    written: u64,
}

impl VhostClient {
    /// Connects to a back end and starts its first ring. QEMU's back end does not track what is in flight, ours does: a
    /// machine uses what there is.
    pub fn connect(socket: &Path, track_in_flight: bool) -> anyhow::Result<VhostClient> {
        let options = DriverOptions { slot_bytes: SLOT_BYTES, track_in_flight, ..DriverOptions::default() };
        let mut driver = Driver::connect(socket, options)?;
        driver.start(0)?;
        Ok(VhostClient { driver, data: vec![0; SLOT_BYTES as usize], written: 0 })
    }

    fn ended(&mut self, finished: vhost_driver::Finished) -> anyhow::Result<()> {
        anyhow::ensure!(Driver::succeeded(&finished), "a request failed: {finished:?}");
        Ok(())
    }
}

impl Client for VhostClient {
    fn begin(&mut self, ask: Ask) -> anyhow::Result<bool> {
        let sector = ask.offset / 512;
        let begun = if ask.is_write {
            self.written += 1;
            stamp(&mut self.data[..ask.length as usize], self.written);
            self.driver.submit(0, vhost_driver::Ask::Write { sector, data: &self.data[..ask.length as usize] })?
        } else {
            self.driver.submit(0, vhost_driver::Ask::Read { sector, length: ask.length })?
        };
        Ok(begun.is_some())
    }

    fn wait(&mut self) -> anyhow::Result<u32> {
        self.driver.kick(0)?;
        let first = self.driver.wait(0, TIMEOUT)?;
        self.ended(first)?;
        let mut ended = 1;
        while let Some(more) = self.driver.finished(0)? {
            self.ended(more)?;
            ended += 1;
        }
        Ok(ended)
    }
}

/// Makes each block of a request's data another content: equal blocks would be cheaper to index than a guest's are.
pub fn stamp(data: &mut [u8], number: u64) {
    for (block, bytes) in data.chunks_mut(4096).enumerate() {
        bytes[..8].copy_from_slice(&number.wrapping_mul(32).wrapping_add(block as u64).to_le_bytes());
    }
}
