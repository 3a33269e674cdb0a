//! The router's promises, on real servers. The promises are numbered in `SPECIFICATION.md`.

mod closed_batch;
mod list_append;
mod receipt_report;
