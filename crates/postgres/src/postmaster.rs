//! The postmaster as a process.
