//! The agent with servers that are made up: what it does in which order, and when it does nothing.

mod made_up;
mod manual;
mod rounds;
