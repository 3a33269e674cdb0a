//! Session settings that follow a client from server to server.
//!
//! A `SET` runs on one server, which checks it; its effective value is read back and applied with `set_config` to
//! every other back end before the session's next statement there.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sql::contains_ignoring_case;

/// Settings a session may change before it is refused with 54000.
pub const SETTINGS_MAX: usize = 64;

/// How far a setting reaches into a statement that is parsed or planned under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Reach {
    /// Not at all: it is about time limits, costs, logs, names.
    #[default]
    Nothing,
    /// A plan may keep a value that was worked out under it: PostgreSQL takes what writes `float8`, `bytea` and
    /// `interval` for immutable, and a user may say so of any function.
    Plans,
    /// Parse makes a value of a constant under it.
    Constants,
    /// Parse finds other objects under it, or nothing is known of it.
    Names,
}

impl Reach {
    /// How far the setting `name` (lower case) reaches.
    pub fn of(name: &str) -> Reach {
        const PREFIXES: [&str; 13] = [
            "log_",
            "debug_",
            "enable_",
            "geqo",
            "jit",
            "cpu_",
            "parallel_",
            "min_parallel_",
            "max_parallel_",
            "track_",
            "tcp_",
            "vacuum_",
            "default_transaction_",
        ];
        match name {
            "application_name"
            | "statement_timeout"
            | "lock_timeout"
            | "transaction_timeout"
            | "deadlock_timeout"
            | "idle_in_transaction_session_timeout"
            | "idle_session_timeout"
            | "client_connection_check_interval"
            | "client_min_messages"
            | "work_mem"
            | "hash_mem_multiplier"
            | "maintenance_work_mem"
            | "logical_decoding_work_mem"
            | "temp_buffers"
            | "temp_file_limit"
            | "effective_cache_size"
            | "effective_io_concurrency"
            | "maintenance_io_concurrency"
            | "random_page_cost"
            | "seq_page_cost"
            | "from_collapse_limit"
            | "join_collapse_limit"
            | "recursive_worktable_factor"
            | "cursor_tuple_fraction"
            | "default_statistics_target"
            | "constraint_exclusion"
            | "plan_cache_mode"
            | "synchronous_commit"
            | "stats_fetch_consistency"
            | "lc_messages" => Reach::Nothing,
            name if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) => Reach::Nothing,
            "extra_float_digits"
            | "bytea_output"
            | "xmlbinary"
            | "lc_numeric"
            | "lc_time"
            | "default_text_search_config"
            | "quote_all_identifiers" => Reach::Plans,
            // PostgreSQL finds out by itself whether they make it parse again.
            "role" | "session_authorization" | "row_security" => Reach::Plans,
            "timezone"
            | "timezone_abbreviations"
            | "datestyle"
            | "intervalstyle"
            | "lc_monetary"
            | "array_nulls"
            | "xmloption"
            | "transform_null_equals"
            | "backslash_quote"
            | "escape_string_warning"
            | "standard_conforming_strings" => Reach::Constants,
            // One of an extension or of the client's own.
            name if name.contains('.') => Reach::Plans,
            _ => Reach::Names,
        }
    }
}

/// Whether Parse may make values of constants in this text; what is no constant for sure counts.
pub fn has_constants(sql: &[u8]) -> bool {
    let quotes = |pair: &[u8]| pair[0] == b'$' && !pair[1].is_ascii_digit();
    sql.contains(&b'\'')
        || sql.windows(2).any(quotes)
        // `transform_null_equals` is about these.
        || contains_ignoring_case(sql, b"null")
}

/// Name (lower case) to value, as `current_setting` gives it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
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

    /// Whether `name` can be set; there are no more than [`SETTINGS_MAX`].
    pub fn has_room_for(&self, name: &str) -> bool {
        self.values.len() < SETTINGS_MAX || self.values.contains_key(name)
    }

    /// Sets `name`; false when there are too many.
    #[must_use]
    pub fn set(self: &mut Arc<Self>, name: &str, value: String) -> bool {
        if !self.has_room_for(name) {
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

    /// Those that reach into statements: two sessions that agree in them mean the same by the same text.
    pub fn of_statements(&self) -> Settings {
        let reaches = |(name, _): &(&String, &String)| Reach::of(name) != Reach::Nothing;
        let values = self.values.iter().filter(reaches);
        Settings { values: values.map(|(name, value)| (name.clone(), value.clone())).collect() }
    }

    /// How far the settings reach in which the two differ.
    pub fn difference(&self, other: &Settings) -> Reach {
        let names = self.values.keys().chain(other.values.keys());
        let different = names.filter(|name| self.get(name) != other.get(name));
        different.map(|name| Reach::of(name)).max().unwrap_or_default()
    }

    /// Whether a back end with these settings reads the router's statements, which are UTF-8, as they are.
    pub fn reads_utf8(&self) -> bool {
        self.get("client_encoding").is_none_or(is_utf8)
    }

    /// A string constant for a back end with these settings.
    pub fn quoted(&self, text: &str) -> String {
        if self.reads_utf8() { quote(text) } else { quote_in_ascii(text) }
    }

    /// The SET that gives `name` its value here to a session with settings `others`; none: it has none here. Unlike
    /// `set_config` it takes no snapshot.
    pub fn set_to(&self, name: &str, local: bool, others: &Settings) -> Option<String> {
        let value = self.get(name)?;
        // `GUC_LIST_QUOTE`: what SET is given as one constant is one of the list.
        let values = match name {
            "search_path" | "temp_tablespaces" => list_of_identifiers(value),
            _ => vec![value.to_owned()],
        };
        // On its way from one to the other the encoding may be either.
        let quoted = |value: &String| if self.reads_utf8() { others.quoted(value) } else { quote_in_ascii(value) };
        let values: Vec<String> = values.iter().map(quoted).collect();
        let local = if local { "LOCAL " } else { "" };
        Some(format!("SET {local}{} TO {}", quote_setting_name(name), values.join(", ")))
    }

    /// The statement that gives these settings to a back end until its transaction or savepoint ends, whatever it has
    /// of `others` and of those that are known to reach into statements.
    pub fn for_a_moment(&self, others: &Settings) -> String {
        const KNOWN: [&str; 8] = [
            "search_path",
            "timezone",
            "datestyle",
            "intervalstyle",
            "lc_monetary",
            "array_nulls",
            "xmloption",
            "transform_null_equals",
        ];
        let names = KNOWN.into_iter().chain(others.names()).filter(|name| self.get(name).is_none());
        let defaults = names.map(|name| match name.is_ascii() {
            true => format!("SET LOCAL {} TO DEFAULT", quote_setting_name(name)),
            false => format!("SELECT pg_catalog.set_config({}, NULL, true)", others.quoted(name)),
        });
        let set = |(name, value): (&String, &String)| {
            format!("SELECT pg_catalog.set_config({}, {}, true)", others.quoted(name), others.quoted(value))
        };
        defaults.chain(self.values.iter().map(set)).collect::<Vec<_>>().join("; ")
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
            .map(|name| match name.is_ascii() {
                true => format!("RESET {}", quote_setting_name(name)),
                // The same, in any client encoding.
                false => format!("SELECT pg_catalog.set_config({}, NULL, false)", self.quoted(name)),
            })
            .collect();
        let changed: Vec<String> = target
            .values
            .iter()
            .filter(|(name, value)| self.values.get(*name) != Some(value))
            .map(|(name, value)| format!("pg_catalog.set_config({}, {}, false)", self.quoted(name), self.quoted(value)))
            .collect();
        if !changed.is_empty() {
            statements.push(format!("SELECT {}", changed.join(", ")));
        }
        Some(statements.join("; "))
    }
}

/// Makes a back end parse and plan anew what it has prepared and what its functions keep.
pub const FORGET_PLANS: &str = "DISCARD PLANS";

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

/// A client encoding's name as PostgreSQL compares it (`clean_encoding_name`): `'utf-8'` is UTF8.
fn encoding(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_uppercase()
}

/// Whether a client encoding is the one that every back end begins with.
pub fn is_utf8(name: &str) -> bool {
    matches!(encoding(name).as_str(), "UTF8" | "UNICODE")
}

/// Whether the router reads SQL as the server does when `name` is set to `value`.
pub fn is_readable_with(name: &str, value: &str) -> bool {
    match name {
        "standard_conforming_strings" => is_on(value),
        "client_encoding" => !UNSAFE_ENCODINGS.contains(&encoding(value).as_str()),
        _ => true,
    }
}

/// Whether PostgreSQL reads `value` as true (`parse_bool`).
pub fn is_on(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    value == "1"
        || value == "on"
        || [("true", 1), ("yes", 1)].iter().any(|(word, least)| value.len() >= *least && word.starts_with(&value))
}

/// An SQL identifier.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// `text` as an SQL string constant that means the same whatever `standard_conforming_strings` says.
pub fn quote(text: &str) -> String {
    let escaped = text.replace('\'', "''");
    if text.contains('\\') { format!(" E'{}'", escaped.replace('\\', "\\\\")) } else { format!("'{escaped}'") }
}

/// The names of a list, as PostgreSQL reads it (`SplitIdentifierString`); one at least.
fn list_of_identifiers(list: &str) -> Vec<String> {
    let (mut names, mut name, mut quoted) = (Vec::new(), String::new(), false);
    let mut letters = list.trim().chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => name.extend(letters.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => names.push(std::mem::take(&mut name)),
            letter if quoted => name.push(letter),
            letter if letter.is_ascii_whitespace() => {}
            letter => name.push(letter.to_ascii_lowercase()),
        }
    }
    names.push(name);
    names
}

/// The same whatever the client encoding.
fn quote_in_ascii(text: &str) -> String {
    if text.is_ascii() {
        return quote(text);
    }
    let escape = |letter: char| match letter {
        '\'' => "''".to_owned(),
        '\\' => "\\\\".to_owned(),
        letter if letter.is_ascii() => letter.to_string(),
        letter => format!("\\U{:08X}", u32::from(letter)),
    };
    format!(" E'{}'", text.chars().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_set_name_by_name_and_anything_else_as_one() {
        let settings = |name: &str, value: &str| {
            let mut settings = Arc::new(Settings::default());
            assert!(settings.set(name, value.to_owned()));
            settings
        };
        let latin1 = settings("client_encoding", "LATIN1");
        for (name, value, due) in [
            ("search_path", r#" "$user", Public ,"a,""b'c""#, r#"SET "search_path" TO '$user', 'public', 'a,"b''c'"#),
            ("search_path", "", r#"SET "search_path" TO ''"#),
            ("work_mem", "4MB", r#"SET "work_mem" TO '4MB'"#),
            ("datestyle", "ISO, DMY", r#"SET "datestyle" TO 'ISO, DMY'"#),
            ("app.tenant", "a,b", r#"SET "app"."tenant" TO 'a,b'"#),
            ("app.name", "gr\u{fc}n's \\", r#"SET "app"."name" TO  E'gr\U000000FCn''s \\'"#),
        ] {
            assert_eq!(settings(name, value).set_to(name, false, &latin1).as_deref(), Some(due));
        }
        let local = settings("a", "b").set_to("a", true, &Settings::default());
        assert_eq!(local.as_deref(), Some("SET LOCAL \"a\" TO 'b'"));
        assert_eq!(latin1.set_to("a", true, &latin1), None);
    }

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
        assert!(["utf8", "UTF-8", "'utf-8'", "Unicode"].iter().all(|name| is_utf8(name)) && !is_utf8("LATIN1"));
        assert!(!is_readable_with("standard_conforming_strings", "off"));
        assert!(is_on("TRUE") && is_on("t") && is_on("yes") && !is_on("off") && !is_on(""));
    }

    #[test]
    fn settings_reach_into_statements_unless_they_are_known_not_to() {
        for (name, reach) in [
            ("application_name", Reach::Nothing),
            ("enable_seqscan", Reach::Nothing),
            ("shop.tenant", Reach::Plans),
            ("bytea_output", Reach::Plans),
            ("timezone", Reach::Constants),
            ("search_path", Reach::Names),
            ("client_encoding", Reach::Names),
            ("never_heard_of", Reach::Names),
        ] {
            assert_eq!(Reach::of(name), reach, "{name}");
        }
        let mut one = Arc::new(Settings::default());
        assert!(one.set("timezone", "UTC".into()) && one.set("work_mem", "4MB".into()));
        let mut other = one.clone();
        other.reset("work_mem");
        assert_eq!(one.difference(&other), Reach::Nothing);
        assert_eq!(one.of_statements(), *other);
        other.reset("timezone");
        assert_eq!(one.difference(&other), Reach::Constants);
    }

    #[test]
    fn constants_are_seen_in_every_form() {
        for sql in ["SELECT 'a'", "SELECT $$a$$", "SELECT $x$a$x$, $1", "SELECT a = NULL", "SELECT E'a'"] {
            assert!(has_constants(sql.as_bytes()), "{sql}");
        }
        assert!(!has_constants(b"SELECT a FROM t WHERE b = $1 AND c = 12"));
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
