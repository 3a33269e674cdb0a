//! The checker of outcomes: runs what committed in every serial order and compares.

use std::collections::HashMap;

use super::{Outcome, Scenario};
use crate::client::{Answer, Session};
use crate::cluster::TestCluster;
use crate::servers::CHECKER_DATABASE;

/// Runs the same transactions serially.
pub struct SerialChecker<'a> {
    scenario: &'a Scenario,
    session: Session,
    known: HashMap<Vec<usize>, SerialOutcome>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SerialOutcome {
    answers: Vec<Vec<Answer>>,
    final_state: Vec<Vec<Option<String>>>,
}

impl<'a> SerialChecker<'a> {
    /// Empties the checker's database and makes the tables there, behind the router's back: no client reads there.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn open(cluster: &TestCluster, scenario: &'a Scenario) -> anyhow::Result<SerialChecker<'a>> {
        let session = Session::connect("checker", &cluster.servers.leader().config(CHECKER_DATABASE)).await?;
        session.run("SET client_min_messages = error; DROP SCHEMA public CASCADE; CREATE SCHEMA public").await?;
        session.run(scenario.tables).await?;
        Ok(SerialChecker { scenario, session, known: HashMap::new() })
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
