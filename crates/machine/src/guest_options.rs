//! What a server in a machine is configured with: the text of its files.

use onecopy_postgres::{AccessRule, ConnectionParameters, PostgresError, Settings, StandbyOptions};

use super::MachineConfiguration;
use super::configuration::GUEST_PORT;

/// Ours, and whom a standby follows; as `onecopy_postgres` names them.
const SETTINGS_FILE: &str = "onecopy.conf";
const STANDBY_FILE: &str = "onecopy.standby.conf";

/// Who may log in: whoever comes through a forwarded port (QEMU's network is 10.0.2.0/24), and the guest itself.
const ADDRESSES: [&str; 2] = ["10.0.2.0/24", "127.0.0.1/32"];

/// Of a machine on a bridge: whoever is in its network.
const ADDRESSES_ON_BRIDGE: [&str; 2] = ["samenet", "127.0.0.1/32"];

/// The end of `postgresql.conf`: of several values the last one counts.
pub(super) const INCLUDES: &str = "include 'onecopy.conf'\ninclude_if_exists 'onecopy.standby.conf'\n";

/// How this host is called in a guest; its port of the same number on 127.0.0.1 is meant. Source: QEMU documentation,
/// "User mode network".
pub const HOST_IN_GUEST: &str = "10.0.2.2";

/// What a server in a machine is made of.
#[derive(Debug, Clone)]
pub struct GuestServerOptions {
    /// How its superuser reaches it from this host.
    pub administration: ConnectionParameters,
    /// Its settings, without addresses, port and sockets.
    pub settings: Settings,
    /// Whom it follows, as it reaches that from its guest; none for a leader.
    pub primary: Option<StandbyOptions>,
    /// What its machine is made of: written before the machine starts.
    pub configuration: MachineConfiguration,
    /// Major version of the image's PostgreSQL.
    pub major_version: Option<u32>,
}

impl GuestServerOptions {
    /// What initdb is told, as on a host: see `onecopy_postgres`, initialize.rs.
    pub(super) fn initdb_options(&self) -> Vec<String> {
        let mut options = vec!["--data-checksums", "--encoding=UTF8", "--auth=scram-sha-256"];
        if self.major_version.is_some_and(|major| major >= 17) {
            options.extend(["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]);
        } else {
            options.push("--locale=C.UTF-8");
        }
        options.into_iter().map(str::to_owned).collect()
    }

    /// The files that are written into the data directory before each start, by their names.
    ///
    /// # Errors
    /// [`PostgresError::InvalidSetting`].
    pub(super) fn files(&self) -> Result<Vec<(&'static str, String)>, PostgresError> {
        let mut settings = self.settings.clone();
        settings.set("listen_addresses", "*").set("port", GUEST_PORT);
        settings.set("logging_collector", "off").set("log_destination", "stderr");
        let mut files = vec![(SETTINGS_FILE, settings.to_configuration_file()?), ("pg_hba.conf", self.access_rules()?)];
        if let Some(standby) = self.standby_file()? {
            files.push(standby);
            files.push(("standby.signal", String::new()));
        }
        Ok(files)
    }

    /// The text of `pg_hba.conf`.
    ///
    /// # Errors
    /// [`PostgresError::InvalidSetting`].
    pub(super) fn access_rules(&self) -> Result<String, PostgresError> {
        let is_bridged = self.configuration.network.is_some();
        AccessRule::to_file(&AccessRule::by_password(if is_bridged { &ADDRESSES_ON_BRIDGE } else { &ADDRESSES }))
    }

    /// The file, by its name, that tells a standby whom it follows; none for a leader. A server that runs takes it over
    /// when it reads its configuration again.
    ///
    /// # Errors
    /// [`PostgresError::InvalidSetting`].
    pub(super) fn standby_file(&self) -> Result<Option<(&'static str, String)>, PostgresError> {
        let Some(standby) = &self.primary else { return Ok(None) };
        let mut settings = Settings::new();
        settings
            .set("primary_conninfo", standby.primary.to_dsn())
            .set("primary_slot_name", standby.slot.as_deref().unwrap_or(""));
        Ok(Some((STANDBY_FILE, settings.to_configuration_file()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(primary: Option<StandbyOptions>) -> GuestServerOptions {
        GuestServerOptions {
            administration: "host=127.0.0.1 port=20000 user=postgres password=x".parse().unwrap(),
            settings: Settings::new(),
            primary,
            configuration: MachineConfiguration::new("/image".into()),
            major_version: Some(17),
        }
    }

    #[test]
    fn a_follower_is_told_whom_to_follow_and_a_leader_is_not() {
        let names = |options: &GuestServerOptions| options.files().unwrap().into_iter().map(|(name, _)| name).collect();
        let leader: Vec<_> = names(&options(None));
        assert_eq!(leader, ["onecopy.conf", "pg_hba.conf"]);
        let primary = format!("host={HOST_IN_GUEST} port=20001 user=replica password=it\\'s").parse().unwrap();
        let follower = options(Some(StandbyOptions { primary, slot: Some("follower_1".to_owned()) }));
        let names: Vec<_> = names(&follower);
        assert_eq!(names, ["onecopy.conf", "pg_hba.conf", "onecopy.standby.conf", "standby.signal"]);
        let files = follower.files().unwrap();
        assert!(files[0].1.contains("listen_addresses = '*'\n") && files[0].1.contains("port = '5432'\n"));
        assert!(files[2].1.contains("host=''10.0.2.2'' port=''20001''"), "{}", files[2].1);
        assert!(files[2].1.contains("primary_slot_name = 'follower_1'"));
        assert!(INCLUDES.contains(SETTINGS_FILE) && INCLUDES.contains(STANDBY_FILE));
    }

    #[test]
    fn only_who_knows_a_password_is_let_in() {
        let mut options = options(None);
        let rules = options.access_rules().unwrap();
        let methods: Vec<_> = rules.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(!methods.is_empty() && methods.iter().all(|line| line.ends_with("scram-sha-256")), "{rules}");
        let network = "bridge = 'br0'\naddress = '192.0.2.10/24'";
        options.configuration.network = Some(toml::from_str(network).unwrap());
        let rules = options.access_rules().unwrap();
        assert!(rules.contains("samenet") && !rules.contains("10.0.2.0"), "{rules}");
    }

    #[test]
    fn locales_are_those_that_a_version_knows() {
        let builtin = |major_version| {
            let options = GuestServerOptions { major_version, ..options(None) };
            options.initdb_options().contains(&"--locale-provider=builtin".to_owned())
        };
        assert_eq!([Some(17), Some(15), None].map(builtin), [true, false, false]);
    }
}
