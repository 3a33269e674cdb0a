//! Clones of a primary that is worked on, and how they are checked.
//!
//! ```text
//! Harness: a primary with data of every kind ──(a way)──> clone
//!      ▲                                                        │
//!     Load: updates, and schema changes of every kind           │
//!                                                               ▼
//! prove: same rows at the same places, indexes, checksums, restart, promotion, writes
//! ```

pub mod cloning;
pub mod contents;
pub mod damage;
pub mod harness;
pub mod load;
pub mod pages;
pub mod programs;
pub mod proof;
pub mod schema_load;
pub mod traces;
pub mod unflushed;
pub mod version;
