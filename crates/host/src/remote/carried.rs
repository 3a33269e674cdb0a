//! Settings and access rules that a clone on another host has of its source's. The ordering side sends these, the other
//! one takes no others: a setting may name a command, a library, a file or an address, and those are the clone's own
//! host's to say.

use std::fmt::Display;

use onecopy_clone::network::protocol::ProtocolError;
use onecopy_postgres::{AccessRule, RuleKind, Settings};

use crate::memory::EXTENSION;

/// The most access rules.
const RULES_MAX: usize = 1000;
/// The most of anything that PostgreSQL counts by back ends (`MAX_BACKENDS`).
const BACKENDS_MAX: u32 = 262_143;
/// The most that PostgreSQL's settings of a size take: `INT_MAX` KiB.
const SIZE_KIB_MAX: u64 = (1 << 31) - 1;
/// A cost is below this.
const COST_MAX: f64 = 1e6;
/// The longest name.
const NAME_LETTERS_MAX: usize = 63;
/// A server loads these libraries at its start.
const PRELOADED: &str = "shared_preload_libraries";

/// What a value may be. It is understood, and written anew.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Count {
        least: u32,
        most: u32,
    },
    Flag,
    /// An amount of memory with its unit.
    Size,
    Cost,
    OneOf(&'static [&'static str]),
    /// Of letters, digits, and these.
    Name(&'static str),
}

/// Counts of a primary that its standby must not be below.
const fn count(least: u32) -> Kind {
    Kind::Count { least, most: BACKENDS_MAX }
}

/// The settings that are carried. The first ones a standby must have as its primary has them; then come memory and
/// plans, which each session could set for itself, and how values are written.
const CARRIED: [(&str, Kind); 25] = [
    ("max_connections", count(1)),
    ("max_worker_processes", count(0)),
    ("max_wal_senders", count(0)),
    ("max_prepared_transactions", count(0)),
    ("max_locks_per_transaction", count(10)),
    ("max_replication_slots", count(0)),
    ("wal_level", Kind::OneOf(&["replica", "logical"])),
    ("wal_log_hints", Kind::Flag),
    ("track_commit_timestamp", Kind::Flag),
    ("shared_buffers", Kind::Size),
    ("work_mem", Kind::Size),
    ("maintenance_work_mem", Kind::Size),
    ("effective_cache_size", Kind::Size),
    ("max_parallel_workers", count(0)),
    ("max_parallel_workers_per_gather", count(0)),
    ("default_statistics_target", Kind::Count { least: 1, most: 10_000 }),
    ("random_page_cost", Kind::Cost),
    ("seq_page_cost", Kind::Cost),
    ("jit", Kind::Flag),
    ("TimeZone", Kind::Name("_+-/")),
    ("DateStyle", Kind::Name(", ")),
    ("IntervalStyle", Kind::OneOf(&["sql_standard", "postgres", "postgres_verbose", "iso_8601"])),
    ("bytea_output", Kind::OneOf(&["hex", "escape"])),
    ("default_text_search_config", Kind::Name("_.")),
    // Our own library, and no other.
    (PRELOADED, Kind::OneOf(&[EXTENSION])),
];

/// Of a source's settings those that a clone on another host has, and the names of the others.
pub fn carried_settings(settings: &Settings) -> (Settings, Vec<String>) {
    let (mut carried, mut left) = (Settings::new(), Vec::new());
    for (name, value) in settings.iter() {
        let is_ours = |library: &str| library.trim().trim_matches('"') == EXTENSION;
        // Of the libraries those are left out that a clone's own host has to name.
        let value = if name == PRELOADED && value.split(',').any(is_ours) { EXTENSION } else { value };
        match understood(name, value, SIZE_KIB_MAX) {
            Some(value) => {
                carried.set(name, value);
            }
            None => left.push(name.to_owned()),
        }
    }
    (carried, left)
}

/// Takes settings that another host sends; no memory is set to more than `size_kib_max`, which is for this host to
/// bear.
///
/// # Errors
/// Names the first one that is not carried, or whose value is none.
pub(super) fn take_settings(settings: &Settings, size_kib_max: u64) -> Result<Settings, ProtocolError> {
    let mut taken = Settings::new();
    for (name, value) in settings.iter() {
        let refused = || {
            let reason = "it is none that a clone has of its source, or not with this value";
            ProtocolError::not_taken("setting", format!("{name} = {value}"), reason)
        };
        taken.set(name, understood(name, value, size_kib_max).ok_or_else(refused)?);
    }
    Ok(taken)
}

/// The value as it is written; none when the setting is not carried, or this is no value of it.
fn understood(name: &str, value: &str, size_kib_max: u64) -> Option<String> {
    let (_, kind) = CARRIED.iter().find(|(carried, _)| *carried == name)?;
    let value = value.trim();
    match kind {
        Kind::Count { least, most } => {
            value.parse::<u32>().ok().filter(|count| (least..=most).contains(&count)).map(as_text)
        }
        Kind::Flag => match value {
            "on" | "true" | "yes" | "1" => Some("on".to_owned()),
            "off" | "false" | "no" | "0" => Some("off".to_owned()),
            _ => None,
        },
        Kind::Size => size_kib(value).map(|kib| format!("{}kB", kib.min(size_kib_max))),
        Kind::Cost => value.parse::<f64>().ok().filter(|cost| (0.0..COST_MAX).contains(cost)).map(as_text),
        Kind::OneOf(values) => values.iter().find(|known| **known == value).map(as_text),
        Kind::Name(others) => {
            let is_letter = |letter: char| letter.is_ascii_alphanumeric() || others.contains(letter);
            let is_name = value.starts_with(|first: char| first.is_ascii_alphabetic());
            (is_name && value.len() <= NAME_LETTERS_MAX && value.chars().all(is_letter)).then(|| value.to_owned())
        }
    }
}

fn as_text(value: impl Display) -> String {
    value.to_string()
}

/// An amount as PostgreSQL shows it.
fn size_kib(value: &str) -> Option<u64> {
    let digits = value.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = value.split_at(digits);
    let unit_kib = match unit.trim() {
        "kB" => 1,
        "MB" => 1 << 10,
        "GB" => 1 << 20,
        "TB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit_kib).filter(|kib| (1..=SIZE_KIB_MAX).contains(kib))
}

/// Of a source's access rules those that a clone on another host has. Local ones are its own host's. One whose method
/// is not by password means there what nobody here knows (another map of names, another directory of people): it
/// becomes a refusal, so that none of the rules behind it lets in whom it kept out.
///
/// # Errors
/// A rule whose database, role or address cannot be written anew.
pub fn carried_rules(rules: &[AccessRule]) -> Result<Vec<AccessRule>, ProtocolError> {
    let hosts = rules.iter().filter(|rule| rule.kind == RuleKind::Host).cloned();
    let carried = hosts.map(|rule| match is_carried(&rule) {
        true => rule,
        false => AccessRule { method: "reject".to_owned(), ..rule },
    });
    take_rules(carried.collect())
}

/// Takes access rules that another host sends.
///
/// # Errors
/// Names the first one that is not carried.
pub(super) fn take_rules(rules: Vec<AccessRule>) -> Result<Vec<AccessRule>, ProtocolError> {
    if rules.len() > RULES_MAX {
        return Err(ProtocolError::not_taken("access rules", rules.len(), format!("at most {RULES_MAX} are")));
    }
    match rules.iter().find(|rule| !is_carried(rule)) {
        None => Ok(rules),
        Some(AccessRule { kind, database, user, address, method }) => {
            let kind = format!("{kind:?}").to_lowercase();
            let rule = format!("{kind} {database} {user} {address} {method}");
            Err(ProtocolError::not_taken("access rule", rule, "a clone has none but by password, for hosts"))
        }
    }
}

fn is_carried(rule: &AccessRule) -> bool {
    let is_name = |name: &str| !name.is_empty() && !name.chars().any(|letter| letter.is_control() || letter == '"');
    let is_address_letter = |letter: char| letter.is_ascii_alphanumeric() || "-.:/ _".contains(letter);
    let words = rule.address.split(' ').count();
    rule.kind == RuleKind::Host
        && ["scram-sha-256", "md5", "reject"].contains(&rule.method.as_str())
        && is_name(&rule.database)
        && is_name(&rule.user)
        && !rule.address.is_empty()
        && rule.address.chars().all(is_address_letter)
        // An address and its mask: a third word would be a method.
        && (words == 1 || (words == 2 && rule.address.split(' ').all(|word| word.parse::<std::net::IpAddr>().is_ok())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_on_another_host_has_what_means_the_same_there() {
        let mut settings = Settings::new();
        settings.set("max_connections", "100").set("shared_buffers", "16GB").set("TimeZone", "Europe/Berlin");
        settings.set("DateStyle", "ISO, DMY").set("random_page_cost", "1.1").set("jit", "off").set("work_mem", "64kB");
        settings.set(PRELOADED, "pg_stat_statements, onecopy").set("log_line_prefix", "%m").set("fsync", "off");
        let (carried, left) = carried_settings(&settings);
        assert_eq!(left, ["fsync", "log_line_prefix"]);
        assert_eq!((carried.get("shared_buffers"), carried.get(PRELOADED)), (Some("16777216kB"), Some("onecopy")));
        assert_eq!(carried.get("random_page_cost"), Some("1.1"));
        assert_eq!(take_settings(&carried, SIZE_KIB_MAX).unwrap(), carried);
        let small = take_settings(&carried, 1 << 20).unwrap();
        assert_eq!((small.get("shared_buffers"), small.get("work_mem")), (Some("1048576kB"), Some("64kB")));
        assert_eq!(carried_settings(Settings::new().set(PRELOADED, "auto_explain")).1, [PRELOADED]);
    }

    #[test]
    fn a_rule_that_means_nothing_there_lets_nobody_in() {
        let rule = |kind, user: &str, address: &str, method: &str| AccessRule {
            kind,
            database: "all".to_owned(),
            user: user.to_owned(),
            address: address.to_owned(),
            method: method.to_owned(),
        };
        let rules = [
            rule(RuleKind::Local, "all", "", "peer"),
            rule(RuleKind::Host, "app", "10.0.0.0 255.0.0.0", "md5"),
            rule(RuleKind::Host, "boss", "10.0.0.0/8", "ldap ldapserver=x"),
            rule(RuleKind::Host, "all", "samenet", "trust"),
            rule(RuleKind::Host, "all", "::/0", "scram-sha-256"),
        ];
        let carried = carried_rules(&rules).unwrap();
        let methods: Vec<&str> = carried.iter().map(|rule| rule.method.as_str()).collect();
        assert_eq!(methods, ["md5", "reject", "reject", "scram-sha-256"]);
        assert_eq!(take_rules(carried.clone()).unwrap(), carried);
        let unknown = [rule(RuleKind::Host, "a\"b", "::/0", "trust")];
        assert!(carried_rules(&unknown).unwrap_err().to_string().contains("access rule"), "it is not left out");
    }
}
