//! What each report begins with, and how it is written: on what it was measured, by which command, and what failed.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use crate::machine::{self, Machine};
use crate::statistics::Spread;

/// The head of a report.
#[derive(Debug, Clone, Serialize)]
pub struct Head {
    /// The experiment's name, and that of its files.
    pub experiment: &'static str,
    /// The command that makes it again.
    pub command: String,
    /// On what it ran.
    pub machine: Machine,
    /// Load average over the last minute, its own work included.
    pub load_after: f64,
    /// What ran.
    pub versions: Vec<String>,
    /// What did not end well, with its reason.
    pub failures: Vec<String>,
}

impl Head {
    /// Of an experiment that begins.
    pub fn new(experiment: &'static str, command: String, versions: Vec<String>) -> Head {
        let (machine, failures) = (Machine::observe(), Vec::new());
        Head { experiment, command, machine, load_after: f64::NAN, versions, failures }
    }

    /// The result of a run; what has failed is noted.
    pub fn keep<T>(&mut self, run: &str, result: anyhow::Result<T>) -> Option<T> {
        result
            .inspect_err(|error| {
                let failure = format!("{run}: {error:#}");
                eprintln!("failed: {failure}");
                self.failures.push(failure);
            })
            .ok()
    }

    /// Nothing is measured any more.
    pub fn end(&mut self) {
        self.load_after = machine::load();
    }

    /// Writes the page and its plot, named after the experiment.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn write(
        &self,
        directory: &Path,
        (title, notes, tables): (&str, &[String], &str),
        draw: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        draw(&directory.join(format!("{}.png", self.experiment)))?;
        let path = directory.join(format!("{}.md", self.experiment));
        std::fs::write(&path, self.page(title, notes, tables)).with_context(|| path.display().to_string())
    }

    fn page(&self, title: &str, notes: &[String], tables: &str) -> String {
        let (machine, name) = (&self.machine, self.experiment);
        let mut page = format!(
            "# {title}\n\nMade by `{}`\n\n- {} ({} processors, {} MiB), Linux {}; load average {:.1} before, {:.1} \
             after\n",
            self.command,
            machine.processor,
            machine.processors,
            machine.memory_mib,
            machine.kernel,
            machine.load_before,
            self.load_after,
        );
        let versions = if self.versions.is_empty() { None } else { Some(self.versions.join(", ")) };
        for note in versions.iter().chain(notes) {
            // Writing to a string cannot fail.
            let _ = writeln!(page, "- {note}");
        }
        let _ = write!(page, "\n![{name}]({name}.png)\n\n{tables}");
        for failure in &self.failures {
            let _ = writeln!(page, "\nFailed: {failure}");
        }
        page
    }
}

/// A cell of a table: the middle, and the ends where they differ.
pub fn cell(spread: Option<Spread>, digits: usize) -> String {
    match spread {
        Some(Spread { median, min, max }) if (max - min).abs() < f64::EPSILON => format!("{median:.digits$}"),
        Some(Spread { median, min, max }) => format!("{median:.digits$} ({min:.digits$} to {max:.digits$})"),
        None => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_on_what_and_how_it_was_made_and_what_failed() {
        let mut head = Head::new("some", "bench some".to_owned(), vec!["QEMU 10".to_owned()]);
        assert_eq!(head.keep("one", Ok(1)), Some(1));
        assert_eq!(head.keep::<u8>("two", Err(anyhow::anyhow!("no room"))), None);
        let page = head.page("Some", &["medians".to_owned()], "| table |\n");
        for part in ["# Some", "`bench some`", "- QEMU 10\n- medians", "![some](some.png)", "Failed: two: no room"] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
        assert_eq!(cell(Spread::of(&[1.0, 3.0]), 1), "2.0 (1.0 to 3.0)");
    }
}
