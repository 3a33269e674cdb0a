//! A server gives memory of its buffer pool back and takes it again, and nobody who works with it is wrong about
//! anything.

mod controls;
mod deaths;
mod host_memory;
mod levels;
mod lifecycle;
mod moves;
mod pinned;
mod pins;
mod readers;
mod refusals;
mod resizes;
mod returned;
mod roles;
mod trade;
mod warmth;
mod worker;
