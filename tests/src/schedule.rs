//! Small transactions interleaved step by step, and the judge of what comes out: some serial order must explain it.
//!
//! The judge knows nothing of isolation levels. It runs the committed transactions one after the other, in every order, in
//! a database of its own, and compares every answer and the final state with what the interleaved run gave.

use std::collections::HashMap;

use anyhow::{Context, bail, ensure};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::client::{Answer, Session, StatementError};
use crate::cluster::TestCluster;
use crate::servers::{JUDGE_DATABASE, LEADER};

/// How long a step may neither end nor wait for a lock before the run is given up.
const STEP_DEADLINE: std::time::Duration = std::time::Duration::from_secs(20);
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(3);

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

/// Runs schedules of one scenario on a cluster, with one session for each program.
pub struct Stage<'a> {
    cluster: &'a TestCluster,
    scenario: &'a Scenario,
    control: Session,
    watcher: Session,
    actors: Vec<(Session, &'static str)>,
}

impl<'a> Stage<'a> {
    /// Opens the sessions; `servers` says where the READ ONLY programs run, in their order, the last one for all that are left.
    ///
    /// # Errors
    ///
    /// A refused connection or a setting that the cluster does not take.
    pub async fn open(
        cluster: &'a TestCluster,
        scenario: &'a Scenario,
        servers: &[&str],
        freshness: Option<&str>,
    ) -> anyhow::Result<Stage<'a>> {
        let mut actors = Vec::new();
        let mut places = servers.iter().copied();
        let mut place = LEADER;
        for program in &scenario.programs {
            let name = program.letter.to_string();
            if program.read_only {
                place = places.next().unwrap_or(place);
                let session = cluster.reader(&name, place).await?;
                if let (Some(freshness), true) = (freshness, cluster.has_router()) {
                    session.run(&format!("SET onecopy.freshness = '{freshness}'")).await?;
                }
                actors.push((session, cluster.begin_read(place)));
            } else {
                actors.push((cluster.updater(&name).await?, cluster.begin_update()));
            }
        }
        let control = cluster.updater("control").await?;
        let watcher = cluster.servers.leader().connect("watcher").await?;
        Ok(Stage { cluster, scenario, control, watcher, actors })
    }

    /// Makes the tables, through the cluster's door.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn create_tables(&self) -> anyhow::Result<()> {
        self.control.run(self.scenario.tables).await?;
        self.cluster.settle().await
    }

    /// Drops what [`Stage::create_tables`] made, for the next scenario.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn drop_tables(&self) -> anyhow::Result<()> {
        for table in self.scenario.tables.split("CREATE TABLE ").skip(1) {
            let name = table.split_whitespace().next().context("a table has a name")?;
            self.control.run(&format!("DROP TABLE {name}")).await?;
        }
        self.cluster.settle().await
    }

    /// Plays one schedule: a letter is the next step of its program, spaces are for the reader's eye. A step that waits
    /// for a lock lets the schedule go on; what its program has to do next is done as soon as it can.
    ///
    /// # Errors
    ///
    /// A step that neither ends nor waits for a lock, an unknown letter, a lost connection.
    pub async fn play(&self, schedule: &str) -> anyhow::Result<Outcome> {
        retrying(&self.control, self.scenario.reset).await?;
        self.cluster.settle().await?;
        let mut players: Vec<Player> = self.actors.iter().zip(&self.scenario.programs).map(Player::new).collect();
        for (position, letter) in schedule.chars().filter(|letter| !letter.is_whitespace()).enumerate() {
            let program = self.scenario.programs.iter().position(|program| program.letter == letter);
            let number = program.with_context(|| format!("no program is called {letter:?}"))?;
            ensure!(
                players[number].sent < self.scenario.programs[number].steps_count(),
                "too many {letter:?}: {schedule}"
            );
            players[number].send(position)?;
            self.wait_quiet(&mut players, position).await.with_context(|| format!("in schedule {schedule}"))?;
        }
        let mut programs = Vec::new();
        for player in players {
            programs.push(player.finish().await?);
        }
        self.cluster.settle().await?;
        let final_state = self.watcher.run(self.scenario.final_state).await?.rows;
        Ok(Outcome { programs, final_state })
    }

    /// Waits until each player has nothing to do or waits for a lock.
    async fn wait_quiet(&self, players: &mut [Player], position: usize) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + STEP_DEADLINE;
        loop {
            let mut busy = 0;
            let mut ended = false;
            for player in players.iter_mut() {
                ended |= player.collect(position);
                busy += usize::from(player.is_busy());
            }
            if ended {
                // What ended may have committed.
                self.cluster.settle().await?;
            }
            if busy == 0 {
                return Ok(());
            }
            let first_busy = players.iter_mut().find(|player| player.is_busy()).context("one is busy")?;
            if tokio::time::timeout(POLL_INTERVAL, first_busy.wait()).await.is_ok() {
                continue;
            }
            let waiting = self.watcher.run("SELECT count(*) FROM pg_locks WHERE NOT granted").await?.number()?;
            let waiting = usize::try_from(waiting)?;
            if waiting == players.iter().filter(|player| player.is_busy()).count() {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                bail!("step {position} neither ends nor waits for a lock ({busy} busy, {waiting} waiting)");
            }
        }
    }
}

async fn retrying(session: &Session, sql: &str) -> anyhow::Result<Answer> {
    loop {
        match session.run(sql).await {
            Err(error) if error.is_retryable() => {}
            other => return Ok(other?),
        }
    }
}

/// What a finished step tells.
enum Report {
    Answer(Answer),
    Failed(StatementError),
    Ended { committed: bool },
    Skipped,
}

/// One program on its way: a task of its own runs its steps in order.
struct Player {
    steps: mpsc::UnboundedSender<usize>,
    reports: mpsc::UnboundedReceiver<Report>,
    waiting: Option<Report>,
    sent: usize,
    reported: usize,
    outcome: ProgramOutcome,
    task: JoinHandle<()>,
}

impl Player {
    fn new(((session, begin), program): (&(Session, &'static str), &Program)) -> Player {
        // Bounded by the length of the schedule.
        let (steps, received) = mpsc::unbounded_channel();
        let (report, reports) = mpsc::unbounded_channel();
        let task = tokio::spawn(play_steps(session.clone(), begin, program.clone(), received, report));
        let outcome =
            ProgramOutcome { answers: Vec::new(), committed: false, error: None, began: 0, ended: usize::MAX };
        Player { steps, reports, waiting: None, sent: 0, reported: 0, outcome, task }
    }

    fn send(&mut self, position: usize) -> anyhow::Result<()> {
        if self.sent == 0 {
            self.outcome.began = position;
        }
        self.steps.send(self.sent).context("the player's task is gone")?;
        self.sent += 1;
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.reported < self.sent
    }

    /// Waits for a report and keeps it for [`Player::collect`].
    async fn wait(&mut self) {
        if self.waiting.is_none() {
            self.waiting = self.reports.recv().await;
        }
    }

    /// Takes over what is reported; whether the program ended by that.
    fn collect(&mut self, position: usize) -> bool {
        let mut ended = false;
        while let Some(report) = self.waiting.take().or_else(|| self.reports.try_recv().ok()) {
            self.reported += 1;
            match report {
                Report::Answer(answer) => self.outcome.answers.push(answer),
                Report::Skipped => {}
                Report::Failed(error) => {
                    self.outcome.error = Some(error);
                    self.outcome.ended = position;
                    ended = true;
                }
                Report::Ended { committed } => {
                    self.outcome.committed = committed;
                    self.outcome.ended = position;
                    ended = true;
                }
            }
        }
        ended
    }

    async fn finish(mut self) -> anyhow::Result<ProgramOutcome> {
        while self.is_busy() {
            tokio::time::timeout(STEP_DEADLINE, self.wait()).await.context("a step never ended")?;
            self.collect(usize::MAX);
        }
        drop(self.steps);
        self.task.await?;
        Ok(self.outcome)
    }
}

async fn play_steps(
    session: Session,
    begin: &'static str,
    program: Program,
    mut steps: mpsc::UnboundedReceiver<usize>,
    reports: mpsc::UnboundedSender<Report>,
) {
    let mut failed = false;
    let mut open = false;
    while let Some(number) = steps.recv().await {
        let report = if failed {
            Report::Skipped
        } else {
            let result = if number == 0 { session.run(begin).await.map(drop) } else { Ok(()) };
            open = true;
            let result = match result {
                Ok(()) => session.run(program.step(number)).await,
                Err(error) => Err(error),
            };
            let is_end = number + 1 == program.steps_count();
            match result {
                Ok(answer) if !is_end => Report::Answer(answer),
                Ok(_) => {
                    open = false;
                    Report::Ended { committed: program.end == "COMMIT" }
                }
                Err(error) => {
                    failed = true;
                    // Frees its locks; after a failed COMMIT it only warns.
                    open = session.run("ROLLBACK").await.is_err();
                    Report::Failed(error)
                }
            }
        };
        if reports.send(report).is_err() {
            break;
        }
    }
    if open {
        // A schedule that stops in the middle leaves nothing behind; a broken connection has nothing to roll back.
        let _ = session.run("ROLLBACK").await;
    }
}

/// Runs the same transactions serially.
pub struct Judge<'a> {
    scenario: &'a Scenario,
    session: Session,
    known: HashMap<Vec<usize>, SerialOutcome>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SerialOutcome {
    answers: Vec<Vec<Answer>>,
    final_state: Vec<Vec<Option<String>>>,
}

impl<'a> Judge<'a> {
    /// Empties the judge's database and makes the tables there, behind the router's back: no client reads there.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn open(cluster: &TestCluster, scenario: &'a Scenario) -> anyhow::Result<Judge<'a>> {
        let session = Session::connect("judge", &cluster.servers.leader().config(JUDGE_DATABASE)).await?;
        session.run("SET client_min_messages = error; DROP SCHEMA public CASCADE; CREATE SCHEMA public").await?;
        session.run(scenario.tables).await?;
        Ok(Judge { scenario, session, known: HashMap::new() })
    }

    /// A serial order of the committed programs that gives the same answers and the same final state; `real_time` asks
    /// that a program that ended before another began comes before it. None: the outcome is not serializable.
    ///
    /// # Errors
    ///
    /// The server's refusal of a serial run.
    pub async fn explain(&mut self, outcome: &Outcome, real_time: bool) -> anyhow::Result<Option<String>> {
        let committed: Vec<usize> =
            (0..outcome.programs.len()).filter(|number| outcome.programs[*number].committed).collect();
        for order in permutations(&committed) {
            if real_time && !respects_real_time(outcome, &order) {
                continue;
            }
            let serial = self.serial(&order).await?;
            let same_answers = order
                .iter()
                .zip(&serial.answers)
                .all(|(number, answers)| outcome.programs[*number].answers == *answers);
            if same_answers && serial.final_state == outcome.final_state {
                return Ok(Some(order.iter().map(|number| self.scenario.programs[*number].letter).collect()));
            }
        }
        Ok(None)
    }

    async fn serial(&mut self, order: &[usize]) -> anyhow::Result<SerialOutcome> {
        if let Some(outcome) = self.known.get(order) {
            return Ok(outcome.clone());
        }
        self.session.run(self.scenario.reset).await?;
        let mut answers = Vec::new();
        for number in order {
            answers.push(self.session.run_all(&self.scenario.programs[*number].statements).await?);
        }
        let final_state = self.session.run(self.scenario.final_state).await?.rows;
        let outcome = SerialOutcome { answers, final_state };
        self.known.insert(order.to_vec(), outcome.clone());
        Ok(outcome)
    }
}

fn respects_real_time(outcome: &Outcome, order: &[usize]) -> bool {
    order.iter().enumerate().all(|(position, later)| {
        order[..position].iter().all(|earlier| outcome.programs[*later].ended >= outcome.programs[*earlier].began)
    })
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (position, first) in items.iter().enumerate() {
        let mut rest = items.to_vec();
        rest.remove(position);
        for mut order in permutations(&rest) {
            order.insert(0, *first);
            all.push(order);
        }
    }
    all
}
