//! The program's own log, on standard error.

use tracing_subscriber::EnvFilter;

/// The variable that says how much is logged, in the form of `tracing`'s filters.
const LEVEL_VARIABLE: &str = "ONECOPY_LOG";

/// Starts logging at `level` unless the variable says otherwise.
pub fn start(level: &str) {
    let filter = EnvFilter::try_from_env(LEVEL_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        // It would say so on standard error, which is what is gone, and end the program there.
        .log_internal_errors(false)
        .init();
}
