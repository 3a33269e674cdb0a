//! The engines of PostgreSQL and the agent with real servers.

mod budget;
mod extension;
mod plain;
mod servers;
