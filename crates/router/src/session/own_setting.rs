//! Settings that no server knows: the router's own, and the isolation that a client has asked for. SHOW answers them.

use super::Session;
use super::outcome::Outcome;
use crate::wire::{Reply, SqlError, sqlstate};

impl Session {
    /// Whether the router answers SHOW of this name.
    pub(super) fn shows(name: &str) -> bool {
        matches!(
            name,
            "transaction_isolation"
                | "default_transaction_isolation"
                | "onecopy.freshness"
                | "onecopy.server"
                | "onecopy.served_by"
        )
    }

    /// Answers SHOW.
    pub(super) fn show(&mut self, name: &str, describes: bool) {
        let value = match name {
            "transaction_isolation" => self.isolation_asked(true).setting().to_owned(),
            "default_transaction_isolation" => self.isolation_asked(false).setting().to_owned(),
            "onecopy.freshness" => self.freshness.to_string(),
            "onecopy.served_by" => self.served_by.as_ref().map(ToString::to_string).unwrap_or_default(),
            _ => self.server_choice.as_deref().unwrap_or_default().to_owned(),
        };
        let output = &mut self.client.output;
        if describes {
            output.text_columns(&[name]);
        }
        output.text_row(&[Some(value)]);
        output.command_complete("SHOW");
    }

    /// SET, to the default when there is no value; `tag` is what the client is told.
    pub(super) fn set_of_router(&mut self, name: &str, value: Option<&str>, tag: &str) -> Outcome {
        let valid = match (name, value) {
            ("onecopy.served_by", _) => return self.cannot_be_changed(name),
            ("onecopy.freshness", None) => {
                self.freshness = self.freshness_at_login;
                true
            }
            ("onecopy.freshness", Some(value)) => value.parse().map(|freshness| self.freshness = freshness).is_ok(),
            (_, None) => {
                self.server_choice = self.server_choice_at_login.clone();
                true
            }
            (_, Some("")) => {
                self.server_choice = None;
                true
            }
            (_, Some(value)) => {
                let chosen = self.database.servers.named(value);
                if let Some(server) = &chosen {
                    self.server_choice = Some(server.name.as_str().into());
                }
                chosen.is_some()
            }
        };
        if !valid {
            return self.invalid_value(name, value.unwrap_or_default());
        }
        self.client.output.command_complete(tag);
        Outcome::Done
    }

    fn cannot_be_changed(&mut self, name: &str) -> Outcome {
        let message = format!("parameter \"{name}\" cannot be changed");
        self.fail(SqlError::error(sqlstate::CANNOT_CHANGE_RUNTIME_PARAM, message));
        Outcome::Failed
    }

    pub(super) fn invalid_value(&mut self, name: &str, value: &str) -> Outcome {
        let error = SqlError::error(
            sqlstate::INVALID_PARAMETER_VALUE,
            format!("invalid value for parameter \"{name}\": \"{value}\""),
        );
        self.fail(match name {
            "onecopy.freshness" => error.hint("Available values: strict, session, bounded:<milliseconds>."),
            "onecopy.server" => {
                let servers = self.database.servers.current();
                let names: Vec<&str> = servers.servers().map(|server| server.name.as_str()).collect();
                error.hint(format!("Available values: {}.", names.join(", ")))
            }
            _ => error,
        });
        Outcome::Failed
    }
}
