//! What the router must know of a statement before it runs.
//!
//! A message goes through two steps. [`parse`] turns its text into [`ParsedStatement`]s: facts of the parse tree alone.
//! [`resolve`] judges those facts against a [`Catalog`] of one database. Reads are whitelisted: whatever is not proven
//! to be a read goes to the leader. [`ClassificationCache`] remembers the outcome under the message's [`shape`].

mod builtin;
mod cache;
mod catalog;
mod classify;
mod command;
#[cfg(test)]
mod command_tests;
mod facts;
mod parse;
mod shape;
mod statement;

pub use cache::{CACHE_BYTES_MAX, CACHE_ENTRIES_MAX, ClassificationCache};
pub use catalog::{Catalog, CatalogError, DEFINITION_BYTES_MAX, OBJECTS_MAX, Objects, Part, Scope};
pub use classify::{VIEW_DEPTH_MAX, resolve};
pub use parse::{ParseError, ParsedStatement, STATEMENTS_MAX, parse};
pub use shape::{SHAPE_BYTES_MAX, Shape, shape};
pub use statement::{Action, DiscardTarget, Isolation, PinReason, Statement, TransactionModes};
