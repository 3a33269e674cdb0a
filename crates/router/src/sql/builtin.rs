//! PostgreSQL's own functions that need more than their volatility to be classified.
//!
//! The catalog's volatility says whether a function may write. It does not say whether the answer is about the data,
//! which is the same on every server at one epoch, or about the server that happens to answer.

use super::statement::PinReason;

/// Stable functions that speak of the server, the session or the transaction, not of the data. They run on the leader,
/// so that a client always hears of one server.
pub(super) fn is_server_specific(name: &str) -> bool {
    const NAMES: &[&str] = &[
        // The transaction and its snapshot.
        "txid_current",
        "txid_current_if_assigned",
        "txid_current_snapshot",
        "pg_current_xact_id",
        "pg_current_xact_id_if_assigned",
        "pg_current_snapshot",
        // The session and its back end.
        "pg_backend_pid",
        "current_setting",
        "pg_show_all_settings",
        "pg_settings_get_flags",
        "pg_listening_channels",
        "pg_cursor",
        "pg_prepared_statement",
        "pg_safe_snapshot_blocking_pids",
        // The server.
        "pg_is_in_recovery",
        "pg_postmaster_start_time",
        "pg_conf_load_time",
        "pg_lock_status",
        "pg_prepared_xact",
        "pg_show_all_file_settings",
        "pg_hba_file_rules",
        "pg_ident_file_mappings",
        "pg_config",
        "pg_jit_available",
        "pg_get_replication_slots",
        "pg_show_replication_origin_status",
        "pg_available_extensions",
        "pg_available_extension_versions",
        "pg_get_publication_tables",
        "pg_tablespace_location",
        "pg_relation_filepath",
        "pg_relation_filenode",
        "pg_last_committed_xact",
        // They read whole tables that no parse tree names.
        "table_to_xml",
        "table_to_xml_and_xmlschema",
        "schema_to_xml",
        "schema_to_xml_and_xmlschema",
        "database_to_xml",
        "database_to_xml_and_xmlschema",
    ];
    const PREFIXES: &[&str] = &["inet_client_", "inet_server_", "pg_stat_", "pg_ls_", "pg_control_", "pg_wal_"];
    NAMES.contains(&name)
        || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        // File sizes (pg_relation_size and its kin) differ from server to server.
        || (name.starts_with("pg_") && name.ends_with("_size") && name != "pg_column_size")
}

/// Functions whose result is the time of the transaction or statement.
pub(super) fn is_time_dependent(name: &str) -> bool {
    matches!(name, "now" | "transaction_timestamp" | "statement_timestamp" | "age")
}

/// Volatile functions that write nothing, neither data nor sequences.
pub(super) fn volatile_without_writing(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "random",
        "random_normal",
        "gen_random_uuid",
        "uuidv4",
        "uuidv7",
        "clock_timestamp",
        "timeofday",
        "currval",
        "lastval",
        "pg_sleep",
        "pg_sleep_for",
        "pg_sleep_until",
        "setseed",
        "set_config",
        "pg_cancel_backend",
        "pg_terminate_backend",
        "pg_reload_conf",
        "pg_blocking_pids",
        "pg_trigger_depth",
        "pg_export_snapshot",
        "pg_current_logfile",
        "pg_notification_queue_usage",
        "txid_status",
        "pg_xact_status",
        "pg_get_backend_memory_contexts",
        "pg_get_shmem_allocations",
        "pg_timezone_names",
    ];
    const PREFIXES: &[&str] = &["pg_advisory_", "pg_try_advisory_", "pg_stat_get_", "pg_last_", "pg_current_wal_"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || is_server_specific(name)
}

/// Volatile functions that act on the server that runs them, or on what its session has there: a transaction that reads
/// an epoch on another server would lock, tell or signal nobody.
pub(super) fn acts_on_server(name: &str) -> bool {
    const NAMES: &[&str] =
        &["pg_notify", "pg_cancel_backend", "pg_terminate_backend", "pg_export_snapshot", "currval", "lastval"];
    NAMES.contains(&name) || name.starts_with("pg_advisory_") || name.starts_with("pg_try_advisory_")
}

/// Session state that a function of this name leaves behind. `set_config` is classified by its third argument
/// elsewhere.
pub(super) fn leaves_behind(name: &str) -> Option<PinReason> {
    if name.starts_with("pg_advisory_") || name.starts_with("pg_try_advisory_") {
        // The transaction-level ones contain `xact`; unlocking presumes a lock that pinned the session before.
        let session = !name.contains("xact") && !name.starts_with("pg_advisory_unlock");
        return session.then_some(PinReason::AdvisoryLock);
    }
    match name {
        // pg_trgm's set_limit is a setting by another name.
        "setseed" | "set_limit" | "pg_replication_origin_session_setup" => Some(PinReason::HiddenSetting),
        "lo_open" | "dblink_connect" | "dblink_connect_u" | "dblink_open" | "dblink_send_query" => {
            Some(PinReason::Handle)
        }
        // A backup ends with its session, and so do temporary slots.
        "pg_backup_start"
        | "pg_start_backup"
        | "pg_create_physical_replication_slot"
        | "pg_create_logical_replication_slot" => Some(PinReason::Handle),
        _ if runs_text(name) => Some(PinReason::UserCode),
        _ => None,
    }
}

/// Functions that run SQL which they are given as text, or read what no parse tree names: PostgreSQL's own, and those
/// of tablefunc and xml2.
pub(super) fn runs_text(name: &str) -> bool {
    matches!(
        name,
        "query_to_xml"
            | "query_to_xmlschema"
            | "query_to_xml_and_xmlschema"
            | "table_to_xml"
            | "table_to_xml_and_xmlschema"
            | "schema_to_xml"
            | "schema_to_xml_and_xmlschema"
            | "database_to_xml"
            | "database_to_xml_and_xmlschema"
            | "ts_stat"
            | "ts_rewrite"
            | "crosstab"
            | "crosstab2"
            | "crosstab3"
            | "crosstab4"
            | "crosstab_hash"
            | "connectby"
            | "xpath_table"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_functions_by_name() {
        for name in ["pg_backend_pid", "inet_server_addr", "pg_stat_get_activity", "pg_database_size", "txid_current"] {
            assert!(is_server_specific(name), "{name}");
        }
        for name in ["version", "count", "pg_column_size", "current_database", "txid_snapshot_xmin", "pg_get_viewdef"] {
            assert!(!is_server_specific(name), "{name}");
        }
    }

    #[test]
    fn advisory_locks_pin_unless_they_end_with_the_transaction() {
        for (name, pins) in [
            ("pg_advisory_lock", true),
            ("pg_advisory_lock_shared", true),
            ("pg_try_advisory_lock", true),
            ("pg_try_advisory_lock_shared", true),
            ("pg_advisory_xact_lock", false),
            ("pg_try_advisory_xact_lock_shared", false),
            ("pg_advisory_unlock", false),
            ("pg_advisory_unlock_all", false),
        ] {
            assert_eq!(leaves_behind(name), pins.then_some(PinReason::AdvisoryLock), "{name}");
        }
    }
}
