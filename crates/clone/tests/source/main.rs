//! A real server that is listed, adopted, and frozen while it goes on writing.

mod deaths;
mod followers;
mod frozen;
#[path = "../harness/mod.rs"]
mod harness;
mod serverless;
mod servers;
