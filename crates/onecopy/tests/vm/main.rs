//! `onecopy vm` and `onecopy up --runtime vm` by the program itself: machines on the real QEMU, with the guest image
//! that `make guest` builds.

mod arbitration;
mod at_work;
mod checkpoints;
mod cluster;
mod cluster_forks;
mod database;
#[path = "../cluster/directory.rs"]
#[allow(dead_code)]
mod directory;
mod forks;
mod machines;
mod migration;
mod migration_kills;
mod network;
mod own;
mod proof;
mod protection;
mod refusals;
