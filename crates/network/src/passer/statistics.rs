//! What a passer tells of itself.

use serde::{Deserialize, Serialize};

use super::{Passer, now_ns};
use crate::state::Counter;

/// Counters and gauges of a machine's network. Counters go on over the deaths of its holder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// The interface on the host.
    pub interface: String,
    /// QEMU is connected.
    pub connected: bool,
    /// Frames of the machine that the network has.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that the machine was given.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames of the machine that were too short or too long for an Ethernet.
    pub malformed_frames: u64,
    /// Frames that it sent from another card's address.
    pub foreign_source_frames: u64,
    /// Frames that it sent to the bridge itself.
    pub for_bridge_frames: u64,
    /// Frames of the machine that the interface did not take, as when it is switched off.
    pub not_taken_frames: u64,
    /// Frames for the machine that were under way when QEMU's connection ended.
    pub lost_frames: u64,
    /// Streams that were ended because no frame has such a length.
    pub broken_streams: u64,
    /// Connections of QEMU.
    pub connections: u64,
    /// Holders that have taken over from one that died.
    pub holder_restarts: u64,
    /// What the machine sends waits until its epoch is released.
    pub holding: bool,
    /// The open epoch.
    pub epoch: u64,
    /// The last one released.
    pub released: u64,
    /// Frames that wait.
    pub held_frames: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// How long the first of them has waited, microseconds.
    pub oldest_held_us: u64,
    /// Frames that have waited and are gone.
    pub freed_frames: u64,
    /// How long they have waited, all together, microseconds.
    pub freed_wait_us: u64,
    /// And the one that has waited longest.
    pub freed_wait_us_max: u64,
    /// So much waits that the machine is made to wait, too.
    pub blocked: bool,
    /// How often it was.
    pub blocks: u64,
}

impl Passer {
    pub(super) fn statistics(&self) -> Statistics {
        let counter = |counter| self.state.counter(counter);
        let first = self.state.first();
        Statistics {
            interface: self.tap.name().to_owned(),
            connected: self.qemu.is_some(),
            sent_frames: counter(Counter::SentFrames),
            sent_bytes: counter(Counter::SentBytes),
            received_frames: counter(Counter::ReceivedFrames),
            received_bytes: counter(Counter::ReceivedBytes),
            malformed_frames: counter(Counter::Short) + counter(Counter::Long),
            foreign_source_frames: counter(Counter::ForeignSource),
            for_bridge_frames: counter(Counter::ForBridge),
            not_taken_frames: counter(Counter::NotTaken),
            lost_frames: counter(Counter::Lost),
            broken_streams: counter(Counter::Broken),
            connections: counter(Counter::Connections),
            // The first one has taken over from nobody.
            holder_restarts: counter(Counter::HolderRestarts).saturating_sub(1),
            holding: self.state.is_holding(),
            epoch: self.state.epoch(),
            released: self.state.released(),
            held_frames: self.state.held_frames(),
            held_bytes: self.state.held_bytes(),
            oldest_held_us: first.map_or(0, |first| now_ns().saturating_sub(first.arrived_ns) / 1000),
            freed_frames: counter(Counter::Held),
            freed_wait_us: counter(Counter::HeldNs) / 1000,
            freed_wait_us_max: counter(Counter::HeldNsMax) / 1000,
            blocked: self.is_blocked,
            blocks: counter(Counter::Waits),
        }
    }
}
