//! Schedules played on a cluster: each program has a session and a task of its own, so that one which blocks holds up
//! no other.

use anyhow::{Context, bail, ensure};
use onecopy_testing::try_until_async;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Outcome, Program, ProgramOutcome, Scenario};
use crate::client::{Answer, Session, StatementError};
use crate::cluster::TestCluster;
use crate::servers::LEADER;

/// How long a step may neither end nor wait for a lock before the run is given up.
const STEP_DEADLINE: std::time::Duration = std::time::Duration::from_secs(90);
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(3);

/// Runs schedules of one scenario on a cluster, with one session for each program.
pub struct Stage<'a> {
    cluster: &'a TestCluster,
    scenario: &'a Scenario,
    control: Session,
    refresher: Session,
    watcher: Session,
    actors: Vec<(Session, &'static str)>,
}

impl<'a> Stage<'a> {
    /// Opens the sessions; `servers` says where the READ ONLY programs run, in their order, the last one for all that
    /// are left.
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
        let refresher = cluster.reader("refresher", LEADER).await?;
        if cluster.has_router() {
            refresher.run("SET onecopy.freshness = 'strict'").await?;
        }
        let watcher = cluster.servers.leader().connect("watcher").await?;
        Ok(Stage { cluster, scenario, control, refresher, watcher, actors })
    }

    /// Makes the tables, through the cluster's router.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn create_tables(&self) -> anyhow::Result<()> {
        self.control.run(self.scenario.tables).await?;
        self.cluster.wait_for_replay().await
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
        self.cluster.wait_for_replay().await
    }

    /// Plays one schedule: a letter is the next step of its program, spaces are for the reader's eye. A step that waits
    /// for a lock lets the schedule go on; what its program has to do next is done as soon as it can.
    ///
    /// # Errors
    ///
    /// A step that neither ends nor waits for a lock, an unknown letter, a lost connection.
    pub async fn play(&self, schedule: &str) -> anyhow::Result<Outcome> {
        self.reset().await?;
        self.cluster.wait_for_replay().await?;
        if self.cluster.has_router() {
            // From here on the newest epoch holds the reset, also for readers that may be content with an older one.
            self.refresher.run_all(&[self.cluster.begin_read(LEADER), self.scenario.final_state, "COMMIT"]).await?;
        }
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
        self.cluster.wait_for_replay().await?;
        let final_state = self.watcher.run(self.scenario.final_state).await?.rows;
        Ok(Outcome { programs, final_state })
    }

    async fn reset(&self) -> anyhow::Result<()> {
        let refusal = async || match self.control.run(self.scenario.reset).await {
            Err(refusal) if refusal.is_retryable() => {
                // What it has begun is still open.
                self.control.run("ROLLBACK").await?;
                Ok(Some(refusal))
            }
            answered => Ok(answered.map(|_| None)?),
        };
        try_until_async("the tables are as at first", refusal, Option::is_none).await?;
        Ok(())
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
                self.cluster.wait_for_replay().await?;
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
