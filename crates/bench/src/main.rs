//! The papers' experiments, each one command.

fn main() {}
