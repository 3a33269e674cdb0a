//! The router's promises, on real servers. The promises are numbered in `SPECIFICATION.md`.

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
