//! The arbiter against simulated hosts: single rounds with known figures, and properties over many rounds.

mod host;
mod properties;
mod rounds;
