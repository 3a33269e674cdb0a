//! The promises of `onecopy up`, `status`, `psql`, `dsn` and `down`, kept by the program itself with real servers.

mod directory;
mod faults;
mod followers;
mod life;
mod refusals;
mod router_alone;
