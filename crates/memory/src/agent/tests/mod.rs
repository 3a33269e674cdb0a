//! The agent with servers that are made up: what it does in which order, and when it does nothing.

mod fake;
mod manual;
mod rounds;
