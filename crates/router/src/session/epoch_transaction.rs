//! Transactions that read one epoch.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use super::batch_traits::BatchTraits;
use super::ddl_in_progress::closed_by_ddl;
use super::epoch_read::{InFlight, NotAtEpoch};
use super::relay::{Ended, Hold, RelayError, Relayed};
use super::request::{Item, Request, put_guard, put_own, put_sync};
use super::served_by::ServedBy;
use super::transaction::{Placement, Reported, Transaction, aborted};
use super::{Session, SessionEnd};
use crate::settings::{FORGET_PLANS, Reach};
use crate::wire::{SqlError, sqlstate};

/// Tries to open a read-only transaction's epoch before the leader takes it.
const OPEN_TRIES_MAX: usize = 6;

/// Settings that a transaction may bring along from an epoch to the leader. With more it stays where it is.
const SETTINGS_MAX: usize = 64;

impl Session {
    /// Opens a read-only transaction at an epoch with its first unit; none when the leader must take it.
    pub(super) async fn open_epoch_transaction(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Option<Result<(), Reported>>, SessionEnd> {
        let demand = self.demand();
        let wait = self.database.backend_wait();
        let mut avoid = Vec::new();
        for _ in 0..OPEN_TRIES_MAX {
            let change_counter = self.database.epochs.change_counter();
            let (epoch, server) = match self.choose(demand, &avoid).await {
                Ok(chosen) => chosen,
                Err(NotAtEpoch::AskLeader | NotAtEpoch::ChosenServerIsOut) => return Ok(None),
                Err(NotAtEpoch::Error(error)) => return Ok(Some(Err(Reported::Here(error)))),
            };
            let (Some(in_flight), Some(pool)) = (InFlight::on(&server), self.database.readers.of(&server)) else {
                avoid.push(server.number);
                continue;
            };
            let Ok(mut backend) = pool.take(&self.credentials, &self.settings, wait).await else {
                avoid.push(server.number);
                continue;
            };
            if let Err(unfit) = self.give_settings(&mut backend).await? {
                if unfit.error.code == sqlstate::QUERY_CANCELED {
                    return Ok(Some(Err(Reported::Here(unfit.error))));
                }
                avoid.push(server.number);
                continue;
            }
            // The epoch is opened in a step of its own, so that the client's statement runs only if it is open.
            let mut expected = VecDeque::new();
            let opening = self.opening_of(&epoch, &mut backend, true);
            put_guard(&mut backend, &opening, &mut expected);
            put_sync(&mut backend, &mut expected);
            let start = self.client.output.len();
            let Ended { result, .. } = self.relay(&mut backend, expected, Hold::Briefly).await;
            self.statement_ended();
            self.client.output.truncate(start);
            match result {
                Ok(relayed) if relayed.own_error.is_none() => {
                    self.served_by = Some(ServedBy::epoch(&epoch, &server));
                    transaction.placement =
                        Placement::AtEpoch { backend: Box::new(backend), epoch, change_counter, _in_flight: in_flight };
                    return self.run_at_transaction_epoch(transaction, request, traits).await.map(Some);
                }
                Ok(_) => {}
                Err(RelayError::Client(error)) => return Err(error.into()),
                Err(_) => avoid.push(server.number),
            }
        }
        Ok(None)
    }

    pub(super) async fn run_at_transaction_epoch(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        if !traits.fits_an_epoch() {
            return self.refuse_at_epoch(transaction, request).await;
        }
        match (&traits.setting, &mut transaction.settings_so_far) {
            (Some(text), Some(so_far)) if so_far.len() < SETTINGS_MAX => so_far.push(text.clone()),
            _ => transaction.settings_so_far = None,
        }
        let savepoints = transaction.savepoints;
        let Placement::AtEpoch { backend, epoch, change_counter, .. } = &mut transaction.placement else {
            return Ok(Ok(()));
        };
        let mut expected = VecDeque::new();
        if traits.local_settings != Reach::Nothing {
            // A function that has settings of its own must not find what others have planned without them.
            put_own(backend, FORGET_PLANS, false, &mut expected);
        }
        request.encode(backend, &mut expected);
        let Ended { result, went_out, start, final_error, .. } = self.relay(backend, expected, Hold::Tentatively).await;
        self.statement_ended();
        let server = backend.server.clone();
        match result {
            Err(RelayError::Client(error)) => Err(error.into()),
            Err(error) => {
                transaction.placement = Placement::Lost;
                self.take_back(start, went_out);
                Ok(Err(Reported::Here(self.server_lost(&server.name, &error, final_error))))
            }
            Ok(_) if epoch.is_doomed() => {
                self.take_back(start, went_out);
                Ok(Err(Reported::Here(closed_by_ddl())))
            }
            Ok(Relayed { error: Some(_), .. }) if self.leaves_unasked(savepoints, traits, *change_counter) => {
                self.take_back(start, went_out);
                Ok(Err(Reported::Here(closed_by_ddl())))
            }
            Ok(Relayed { error: Some(fields), .. }) => Ok(Err(Reported::ByServer(fields.code))),
            Ok(_) if self.looks_at_what_is_newer(backend, *change_counter, traits).await? => {
                self.take_back(start, went_out);
                Ok(Err(Reported::Here(closed_by_ddl())))
            }
            Ok(_) => {
                server.reads.fetch_add(1, Relaxed);
                Ok(Ok(()))
            }
        }
    }

    /// Nothing of `request` runs at the epoch. What the server there does not understand, as names that it does not
    /// know, gets its own error.
    async fn refuse_at_epoch(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        for item in &request.items {
            let asked = match item {
                Item::Simple(sql) => self.parses(sql.clone()),
                Item::Parse { text, .. } => Request { items: vec![Item::Parse { text: text.clone(), named: false }] },
                // What follows may depend on what does not run.
                Item::Portal(frame) if frame.tag == b'E' => break,
                _ => continue,
            };
            let Placement::AtEpoch { backend, epoch, .. } = &mut transaction.placement else { break };
            let mut expected = VecDeque::new();
            asked.encode(backend, &mut expected);
            let Ended { result, went_out, start, final_error, .. } =
                self.relay(backend, expected, Hold::Tentatively).await;
            self.statement_ended();
            let is_doomed = epoch.is_doomed();
            match result {
                Ok(Relayed { error: Some(fields), .. }) if !is_doomed => {
                    return Ok(Err(Reported::ByServer(fields.code)));
                }
                Err(RelayError::Client(error)) => return Err(error.into()),
                Err(error) => {
                    let name = backend.server.name.clone();
                    transaction.placement = Placement::Lost;
                    self.take_back(start, went_out);
                    return Ok(Err(Reported::Here(self.server_lost(&name, &error, final_error))));
                }
                Ok(_) => self.take_back(start, went_out),
            }
            if is_doomed {
                return Ok(Err(Reported::Here(closed_by_ddl())));
            }
        }
        Ok(Err(Reported::Here(
            SqlError::error(
                sqlstate::READ_ONLY_SQL_TRANSACTION,
                "this statement cannot run in a read-only transaction that reads an epoch",
            )
            .hint("Run it first in its transaction, or begin the transaction without READ ONLY."),
        )))
    }

    /// A transaction at an epoch goes to the leader when `traits` cannot run at the epoch and nothing but SET and the
    /// like has run there: that it was placed by a setting shall not decide what it may read.
    pub(super) async fn leave_epoch_for(
        &mut self,
        transaction: &mut Transaction,
        traits: &BatchTraits,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        match &mut transaction.settings_so_far {
            Some(so_far) if !traits.fits_an_epoch() => {
                let settings = std::mem::take(so_far);
                self.move_to_leader(transaction, &settings).await
            }
            _ => Ok(Ok(())),
        }
    }

    /// Begins a transaction anew on the leader that has only run `settings` at its epoch.
    async fn move_to_leader(
        &mut self,
        transaction: &mut Transaction,
        settings: &[String],
    ) -> Result<Result<(), Reported>, SessionEnd> {
        if let Placement::AtEpoch { mut backend, .. } =
            std::mem::replace(&mut transaction.placement, Placement::Nowhere)
        {
            backend.stale_plans |= transaction.stale_plans;
            self.give_back_reader(*backend);
        }
        if let Err(error) = self.place_on_leader(transaction).await {
            return Ok(Err(Reported::Here(error)));
        }
        let Placement::OnLeader(leader) = &mut transaction.placement else { return Ok(Err(Reported::Here(aborted()))) };
        // What it has set already must end with it.
        let of_now = std::mem::replace(&mut self.settings, transaction.settings_before.clone());
        let given = self.give_settings(&mut leader.backend).await;
        self.settings = of_now;
        if let Err(unfit) = given? {
            return self.leave_unfit_leader(transaction, unfit);
        }
        let mut expected = VecDeque::new();
        put_guard(&mut leader.backend, leader.begin.take().as_slice(), &mut expected);
        put_guard(&mut leader.backend, settings, &mut expected);
        put_sync(&mut leader.backend, &mut expected);
        let Ended { result, .. } = self.relay(&mut leader.backend, expected, Hold::Briefly).await;
        self.statement_ended();
        match result {
            Ok(Relayed { own_error: None, .. }) => Ok(Ok(())),
            Ok(Relayed { own_error: Some(fields), .. }) => Ok(Err(Reported::Here(SqlError::from(fields)))),
            Err(RelayError::Client(error)) => Err(error.into()),
            Err(error) => {
                let start = self.client.output.len();
                self.lost_in_transaction(transaction, &error, None, (start, false))
            }
        }
    }
}
