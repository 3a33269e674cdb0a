//! What the end-to-end tests share: clusters of real servers, sessions driven by hand, workloads and their checkers.

pub mod checker;
pub mod client;
pub mod clones;
pub mod closed_batch;
pub mod cluster;
pub mod fingerprint;
pub mod graph;
pub mod guest;
pub mod history;
pub mod list_append;
pub mod memory;
pub mod schedule;
pub mod servers;
pub mod verdict;
