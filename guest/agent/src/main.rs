//! The guest's agent, and what tests run in a guest.

use onecopy_guest_agent::{agent, exercise};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("serve") => match agent::serve() {
            Ok(()) => ExitCode::from(agent::SWITCH_OFF),
            Err(error) => {
                eprintln!("onecopy-guest: {error}");
                ExitCode::FAILURE
            }
        },
        Some("exercise") => match exercise::exercise(&arguments[1..]) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("guest-agent: {error}");
                ExitCode::from(2)
            }
        },
        _ => {
            eprintln!("usage: guest-agent serve\n       {}", exercise::USAGE);
            ExitCode::from(2)
        }
    }
}
