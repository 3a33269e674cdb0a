//! An agent of the level publish in a process of its own, so that it can be killed in the middle of taking.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_memory::published::{Published, Step};

/// Tells the process whose memory to take.
const DIRECTORY_VARIABLE: &str = "ONECOPY_TEST_AGENT_DIRECTORY";
/// What it takes at once.
const TAKEN_BYTES: u64 = 8 << 20;
/// Between any two of its steps: most kills hit it in the middle.
const STEP_PAUSE: Duration = Duration::from_millis(10);
/// When there is nothing to take, or no server.
const IDLE_PAUSE: Duration = Duration::from_millis(20);

/// Tells the process where to write what it does: a letter a step.
const JOURNAL_VARIABLE: &str = "ONECOPY_TEST_AGENT_JOURNAL";
const CLAIMED: u8 = b'c';
const GIVEN_BACK: u8 = b'g';
const DONE: u8 = b'd';

/// The process; killed with the value.
#[derive(Debug)]
pub struct AgentProcess {
    child: Child,
    journal: tempfile::NamedTempFile,
}

/// What an agent has done in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Life {
    /// How often it took memory, from the first step to the last.
    pub taken: u64,
    /// It died between two steps.
    pub died_in_the_middle: bool,
}

impl AgentProcess {
    /// Starts it: this program again, running the test of this name, which does [`take_forever`].
    ///
    /// # Errors
    ///
    /// The program cannot be run.
    pub fn start(test: &str, data_directory: &Path) -> anyhow::Result<AgentProcess> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", test, "--ignored", "--nocapture"]).env(DIRECTORY_VARIABLE, data_directory);
        let journal = tempfile::NamedTempFile::new()?;
        command.env(JOURNAL_VARIABLE, journal.path());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("the agent")?;
        Ok(AgentProcess { child, journal })
    }

    /// Kills it; what it did.
    ///
    /// # Errors
    ///
    /// It had ended by itself, or cannot be killed.
    pub fn kill(mut self) -> anyhow::Result<Life> {
        ensure!(self.child.try_wait()?.is_none(), "the agent has ended by itself");
        self.child.kill()?;
        self.child.wait()?;
        let journal = std::fs::read(self.journal.path())?;
        let taken = journal.iter().filter(|step| **step == DONE).count();
        let died_in_the_middle = journal.last().is_some_and(|step| [CLAIMED, GIVEN_BACK].contains(step));
        Ok(Life { taken: taken.try_into()?, died_in_the_middle })
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the process does until it is killed; nothing when it was not started as an agent.
///
/// # Errors
///
/// Its journal cannot be written.
pub fn take_forever() -> anyhow::Result<()> {
    let (Some(directory), Some(journal)) = (std::env::var_os(DIRECTORY_VARIABLE), std::env::var_os(JOURNAL_VARIABLE))
    else {
        return Ok(());
    };
    let journal = File::options().append(true).open(journal)?;
    let note = |step: u8| (&journal).write_all(&[step]);
    loop {
        // A server that has just crashed has nothing to attach to.
        let Ok(published) = Published::open(Path::new(&directory)) else {
            std::thread::sleep(IDLE_PAUSE);
            continue;
        };
        let mut failed = None;
        let mut watch = |step: Step| {
            failed = note(if step == Step::Claimed { CLAIMED } else { GIVEN_BACK }).err();
            std::thread::sleep(STEP_PAUSE);
        };
        while let Ok(taken) = published.take_watched(TAKEN_BYTES, &mut watch) {
            if taken.bytes == 0 {
                std::thread::sleep(IDLE_PAUSE);
            } else {
                note(DONE)?;
            }
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
    }
}
