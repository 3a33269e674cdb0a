//! How far bytes have come: a bar on a terminal, JSON for programs, nothing elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

/// Shows how many bytes of a whole are done.
pub enum Copying {
    Terminal(ProgressBar),
    /// A line for each hundredth.
    Json {
        total_bytes: u64,
        told_hundredths: Option<u64>,
    },
    Silent,
}

impl Copying {
    /// The way that fits standard error, or JSON on standard output.
    pub fn begin(total_bytes: u64, json: bool) -> Copying {
        if json {
            return Copying::Json { total_bytes, told_hundredths: None };
        }
        if !std::io::stderr().is_terminal() {
            return Copying::Silent;
        }
        let bar = ProgressBar::new(total_bytes);
        let style = ProgressStyle::with_template("[{bar:24}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
        bar.set_style(style.expect("the template is constant and well formed"));
        Copying::Terminal(bar)
    }

    /// So many bytes are done.
    pub fn show(&mut self, done_bytes: u64) {
        match self {
            Copying::Terminal(bar) => bar.set_position(done_bytes),
            Copying::Json { total_bytes, told_hundredths } => {
                let hundredths = done_bytes.saturating_mul(100) / (*total_bytes).max(1);
                if told_hundredths.replace(hundredths) != Some(hundredths) {
                    let event = serde_json::json!({
                        "event": "copying", "done_bytes": done_bytes, "total_bytes": total_bytes
                    });
                    output::say(event);
                }
            }
            Copying::Silent => {}
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        if let Copying::Terminal(bar) = self {
            bar.finish_and_clear();
        }
    }
}
