//! Whether the time to a clone's first answer depends on how much its source holds.
//!
//! The large source has a table of empty pages that take no room on the disk: to a clone they are bytes like all
//! others.

use super::method::{BenchMethod, Clone, UNBOUNDED};
use super::site::Site;
use super::{Answer, say};

/// Clones both, in turn.
pub async fn measure(sites: &[&Site], round: u32) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    for site in sites {
        let clone = Clone::make(site, BenchMethod::Lazy, UNBOUNDED).await?;
        let answer = Answer {
            data_bytes: site.data_bytes()?,
            round,
            first_answer_seconds: clone.first_answer.as_secs_f64(),
            pause_ms: clone.pause.unwrap_or_default().as_secs_f64() * 1000.0,
        };
        say(format_args!(
            "round {round} {} GB: answers after {:.2} s",
            answer.gigabytes(),
            answer.first_answer_seconds
        ));
        answers.push(answer);
        clone.remove(site).await?;
    }
    Ok(answers)
}
