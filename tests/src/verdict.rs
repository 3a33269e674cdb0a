//! Two independent checkers on one history.

use adya::{History as AdyaHistory, Opts, Report, Valid, Workload};
use anyhow::{Context, ensure};

use crate::checker::{self, Level, Violation};
use crate::history::History;

/// What both checkers say.
#[derive(Debug)]
pub struct Verdict {
    /// Ours.
    pub ours: Result<(), Violation>,
    /// `adya`'s.
    pub adya: Report,
}

impl Verdict {
    /// Whether the history satisfies the level.
    pub fn is_valid(&self) -> bool {
        self.ours.is_ok()
    }
}

/// Checks `history` by both checkers.
///
/// # Errors
///
/// When they disagree, or `adya` does not know: then one of them is wrong.
pub fn judge(history: &History, level: Level) -> anyhow::Result<Verdict> {
    let parsed = AdyaHistory::from_json(&history.to_elle_json_lines()).context("our own form parses")?;
    let options = Opts { models: vec![level.adya_name().to_owned()], ..Opts::default() };
    let adya = adya::check(&parsed, Workload::ListAppend, &options);
    let ours = checker::check(history, level);
    let agreed = match adya.valid {
        Valid::True => ours.is_ok(),
        Valid::False => ours.is_err(),
        Valid::Unknown => false,
    };
    ensure!(
        agreed,
        "the checkers disagree on {level:?}: ours {ours:?}, adya {:?} {:?}",
        adya.valid,
        adya.anomaly_types
    );
    Ok(Verdict { ours, adya })
}
