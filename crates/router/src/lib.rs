//! One-copy serializability over a PostgreSQL leader and its followers.

pub mod authentication;
pub mod config;
pub mod sql;
