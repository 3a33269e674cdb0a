//! A status on the standard output, once or again every second.

use std::io::{IsTerminal, Write as _};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

/// How often `--watch` looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// How a status is shown.
#[derive(Debug, Args)]
pub struct Watch {
    /// Everything, as one JSON document
    #[arg(long)]
    json: bool,
    /// Again every second, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

impl Watch {
    /// Asks, and shows the answer as JSON or as `table` has it.
    pub async fn show<S: Serialize, E: Into<anyhow::Error>>(
        &self,
        ask: impl AsyncFn() -> Result<S, E>,
        table: impl Fn(&S) -> String,
    ) -> anyhow::Result<()> {
        loop {
            let status = ask().await.map_err(Into::into)?;
            let mut output = std::io::stdout().lock();
            if self.watch && !self.json && output.is_terminal() {
                // Source: ECMA-48, cursor to the first place and erase the display.
                output.write_all(b"\x1b[H\x1b[2J")?;
            }
            match self.json {
                true => writeln!(output, "{}", serde_json::to_string(&status)?)?,
                false => output.write_all(table(&status).as_bytes())?,
            }
            output.flush()?;
            drop(output);
            if !self.watch {
                return Ok(());
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }
}
