//! What the program says to people, to readers that may be gone: as the reader of `onecopy up | head -1`, or a terminal
//! that was closed.
//!
//! `println!` ends the program there, and with it a cluster or a change that goes on. Nothing of that is the reader's
//! to end.

use std::fmt::Display;
use std::io::Write;

/// A line on standard output.
pub fn say(line: impl Display) {
    // Nobody reads: the work goes on.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A line on standard error, with the program's name before it.
pub fn note(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "onecopy: {line}");
}
