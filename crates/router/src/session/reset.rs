//! RESET and SET TO DEFAULT: back to what the client's log-in has set, else to what the server has by itself.

use std::sync::Arc;

use bytes::BytesMut;

use super::outcome::Outcome;
use super::{Session, SessionEnd};
use crate::sql::ResetForm;
use crate::wire::Reply;

impl Session {
    /// RESET and SET TO DEFAULT.
    pub(super) async fn reset(&mut self, name: &str, form: ResetForm, text: &str) -> Result<Outcome, SessionEnd> {
        if matches!(name, "onecopy.freshness" | "onecopy.server" | "onecopy.served_by") {
            return Ok(self.set_of_router(name, None, form.tag()));
        }
        let local = form == ResetForm::SetLocal;
        if local && !self.begins_locally() {
            return Ok(Outcome::Done);
        }
        match name {
            "default_transaction_isolation" => {
                self.set_isolation(local, self.characteristics_at_login.isolation);
                self.client.output.command_complete(form.tag());
                return Ok(Outcome::Done);
            }
            "transaction_read_only" if self.transaction.is_some() => return self.let_server_set_mode(text).await,
            // What the transaction has already.
            "transaction_isolation" | "transaction_read_only" | "transaction_deferrable" => {
                self.client.output.command_complete(form.tag());
                return Ok(Outcome::Done);
            }
            _ => {}
        }
        // The server knows its own default, not that of the client's log-in.
        let set = self.settings_at_login.set_to(name, local, &self.settings);
        let text = set.as_deref().unwrap_or(text);
        let start = self.client.output.len();
        let outcome = match name {
            "role" | "session_authorization" if local || set.is_some() => self.set_identity(text).await?,
            "role" | "session_authorization" => self.run_text_on_leader(text).await?,
            _ if local => {
                self.note_local(name);
                self.run_text_in_transaction(text).await?
            }
            _ if set.is_some() && !self.settings.has_room_for(name) => self.too_many_settings(),
            _ if set.is_some() => {
                let known = self.settings_at_login.get(name).map(str::to_owned);
                self.set_and_follow(name, text, known).await?
            }
            _ => self.reset_to_servers(name, text).await?,
        };
        if outcome == Outcome::Done {
            replace_tag(&mut self.client.output, start, Some(form.tag()));
        }
        Ok(outcome)
    }

    /// RESET of what the log-in has not set.
    async fn reset_to_servers(&mut self, name: &str, text: &str) -> Result<Outcome, SessionEnd> {
        let outcome = match &self.transaction {
            Some(_) => self.run_text_in_transaction(text).await?,
            // What it is then nobody need know: the session has it no more.
            None => self.set_and_follow(name, text, Some(String::new())).await?,
        };
        if outcome == Outcome::Done {
            self.note_touched([name.to_owned()]);
            self.settings.reset(name);
            self.note_settings_there(self.settings.clone());
            match name {
                // The role or the database may have defaults of its own.
                "default_transaction_read_only" => {
                    self.characteristics.read_only = self.characteristics_at_login.read_only
                }
                "default_transaction_deferrable" => {
                    self.characteristics.deferrable = self.characteristics_at_login.deferrable;
                }
                _ => {}
            }
        }
        Ok(outcome)
    }

    /// RESET ALL.
    pub(super) async fn reset_all(&mut self) -> Result<Outcome, SessionEnd> {
        if self.transaction.is_some() {
            let start = self.client.output.len();
            if self.run_text_in_transaction("RESET ALL").await? == Outcome::Failed {
                return Ok(Outcome::Failed);
            }
            self.note_touched(self.settings.names().map(str::to_owned).collect::<Vec<_>>());
            // The server knows its own defaults, not those of the client's log-in.
            let at_login = Arc::clone(&self.settings_at_login);
            let texts: Vec<String> =
                at_login.names().filter_map(|name| at_login.set_to(name, false, &self.settings)).collect();
            for text in texts {
                let before = self.client.output.len();
                if self.run_text_in_transaction(&text).await? == Outcome::Failed {
                    let error = self.client.output.split_off(before);
                    self.client.output.truncate(start);
                    self.client.output.unsplit(error);
                    return Ok(Outcome::Failed);
                }
                replace_tag(&mut self.client.output, before, None);
            }
            self.note_settings_there(self.settings_at_login.clone());
            self.set_isolation(false, None);
        } else {
            self.client.output.command_complete("RESET");
        }
        self.forget_settings();
        Ok(Outcome::Done)
    }

    /// Takes the session's settings back to those of its log-in.
    pub(super) fn forget_settings(&mut self) {
        self.settings = Arc::clone(&self.settings_at_login);
        self.characteristics = self.characteristics_at_login;
        self.freshness = self.freshness_at_login;
        self.server_choice = self.server_choice_at_login.clone();
    }
}

/// Puts `tag` in the place of that of the `CommandComplete` behind `start`; none: takes the message out.
fn replace_tag(output: &mut BytesMut, start: usize, tag: Option<&str>) {
    let mut at = start;
    while let Some(&[kind, a, b, c, d]) = output.get(at..).and_then(|rest| rest.first_chunk()) {
        let end = at + 1 + u32::from_be_bytes([a, b, c, d]) as usize;
        if kind == b'C' {
            let behind = output.split_off(end.min(output.len()));
            output.truncate(at);
            if let Some(tag) = tag {
                output.command_complete(tag);
            }
            output.unsplit(behind);
            return;
        }
        at = end;
    }
}
