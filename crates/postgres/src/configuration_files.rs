//! The configuration files in a data directory: ours, and how PostgreSQL's own includes them.

use std::path::Path;

use crate::beneath::Directory;
use crate::{AccessRule, PostgresError, ServerOptions, Settings, StandbyOptions};

const POSTGRESQL_CONF: &str = "postgresql.conf";
const SETTINGS_FILE: &str = "onecopy.conf";
/// Apart from the settings: whom a standby follows lasts when the server is opened again with other settings.
const STANDBY_FILE: &str = "onecopy.standby.conf";

/// Writes all of them. What a person wrote into `postgresql.conf` stays and is overridden; `ALTER SYSTEM` overrides
/// all.
pub(crate) fn write(options: &ServerOptions, data_directory: &Path, settings: &Settings) -> Result<(), PostgresError> {
    let settings = options.complete(settings).to_configuration_file()?;
    let rules = AccessRule::to_file(&options.access_rules)?;
    options.user.write_file(&data_directory.join(SETTINGS_FILE), settings.as_bytes(), 0o600)?;
    options.user.write_file(&data_directory.join("pg_hba.conf"), rules.as_bytes(), 0o600)?;
    let path = data_directory.join(POSTGRESQL_CONF);
    let read = Directory::open_for(data_directory, &options.user);
    let mut main = match read.and_then(|directory| directory.read_to_string(Path::new(POSTGRESQL_CONF))) {
        // A copy of a server whose configuration is elsewhere, as Debian has it.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.map_err(PostgresError::file("read", &path))?,
    };
    let includes = format!("include '{SETTINGS_FILE}'\ninclude_if_exists '{STANDBY_FILE}'\n");
    // At the very end: of several values the last one counts.
    if !main.ends_with(&includes) {
        main.push_str(&format!("\n{includes}"));
        options.user.write_file(&path, main.as_bytes(), 0o600)?;
    }
    Ok(())
}

/// Makes the data directory a standby's.
pub(crate) fn write_standby(
    options: &ServerOptions,
    data_directory: &Path,
    standby: &StandbyOptions,
) -> Result<(), PostgresError> {
    let mut settings = Settings::new();
    settings
        .set("primary_conninfo", standby.primary.to_dsn())
        .set("primary_slot_name", standby.slot.as_deref().unwrap_or(""));
    let text = settings.to_configuration_file()?;
    options.user.write_file(&data_directory.join(STANDBY_FILE), text.as_bytes(), 0o600)?;
    options.user.write_file(&data_directory.join("standby.signal"), b"", 0o600)
}

/// Forgets whom the server followed; the signal file is PostgreSQL's own to remove.
pub(crate) fn remove_standby(data_directory: &Path) -> Result<(), PostgresError> {
    let path = data_directory.join(STANDBY_FILE);
    match Directory::open(data_directory).and_then(|directory| directory.remove_file(Path::new(STANDBY_FILE))) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(PostgresError::file("remove", path)(error)),
        _ => Ok(()),
    }
}
