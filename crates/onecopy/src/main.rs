//! The onecopy command line.

fn main() {}
