//! The memory of a guest: its pages, their epochs, and what outlives the process that has them.

#![allow(dead_code, reason = "the file that shows it to a machine comes next")]

mod pages;
mod shadow;
mod state;
mod store;
#[cfg(test)]
mod tests;

pub use store::MemoryStatistics;
