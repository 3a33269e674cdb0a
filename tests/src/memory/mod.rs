//! Servers whose buffer pools give memory back, what the kernel says of it, and how what they hold is checked.
//!
//! ```text
//! Harness: a leader (and a standby) with the extension ──> Pool: its size by SQL
//!      │                                                        │
//!      ├─ pages: a table of one row a page                      ▼
//!      ├─ loads: clients, schema changes, resizes,       Segment: what the kernel holds for it
//!      │  kills                                          ControlGroup, SwapFile, HugePages
//!      ▼
//! check: same rows on leader, standby and disk; indexes; checksums; sums
//! ```

pub mod agent;
pub mod deaths;
pub mod harness;
pub mod huge_pages;
pub mod integrity;
pub mod levels;
pub mod pages;
pub mod pgbench;
pub mod pool;
pub mod resizes;
pub mod schema_changes;
pub mod segment;
pub mod squeeze;
pub mod swap_file;
pub mod transfers;

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;
