//! What the end-to-end tests share: clusters of real servers, sessions driven by hand, workloads and their judges.

pub mod checker;
pub mod client;
pub mod cluster;
pub mod graph;
pub mod history;
pub mod schedule;
pub mod servers;
