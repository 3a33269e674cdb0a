//! What sessions may do to each other and to the router's promises, held case by case: each test stands for a way in
//! which a client, a function, a driver or a lost server once could have made an answer wrong, late or somebody else's.

// The other binary of fault tests uses all of both.
#[allow(dead_code)]
#[path = "../faults/harness.rs"]
mod harness;
#[allow(dead_code)]
#[path = "../faults/wire.rs"]
mod wire;

mod as_on_one_server;
mod atomic_batches;
mod changed_tables;
mod commits_under_way;
mod drivers_habits;
mod forgotten_reads;
mod functions;
mod isolation_level;
mod log_in;
mod parsed_behind_ddl;
mod pools;
mod read_only_default;
mod shared_statements;
mod show_clients;
mod shutdown;
mod statements;
mod transaction_modes;
mod waiting;
