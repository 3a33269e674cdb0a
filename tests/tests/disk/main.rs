//! Disks as guests see them: real machines on disks that are served by processes of their own.

mod killed;
mod kills;
mod lazy;
mod migration;
mod nbd_guest;
mod nbd_server;
#[allow(dead_code, reason = "what counts bytes is for the clones' tests")]
#[path = "../../../crates/onecopy/tests/clone_network/network.rs"]
mod network;
mod page_map;
mod peers;
mod power_cut;
mod served;
mod servers_agree;
