//! Small transactions interleaved step by step, and the checker of what comes out: some serial order must explain it.
//!
//! The checker knows nothing of isolation levels. It runs the committed transactions one after the other, in every
//! order, in a database of its own, and compares every answer and the final state with what the interleaved run gave.

mod serial_checker;
mod stage;

use crate::client::{Answer, StatementError};

pub use serial_checker::SerialChecker;
pub use stage::Stage;

/// One transaction of a scenario.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its letter in schedules.
    pub letter: char,
    /// Whether it is declared READ ONLY.
    pub read_only: bool,
    /// Its statements between BEGIN and the end.
    pub statements: Vec<&'static str>,
    /// `COMMIT` or `ROLLBACK`.
    pub end: &'static str,
}

impl Program {
    /// An update transaction that commits.
    pub fn update(letter: char, statements: &[&'static str]) -> Program {
        Program { letter, read_only: false, statements: statements.to_vec(), end: "COMMIT" }
    }

    /// A READ ONLY transaction that commits.
    pub fn read(letter: char, statements: &[&'static str]) -> Program {
        Program { letter, read_only: true, statements: statements.to_vec(), end: "COMMIT" }
    }

    /// The same, but it rolls back.
    pub fn rolled_back(mut self) -> Program {
        self.end = "ROLLBACK";
        self
    }

    fn step(&self, number: usize) -> &'static str {
        self.statements.get(number).copied().unwrap_or(self.end)
    }

    fn steps_count(&self) -> usize {
        self.statements.len() + 1
    }
}

/// Tables and the transactions that meet on them.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Creates the tables; run once.
    pub tables: &'static str,
    /// Brings them to their first state; run before each schedule.
    pub reset: &'static str,
    /// Reads the final state.
    pub final_state: &'static str,
    /// The transactions.
    pub programs: Vec<Program>,
}

/// What became of one transaction.
#[derive(Debug, Clone)]
pub struct ProgramOutcome {
    /// The answers of its statements, as far as it came.
    pub answers: Vec<Answer>,
    /// Whether its COMMIT was acknowledged.
    pub committed: bool,
    /// What ended it.
    pub error: Option<StatementError>,
    /// Position in the schedule at which it was sent first.
    pub began: usize,
    /// Position in the schedule after which it was known to have ended.
    pub ended: usize,
}

/// What came of a whole schedule.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// In the order of the scenario's programs.
    pub programs: Vec<ProgramOutcome>,
    /// What the leader holds in the end.
    pub final_state: Vec<Vec<Option<String>>>,
}

impl ProgramOutcome {
    /// The SQLSTATE that ended it.
    pub fn error_code(&self) -> Option<&str> {
        self.error.as_ref().map(|error| error.code.as_str())
    }
}

impl Outcome {
    /// Letters of the programs that committed.
    pub fn committed(&self, scenario: &Scenario) -> String {
        let programs = scenario.programs.iter().zip(&self.programs);
        programs.filter(|(_, outcome)| outcome.committed).map(|(program, _)| program.letter).collect()
    }
}

/// Every schedule in which each program's steps keep their order.
pub fn all_schedules(scenario: &Scenario) -> Vec<String> {
    let mut schedules = Vec::new();
    let mut left: Vec<usize> = scenario.programs.iter().map(Program::steps_count).collect();
    extend_schedules(scenario, &mut left, &mut String::new(), &mut schedules);
    schedules
}

fn extend_schedules(scenario: &Scenario, left: &mut [usize], begun: &mut String, schedules: &mut Vec<String>) {
    if left.iter().all(|count| *count == 0) {
        schedules.push(begun.clone());
        return;
    }
    for number in 0..left.len() {
        if left[number] > 0 {
            left[number] -= 1;
            begun.push(scenario.programs[number].letter);
            extend_schedules(scenario, left, begun, schedules);
            begun.pop();
            left[number] += 1;
        }
    }
}
