//! The router's guarantees, on real servers. They are those of `SPECIFICATION.md`.

// The binary of fault tests uses all of it.
#[allow(dead_code)]
#[path = "../faults/harness.rs"]
mod harness;

mod anomalies;
mod certifier;
mod closed_batch;
mod freshness;
mod hermitage;
mod list_append;
mod membership;
mod receipt_report;
mod successor;
mod under_faults;
