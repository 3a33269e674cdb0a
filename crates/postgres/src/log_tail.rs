//! The end of a server log, for errors.
