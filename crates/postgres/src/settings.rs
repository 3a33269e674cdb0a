//! Configuration as data: settings and access rules, and how they are written.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::PostgresError;

/// Settings of a server, name to value, in order of their names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// No settings: the server's own defaults.
    pub fn new() -> Settings {
        Settings::default()
    }

    /// Sets one; the value is written as text, as in `128MB` or `on`.
    pub fn set(&mut self, name: &str, value: impl fmt::Display) -> &mut Settings {
        self.0.insert(name.to_owned(), value.to_string());
        self
    }

    /// Forgets one: the server's default counts again.
    pub fn unset(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }

    /// The value of one.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All, in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Takes over all of `other`; where both have one, `other` wins.
    pub fn merge(&mut self, other: &Settings) -> &mut Settings {
        self.0.extend(other.0.clone());
        self
    }

    /// Has the server load a library at its start, beside those that it loads already.
    pub fn preload(&mut self, library: &str) -> &mut Settings {
        const LIST: &str = "shared_preload_libraries";
        let loaded = self.get(LIST).map(str::trim).filter(|list| !list.is_empty());
        let list = match loaded {
            Some(list) if list.split(',').any(|loaded| loaded.trim().trim_matches('"') == library) => return self,
            Some(list) => format!("{list}, {library}"),
            None => library.to_owned(),
        };
        self.set(LIST, list)
    }

    /// Has the server no longer load a library at its start; whether it would have.
    pub fn unload(&mut self, library: &str) -> bool {
        const LIST: &str = "shared_preload_libraries";
        let Some(list) = self.get(LIST) else { return false };
        let names = |loaded: &&str| loaded.trim().trim_matches('"') != library;
        let kept: Vec<&str> = list.split(',').filter(names).map(str::trim).collect();
        let was_loaded = kept.len() < list.split(',').count();
        let kept = kept.join(", ");
        self.set(LIST, kept);
        was_loaded
    }

    /// The text of a configuration file.
    ///
    /// Source of the quoting: PostgreSQL, `src/backend/utils/misc/guc-file.l` (a string cannot hold a line end, so it
    /// is escaped).
    ///
    /// # Errors
    /// [`PostgresError::InvalidSetting`] for a name that is none or a value with a zero byte.
    pub fn to_configuration_file(&self) -> Result<String, PostgresError> {
        let mut text = String::from("# Written before each start of the server; changes here do not last.\n");
        for (name, value) in self.iter() {
            let invalid = |reason| PostgresError::InvalidSetting { name: name.to_owned(), reason };
            let good_start = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
            if !good_start || !name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_.$".contains(letter)) {
                return Err(invalid("that is not a name of a setting"));
            }
            if value.contains('\0') {
                return Err(invalid("its value has a zero byte"));
            }
            let value = value.replace('\\', "\\\\").replace('\'', "''").replace('\n', "\\n").replace('\r', "\\r");
            text.push_str(&format!("{name} = '{value}'\n"));
        }
        Ok(text)
    }
}

/// Which connections an access rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RuleKind {
    /// The Unix socket.
    Local,
    /// TCP, with or without TLS.
    Host,
}

/// One line of `pg_hba.conf`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessRule {
    /// Which connections it is for.
    pub kind: RuleKind,
    /// A database, `all` or `replication`.
    pub database: String,
    /// A role or `all`.
    pub user: String,
    /// An address range as in `127.0.0.1/32`; ignored for the Unix socket.
    pub address: String,
    /// How it is proven who it is, as in `scram-sha-256`.
    pub method: String,
}

impl AccessRule {
    /// Everybody, everywhere, also for replication, by password, from the Unix socket and from `addresses`.
    pub fn by_password(addresses: &[&str]) -> Vec<AccessRule> {
        let rule = |kind, database: &str, address: &str| AccessRule {
            kind,
            database: database.to_owned(),
            user: "all".to_owned(),
            address: address.to_owned(),
            method: "scram-sha-256".to_owned(),
        };
        let mut rules = vec![rule(RuleKind::Local, "all", ""), rule(RuleKind::Local, "replication", "")];
        for address in addresses {
            rules.push(rule(RuleKind::Host, "all", address));
            rules.push(rule(RuleKind::Host, "replication", address));
        }
        rules
    }

    /// The rules of a server that only its own machine reaches.
    pub fn local_machine() -> Vec<AccessRule> {
        AccessRule::by_password(&["127.0.0.1/32", "::1/128"])
    }

    /// The text of a `pg_hba.conf`.
    ///
    /// # Errors
    /// [`PostgresError::InvalidSetting`] for a field with a quote, a line end or a zero byte: the file has no way to
    /// write them.
    pub fn to_file(rules: &[AccessRule]) -> Result<String, PostgresError> {
        let mut text = String::from("# Written before each start of the server; changes here do not last.\n");
        for rule in rules {
            let fields = [&rule.database, &rule.user, &rule.address, &rule.method];
            if fields.iter().any(|field| field.contains(['"', '\n', '\r', '\0'])) {
                return Err(PostgresError::InvalidSetting {
                    name: format!("access rule for {}", rule.user.escape_debug()),
                    reason: "a field has a quote, a line end or a zero byte",
                });
            }
            let (database, user, method) = (quote_name(&rule.database), quote_name(&rule.user), &rule.method);
            text.push_str(&match rule.kind {
                RuleKind::Local => format!("local {database} {user} {method}\n"),
                RuleKind::Host => format!("host {database} {user} {} {method}\n", rule.address),
            });
        }
        Ok(text)
    }
}

/// Quoted, a name is only a name; the keywords must stay bare to be keywords.
fn quote_name(name: &str) -> String {
    match name {
        "all" | "replication" | "sameuser" | "samerole" => name.to_owned(),
        _ => format!("\"{name}\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(name: &str, value: &str) -> Result<String, PostgresError> {
        Settings::new().set(name, value).to_configuration_file()
    }

    #[test]
    fn values_are_quoted() {
        for (value, written) in
            [("on", "'on'"), ("it's", "'it''s'"), ("a\\b", "'a\\\\b'"), ("two\nlines", "'two\\nlines'"), ("", "''")]
        {
            let text = file_of("cluster_name", value).expect("valid");
            assert_eq!(text.lines().nth(1), Some(format!("cluster_name = {written}").as_str()));
        }
    }

    #[test]
    fn what_is_no_setting_is_refused() {
        for name in ["", "1a", "a b", "a=b", "a\nb", "a'"] {
            assert!(matches!(file_of(name, "on"), Err(PostgresError::InvalidSetting { .. })), "{name:?}");
        }
        assert!(matches!(file_of("a.b", "x\0y"), Err(PostgresError::InvalidSetting { .. })));
    }

    #[test]
    fn later_settings_win() {
        let mut settings = Settings::new();
        settings.set("port", 1).set("fsync", "on");
        settings.merge(Settings::new().set("port", 2));
        assert_eq!(settings.iter().collect::<Vec<_>>(), [("fsync", "on"), ("port", "2")]);
    }

    #[test]
    fn a_library_is_loaded_beside_others_and_once() {
        for (before, after) in [
            (None, "some"),
            (Some(" "), "some"),
            (Some("other"), "other, some"),
            (Some("some,other"), "some,other"),
            (Some("\"some\""), "\"some\""),
        ] {
            let mut settings = Settings::new();
            if let Some(before) = before {
                settings.set("shared_preload_libraries", before);
            }
            assert_eq!(settings.preload("some").get("shared_preload_libraries"), Some(after), "{before:?}");
            assert!(settings.unload("some") && !settings.unload("some"));
            let left = settings.get("shared_preload_libraries").expect("the list stays");
            assert_eq!(left, if after.contains("other") { "other" } else { "" });
        }
    }

    #[test]
    fn access_rules_are_lines() {
        let mut rules = AccessRule::by_password(&["10.0.0.0/8"]);
        rules[0].user = "some one".to_owned();
        let text = AccessRule::to_file(&rules).expect("valid");
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "local all \"some one\" scram-sha-256",
                "local replication all scram-sha-256",
                "host all all 10.0.0.0/8 scram-sha-256",
                "host replication all 10.0.0.0/8 scram-sha-256",
            ]
        );
        rules[0].user = "a\nhost all all all trust".to_owned();
        assert!(matches!(AccessRule::to_file(&rules), Err(PostgresError::InvalidSetting { .. })));
    }
}
