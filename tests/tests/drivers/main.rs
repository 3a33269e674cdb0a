//! Programs and drivers that know nothing of Onecopy, through a router before real servers.

mod jdbc;
mod pgbench;
mod program;
mod psql;
mod psycopg;
