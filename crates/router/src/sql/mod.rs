//! What the router must know of a statement before it runs.
//!
//! A message goes through two steps. [`parse`] turns its text into [`ParsedStatement`]s: facts of the parse tree alone.
//! [`resolve`] judges those facts against a [`Catalog`] of one database. Reads are whitelisted: whatever is not proven
//! to be a read goes to the leader. [`ClassificationCache`] remembers the outcome under the message's [`shape`].

mod statement;

pub use statement::{Action, DiscardTarget, Isolation, PinReason, Statement, TransactionModes};
