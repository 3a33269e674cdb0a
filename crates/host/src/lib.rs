//! The daemon of one machine.
