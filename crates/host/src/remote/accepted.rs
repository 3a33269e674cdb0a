//! What becomes of another host's order before anything is done about it: what it may decide is checked, all else is
//! decided here.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::{RemoteHost, WAL_KEEP_BYTES_MAX};
use onecopy_clone::plan::{Plan, SourceServer, is_slot_name};
use onecopy_postgres::{AccessRule, ConnectionParameters, ServiceUser, Settings};

use super::allowed::{Allowed, TABLESPACES_SUFFIX};
use super::carried;
use super::order::CloneOrder;

/// A clone's buffers have at most this part of the host's memory, however large its source's are.
const MEMORY_PART: u64 = 4;

/// Ports below are for root.
const PORT_MIN: u16 = 1024;

/// Who orders, as this host sees him.
#[derive(Debug)]
pub(super) struct Orderer {
    /// From where.
    pub peer: SocketAddr,
    /// The address of this host that he has come to.
    pub here: IpAddr,
    /// What he has shown, as DER.
    pub certificate: Vec<u8>,
}

/// A clone that this host makes.
#[derive(Debug)]
pub(super) struct Accepted {
    pub plan: Plan,
    /// The host that ordered, and no other.
    pub origin: RemoteHost,
    /// The source's server on that host.
    pub primary: ConnectionParameters,
    pub major_version: u32,
    /// This host's account.
    pub user: ServiceUser,
    /// Where the order came in.
    pub listen_address: String,
    pub port: u16,
    pub access_rules: Vec<AccessRule>,
    pub settings: Settings,
}

impl Accepted {
    /// What is made of an order.
    ///
    /// # Errors
    /// The field that is not taken, and why.
    pub fn of(
        order: serde_json::Value,
        orderer: &Orderer,
        allowed: &Allowed,
        keys_directory: &Path,
    ) -> Result<Accepted, String> {
        let form =
            |error: serde_json::Error| ProtocolError::not_taken("order", error.to_string(), "it has another form");
        let order: CloneOrder = serde_json::from_value(order).map_err(form).map_err(words)?;
        // Where links lead is settled once: what is made is at the place that was allowed.
        let target = allowed.target(&order.target)?;
        let tablespaces = beside(&target, TABLESPACES_SUFFIX);
        check(&order).map_err(words)?;
        let origin_host = host_of(&order.origin).map_err(words)?;
        let settings = carried::take_settings(&order.settings, memory_kib()? / MEMORY_PART).map_err(words)?;
        let access_rules = carried::take_rules(order.access_rules).map_err(words)?;
        let user = ServiceUser::resolve(allowed.account.as_deref()).map_err(|error| error.to_string())?;
        let primary = ConnectionParameters {
            host: origin_host,
            port: order.origin_port,
            ..order.connection.with_application_name(&order.slot)
        };
        let plan = Plan {
            source: SourceServer {
                connection: order.connection,
                data_directory: order.source,
                leader: order.leader,
                replication: None,
            },
            target,
            tablespaces,
            user_name: user.name().to_owned(),
            slot: order.slot,
            recovery: order.recovery,
            fill: order.fill,
            wal_keep_bytes_max: WAL_KEEP_BYTES_MAX,
        };
        let origin = RemoteHost {
            address: order.origin,
            keys: keys_directory.to_owned(),
            certificate: Some(orderer.certificate.clone()),
        };
        Ok(Accepted {
            plan,
            origin,
            primary,
            major_version: order.major_version,
            user,
            listen_address: orderer.here.to_string(),
            port: order.port,
            access_rules,
            settings,
        })
    }
}

/// How much memory this host has.
fn memory_kib() -> Result<u64, String> {
    const PATH: &str = "/proc/meminfo";
    let text = std::fs::read_to_string(PATH).map_err(|error| format!("cannot read {PATH}: {error}"))?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    total.ok_or_else(|| format!("{PATH} does not tell how much memory this host has"))
}

fn check(order: &CloneOrder) -> Result<(), ProtocolError> {
    if !is_slot_name(&order.slot) {
        return Err(ProtocolError::not_taken(
            "slot",
            &order.slot,
            "a slot's name has a-z, 0-9 and _, at most 63 of them",
        ));
    }
    for (field, port) in [("port", order.port), ("origin_port", order.origin_port)] {
        if port < PORT_MIN {
            return Err(ProtocolError::not_taken(field, port, format!("ports below {PORT_MIN} are no PostgreSQL's")));
        }
    }
    let connection = &order.connection;
    // The password is quoted wherever it is written; of the others none has a reason to need that.
    for (field, value) in [("user", &connection.user), ("database", &connection.database)] {
        if value.is_empty() || value.chars().any(|letter| letter.is_control() || "'\"\\".contains(letter)) {
            return Err(ProtocolError::not_taken(field, value, "it has a quote or a letter that cannot be written"));
        }
    }
    // Without one libpq looks for one in the account's `.pgpass`, and would send it to whom the order names.
    match connection.password.as_deref() {
        None | Some("") => {
            let reason = "the clone's server follows the source by a password of its own: give that of the source's \
                role (PGPASSWORD)";
            Err(ProtocolError::not_taken("password", "", reason))
        }
        Some(password) if password.contains('\0') => {
            Err(ProtocolError::not_taken("password", "of the source's role", "it has a zero byte"))
        }
        Some(_) => Ok(()),
    }
}

/// The host in `HOST:PORT`, without brackets: one name or address, nothing that libpq takes for a socket, a list or an
/// option.
fn host_of(origin: &str) -> Result<String, ProtocolError> {
    let refused = || ProtocolError::not_taken("origin", origin, "it is not HOST:PORT");
    let (host, port) = origin.rsplit_once(':').ok_or_else(refused)?;
    port.parse::<u16>().map_err(|_| refused())?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_name = host.chars().all(|letter| letter.is_ascii_alphanumeric() || "-.".contains(letter));
    if host.parse::<IpAddr>().is_ok() || (is_name && !host.is_empty()) { Ok(host.to_owned()) } else { Err(refused()) }
}

/// A path beside another one, with something added to its name.
pub(super) fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn words(error: ProtocolError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use onecopy_clone::plan::{FillOptions, Recovery};
    use onecopy_postgres::RuleKind;
    use serde_json::{Value, json};

    use super::*;

    struct Harness {
        directory: tempfile::TempDir,
        allowed: Allowed,
    }

    impl Harness {
        fn new() -> Harness {
            let directory = tempfile::tempdir().unwrap();
            let targets = vec![directory.path().to_owned()];
            Harness { directory, allowed: Allowed { sources: Vec::new(), targets, account: None } }
        }

        /// An order that is taken.
        fn order(&self) -> CloneOrder {
            let connection: ConnectionParameters =
                "postgresql://postgres:it%27s%0Aall@10.0.0.1:5432/postgres".parse().unwrap();
            let mut settings = Settings::new();
            settings.set("max_connections", 200).set("wal_level", "logical").set("work_mem", "4096kB");
            let rule = AccessRule {
                kind: RuleKind::Host,
                database: "all".to_owned(),
                user: "all".to_owned(),
                address: "10.0.0.0/8".to_owned(),
                method: "scram-sha-256".to_owned(),
            };
            CloneOrder {
                source: "/var/lib/postgresql/15/main".into(),
                connection,
                leader: None,
                target: self.directory.path().join("shop"),
                slot: "onecopy_shop".to_owned(),
                recovery: Recovery::Auto,
                fill: FillOptions::default(),
                origin: "db1.example.org:6440".to_owned(),
                origin_port: 5432,
                major_version: 15,
                port: 5433,
                access_rules: vec![rule],
                settings,
            }
        }

        fn take(&self, order: Value) -> Result<Accepted, String> {
            let orderer = Orderer {
                peer: "10.0.0.1:50000".parse().unwrap(),
                here: "10.0.0.2".parse().unwrap(),
                certificate: vec![1, 2, 3],
            };
            Accepted::of(order, &orderer, &self.allowed, Path::new("/keys"))
        }
    }

    /// Spec: C3
    #[test]
    fn k22_account_places_addresses_and_whom_it_follows_are_this_hosts_to_say() {
        let harness = Harness::new();
        let order = harness.order();
        let accepted = harness.take(serde_json::to_value(&order).unwrap()).unwrap();
        let target = harness.directory.path().canonicalize().unwrap().join("shop");
        assert_eq!(accepted.plan.target, target);
        assert_eq!(accepted.plan.tablespaces, beside(&target, ".tablespaces"));
        let mut slashed = harness.order();
        slashed.target = harness.directory.path().join("shop/");
        let slashed = harness.take(serde_json::to_value(&slashed).unwrap()).unwrap();
        // Compared as text: two paths are the same with and without a slash at the end.
        assert_eq!(slashed.plan.target.as_os_str(), target.as_os_str());
        assert_eq!(slashed.plan.tablespaces.as_os_str(), beside(&target, ".tablespaces").as_os_str());
        assert_eq!(accepted.plan.user_name, ServiceUser::resolve(None).unwrap().name());
        assert_ne!(accepted.user.user_id(), 0);
        assert_eq!(accepted.listen_address, "10.0.0.2");
        assert_eq!(accepted.origin.certificate, Some(vec![1, 2, 3]));
        assert_eq!(
            accepted.primary.to_dsn(),
            "host='db1.example.org' port='5432' user='postgres' password='it\\'s\nall' dbname='postgres' \
             application_name='onecopy_shop'"
        );
        let written =
            Settings::new().set("primary_conninfo", accepted.primary.to_dsn()).to_configuration_file().unwrap();
        assert_eq!(written.lines().count(), 2, "{written}");
        assert_eq!((accepted.settings, accepted.access_rules), (order.settings, order.access_rules));
    }

    /// Spec: C3
    #[test]
    fn k22_a_lying_order_is_refused_by_field_and_value() {
        let harness = Harness::new();
        let order = serde_json::to_value(harness.order()).unwrap();
        let mut lies: Vec<(&str, Value, &str)> = vec![
            // What is not the other host's to say has no field.
            ("/user_name", json!("root"), "user_name"),
            ("/user_name", json!("daemon"), "user_name"),
            ("/tablespaces", json!("/etc"), "tablespaces"),
            ("/listen_address", json!("*"), "listen_address"),
            ("/primary", json!({"host": "/run/postgresql"}), "primary"),
            ("/target", json!("/etc/x"), "\"/etc/x\""),
            ("/target", json!("relative"), "\"relative\""),
            ("/slot", json!("x'; DROP TABLE y; --"), "slot \"x'; DROP TABLE y; --\""),
            ("/slot", json!("x\nrestore_command = 'id'"), "slot \"x\\nrestore_command = 'id'\""),
            ("/slot", json!(""), "slot \"\""),
            ("/port", json!(22), "port 22"),
            ("/port", json!(70_000), "70000"),
            ("/port", json!(-1), "-1"),
            ("/origin_port", json!(0), "origin_port 0"),
            ("/connection/user", json!("x' passfile='/etc/shadow"), "user \"x' passfile='/etc/shadow\""),
            ("/connection/database", json!("x\nssl_passphrase_command = 'id'"), "database \"x\\nssl"),
            ("/connection/password", json!("x\0"), "password"),
            ("/connection/password", json!(""), "password \"\" is not taken"),
            ("/connection/password", json!(null), "password \"\" is not taken"),
            ("/access_rules/0/method", json!("trust"), "access rule \"host all all 10.0.0.0/8 trust\""),
            ("/access_rules/0/method", json!("ldap ldapserver=x"), "ldap"),
            ("/access_rules/0/method", json!("scram-sha-256\nhost all all all trust"), "scram-sha-256\\nhost"),
            ("/access_rules/0/address", json!("all trust\nhost all all all"), "all trust\\nhost"),
            ("/access_rules/0/address", json!(""), "access rule"),
            ("/access_rules/0/user", json!("x\" trust"), "access rule"),
            ("/access_rules/0/kind", json!("Local"), "access rule"),
        ];
        for origin in ["/run/postgresql:6440", "a,b:6440", "db1", "db1:x", ":6440", "x' passfile='/etc/x:6440", "a b:1"]
        {
            lies.push(("/origin", json!(origin), "origin"));
        }
        for (name, value) in [
            ("archive_command", "cp /etc/shadow /tmp"),
            ("restore_command", "id"),
            ("archive_cleanup_command", "id"),
            ("recovery_end_command", "id"),
            ("archive_library", "x"),
            ("ssl_passphrase_command", "id"),
            ("shared_preload_libraries", "/tmp/x.so"),
            ("shared_preload_libraries", "onecopy, /tmp/x.so"),
            ("session_preload_libraries", "/tmp/x"),
            ("local_preload_libraries", "x"),
            ("dynamic_library_path", "/tmp"),
            ("jit_provider", "/tmp/x"),
            ("primary_conninfo", "host=x\n' passfile=/etc/x"),
            ("primary_slot_name", "x"),
            ("data_directory", "/etc"),
            ("config_file", "/etc/x"),
            ("hba_file", "/tmp/x"),
            ("external_pid_file", "/etc/x"),
            ("log_directory", "/etc"),
            ("unix_socket_directories", "/etc"),
            ("listen_addresses", "*"),
            ("include", "/etc/x"),
            ("fsync", "off"),
            ("wal_level", "minimal"),
            ("wal_level", "replica\narchive_command = 'id'"),
            ("max_connections", "-1"),
            ("max_connections", "99999999999999999999"),
            ("max_connections", "100'\nrestore_command='id"),
            ("work_mem", "4MB'"),
            ("work_mem", "999999999999GB"),
            ("random_page_cost", "NaN"),
            ("TimeZone", "../../etc/x"),
            ("TimeZone", "/etc/x"),
            ("jit", "maybe"),
        ] {
            let text = format!("setting \"{}", &format!("{:?}", format!("{name} = {value}"))[1..]);
            lies.push(("/settings", json!({name: value}), Box::leak(text.into_boxed_str())));
        }
        let mut wrong = Vec::new();
        for (pointer, lie, named) in &lies {
            let mut order = order.clone();
            match order.pointer_mut(pointer) {
                Some(field) => *field = lie.clone(),
                None => order[&pointer[1..]] = lie.clone(),
            }
            match harness.take(order) {
                Err(refusal) if refusal.contains(named) && !refusal.contains('\n') && refusal.len() < 1000 => {}
                outcome => wrong.push(format!("{pointer} {lie}: {outcome:?}")),
            }
        }
        assert!(wrong.is_empty(), "{} lies\n{}", wrong.len(), wrong.join("\n"));
        assert_eq!(std::fs::read_dir(harness.directory.path()).unwrap().count(), 0);
        let many = vec![serde_json::to_value(&harness.order().access_rules[0]).unwrap(); 2000];
        let mut order = order;
        order["access_rules"] = json!(many);
        let refusal = harness.take(order).unwrap_err();
        assert!(refusal.contains("access rules 2000"), "{refusal}");
    }
}
