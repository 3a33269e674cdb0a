//! The router's promises, on real servers. The promises are numbered in `SPECIFICATION.md`.

mod receipt_report;
