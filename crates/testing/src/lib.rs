//! What tests of all crates start and wait for: servers from templates, processes, ports, file systems, control groups.
//! Two more are for disks, and for experiments too: a driver without a guest, and a program that tries a guest's disk.
//!
//! Each test is a process of its own (cargo-nextest runs them so), and leaves nothing behind, also when it fails:
//! values end what they stand for when they are dropped.

pub mod control_group;
pub mod directory;
pub mod etcd;
pub mod guest_exercise;
pub mod mount;
pub mod port;
pub mod process;
pub mod replay;
pub mod seed;
pub mod server;
pub mod skip;
mod template;
pub mod vhost_driver;
pub mod wait;

pub use control_group::ControlGroup;
pub use directory::TestDirectory;
pub use etcd::EtcdServer;
pub use mount::{FileSystem, MountedDisk};
pub use port::free_port;
pub use process::Frozen;
pub use replay::wait_replayed;
pub use seed::seed;
pub use server::{PASSWORD, USER, create, server_options};
pub use skip::skip;
pub use template::{Content, create_with};
pub use wait::{WAIT_MAX, look_until, try_until_async, until, until_async, until_seen};
