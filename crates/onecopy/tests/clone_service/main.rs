//! Clones through the service, with real servers and real processes: made, filled, killed at every step.

mod account;
mod deaths;
mod making;
mod primary;
