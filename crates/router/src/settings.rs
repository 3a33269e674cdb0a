//! Session settings that follow a client from server to server.
//!
//! A `SET` runs on one server, which checks it; its effective value is read back and applied with `set_config` to
//! every other back end before the session's next statement there.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Settings a session may change before it is refused with 54000.
pub const SETTINGS_MAX: usize = 64;

/// Name (lower case) to value, as `current_setting` gives it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    values: BTreeMap<String, String>,
}

impl Settings {
    /// The value set for `name`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// The names of what is set.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// Sets `name`; false when there are too many.
    #[must_use]
    pub fn set(self: &mut Arc<Self>, name: &str, value: String) -> bool {
        if self.values.len() >= SETTINGS_MAX && !self.values.contains_key(name) {
            return false;
        }
        if self.get(name) != Some(&value) {
            Arc::make_mut(self).values.insert(name.to_owned(), value);
        }
        true
    }

    /// Takes `name` back to what the server has by itself.
    pub fn reset(self: &mut Arc<Self>, name: &str) {
        if self.values.contains_key(name) {
            Arc::make_mut(self).values.remove(name);
        }
    }

    /// The statement that turns a back end with `self` into one with `target`; none when they are equal.
    pub fn change_to(&self, target: &Settings) -> Option<String> {
        if self == target {
            return None;
        }
        let mut statements: Vec<String> = self
            .values
            .keys()
            .filter(|name| !target.values.contains_key(*name))
            .map(|name| format!("RESET {}", quote_setting_name(name)))
            .collect();
        let changed: Vec<String> = target
            .values
            .iter()
            .filter(|(name, value)| self.values.get(*name) != Some(value))
            .map(|(name, value)| format!("pg_catalog.set_config({}, {}, false)", quote(name), quote(value)))
            .collect();
        if !changed.is_empty() {
            statements.push(format!("SELECT {}", changed.join(", ")));
        }
        Some(statements.join("; "))
    }
}

/// A setting's name as an SQL identifier; a custom one has a dot between two.
fn quote_setting_name(name: &str) -> String {
    name.split('.').map(|part| format!("\"{}\"", part.replace('"', "\"\""))).collect::<Vec<_>>().join(".")
}

/// Client encodings in which a byte of a character can look like ASCII, by all names that PostgreSQL knows for them
/// (`encnames.c`), without punctuation.
const UNSAFE_ENCODINGS: [&str; 19] = [
    "SJIS",
    "MSKANJI",
    "SHIFTJIS",
    "WIN932",
    "WINDOWS932",
    "SHIFTJIS2004",
    "BIG5",
    "WIN950",
    "WINDOWS950",
    "GBK",
    "WIN936",
    "WINDOWS936",
    "UHC",
    "WIN949",
    "WINDOWS949",
    "GB18030",
    "JOHAB",
    "EUCJIS2004",
    "MULEINTERNAL",
];

/// Whether the router reads SQL as the server does when `name` is set to `value`.
pub fn is_readable_with(name: &str, value: &str) -> bool {
    match name {
        "standard_conforming_strings" => is_on(value),
        "client_encoding" => {
            let name: String = value.chars().filter(char::is_ascii_alphanumeric).collect();
            !UNSAFE_ENCODINGS.contains(&name.to_ascii_uppercase().as_str())
        }
        _ => true,
    }
}

/// Whether a statement changes, hidden in a function call, by what rules SQL is read.
pub fn hides_change_of_reading(sql: &str) -> bool {
    let sql = sql.to_ascii_lowercase();
    sql.contains("set_config")
        && ["standard_conforming_strings", "client_encoding"].iter().any(|name| sql.contains(name))
}

/// Whether PostgreSQL reads `value` as true (`parse_bool`).
pub fn is_on(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    value == "1"
        || value == "on"
        || [("true", 1), ("yes", 1)].iter().any(|(word, least)| value.len() >= *least && word.starts_with(&value))
}

/// `text` as an SQL string constant that means the same whatever `standard_conforming_strings` says.
pub fn quote(text: &str) -> String {
    let escaped = text.replace('\'', "''");
    if text.contains('\\') { format!(" E'{}'", escaped.replace('\\', "\\\\")) } else { format!("'{escaped}'") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_changed() {
        let mut old = Arc::new(Settings::default());
        assert!(old.set("work_mem", "4MB".into()));
        assert!(old.set("app.user", "a".into()));
        let mut new = old.clone();
        assert_eq!(old.change_to(&new), None);
        new.reset("app.user");
        assert!(new.set("search_path", "\"a'b\", c".into()));
        assert_eq!(
            old.change_to(&new).as_deref(),
            Some("RESET \"app\".\"user\"; SELECT pg_catalog.set_config('search_path', '\"a''b\", c', false)")
        );
    }

    #[test]
    fn encodings_that_hide_ascii_are_refused_by_all_their_names() {
        for value in ["SJIS", "shift_jis", "Windows-932", "big5", "GB18030"] {
            assert!(!is_readable_with("client_encoding", value), "{value}");
        }
        assert!(is_readable_with("client_encoding", "LATIN1"));
        assert!(!is_readable_with("standard_conforming_strings", "off"));
        assert!(is_on("TRUE") && is_on("t") && is_on("yes") && !is_on("off") && !is_on(""));
    }

    #[test]
    fn the_number_of_settings_is_bounded() {
        let mut settings = Arc::new(Settings::default());
        for number in 0..SETTINGS_MAX {
            assert!(settings.set(&format!("a.b{number}"), String::new()));
        }
        assert!(!settings.set("one.more", String::new()));
        assert!(settings.set("a.b0", "again".into()));
    }
}
