//! What the router must know of a statement before it runs.
//!
//! A message goes through two steps. [`parse`] turns its text into [`ParsedStatement`]s: facts of the parse tree alone.
//! [`resolve`] classifies those facts against a [`Catalog`] of one database. Reads are whitelisted: whatever is not
//! proven to be a read goes to the leader. Code that lies in the database - functions, triggers, DO - is classified by
//! its words, for what its declared volatility does not say. [`ClassificationCache`] remembers the outcome under the
//! message's [`query_fingerprint`]. A long message is taken apart and made short before it is parsed (`split`,
//! `abridge`), beside the threads that serve sessions.

mod abridge;
mod body;
mod builtin;
mod cache;
mod catalog;
mod classify;
mod closure;
mod command;
#[cfg(test)]
mod command_tests;
mod facts;
mod parse;
mod part;
mod plain_definition;
mod query_fingerprint;
mod split;
mod statement;
mod token;

pub use abridge::ABRIDGED_BYTES_MAX;
pub use body::BODY_BYTES_MAX;
pub use cache::{CACHE_BYTES_MAX, CACHE_ENTRIES_MAX, ClassificationCache, classify_without_catalog};
pub use catalog::{Catalog, CatalogError, DEFINITION_BYTES_MAX, OBJECTS_MAX, Objects};
pub use classify::{VIEW_DEPTH_MAX, resolve};
pub use parse::{PARSED_BYTES_MAX, PARSED_TOKENS_MAX, ParseError, ParsedStatement, STATEMENTS_MAX, parse, readable};
pub use part::{Part, Scope};
pub use query_fingerprint::{
    FINGERPRINT_BYTES_MAX, QueryFingerprint, contains_ignoring_case, fingerprint_hash, names_a_time, query_fingerprint,
};
pub use statement::{Action, Ddl, DiscardTarget, Isolation, PinReason, ResetForm, Statement, TransactionModes};
