//! The guest's agent.

use onecopy_guest_agent::agent;
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("serve") {
        eprintln!("usage: guest-agent serve");
        return ExitCode::from(2);
    }
    match agent::serve() {
        Ok(()) => ExitCode::from(agent::SWITCH_OFF),
        Err(error) => {
            eprintln!("onecopy-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
