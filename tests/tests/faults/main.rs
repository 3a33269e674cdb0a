//! Bad input, lost clients and lost servers, through a router before real servers: every client gets an answer, the
//! right one or the right SQLSTATE, and nothing is left behind.

mod harness;
mod wire;

mod admission;
mod cancels;
mod copy;
mod ddl;
mod ended_sessions;
mod frozen_followers;
mod gone_clients;
mod idle_clients;
mod limits;
mod log_in;
mod long_messages;
mod lost_back_ends;
mod lost_leader;
mod malformed;
mod new_relations;
mod older_snapshots;
mod own_statements;
mod pipelines;
mod refused_settings;
mod results;
mod session_state;
mod vanished_clients;
