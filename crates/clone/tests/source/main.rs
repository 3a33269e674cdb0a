//! A real server that is listed, adopted, and frozen while it goes on writing.

mod deaths;
mod followers;
mod frozen;
#[path = "../laboratory/mod.rs"]
mod laboratory;
mod serverless;
mod servers;
