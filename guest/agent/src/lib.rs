//! What runs in a guest and does what its host asks, and the language in which it is asked.
//!
//! The language is in [`protocol`]; both ends are built from it. The host's end is in `onecopy-hypervisor`.

pub mod agent;
pub mod protocol;
