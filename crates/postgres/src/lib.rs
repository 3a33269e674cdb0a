//! A PostgreSQL server as an object.
