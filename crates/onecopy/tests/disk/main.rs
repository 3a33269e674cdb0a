//! `onecopy disk`, as people and machines' keepers use it: disks at rest and served, servers that end and are killed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod commands;
mod copies;
mod directory;
mod servers;
