//! What a cluster's servers are started with, so that their pools can be resized while they run.
//!
//! `shared_buffers` is a ceiling: memory that nobody has touched costs nothing, and the extension keeps the pool at its
//! target.

mod groups;

use std::path::Path;
use std::sync::Arc;

use groups::ServerGroups;
use onecopy_memory::arbiter::InstancePolicy;
use onecopy_memory::pressure::Host;
use onecopy_memory::{BindingLimit, Bytes, Level, MemoryError, Size, size};
use onecopy_postgres::{Binaries, ExtensionMissing, InstalledExtension, Server, Settings, WrittenSettings};

use super::configuration::{ExtensionUse, MemoryConfiguration};
use super::schema::{self, EXTENSION};
use crate::{HostError, Progress};

/// What the extension's pools are resized by; the last one may be shorter.
pub(super) const CHUNK_BYTES: Bytes = 2 << 20;

/// The smallest ceiling and start that are chosen: PostgreSQL's own `shared_buffers`.
pub(super) const POOL_BYTES_MIN: Bytes = 128 << 20;

/// What initdb writes as `shared_buffers` where nothing hinders it: nobody's wish.
const SHARED_BUFFERS_OF_INITDB: &str = "128MB";

/// The unit of `shared_buffers` when it has none.
const BLOCK_BYTES: Bytes = 8192;

/// What all servers of a cluster are started with, as far as memory goes.
#[derive(Debug, Clone)]
pub(crate) struct ServersMemory {
    configuration: MemoryConfiguration,
    /// Memory that the host has.
    host_bytes: Bytes,
    /// None: the servers' pools are as PostgreSQL makes them.
    extension: Option<InstalledExtension>,
    /// Why there is no extension where one would be used.
    missing: Option<ExtensionMissing>,
    groups: Arc<ServerGroups>,
}

/// The pool of one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pool {
    /// The most that it can have.
    pub(super) ceiling_bytes: Bytes,
    /// What it has at first.
    pub(super) start_bytes: Bytes,
}

impl ServersMemory {
    /// Looks for the extension, as far as the configuration wants it, beside `binaries`.
    ///
    /// # Errors
    /// [`HostError::ExtensionMissing`] where it must be there.
    pub fn choose(configuration: MemoryConfiguration, binaries: &Binaries) -> Result<ServersMemory, HostError> {
        let host_bytes = host_bytes(&Host::new()?)?;
        let found = match configuration.extension {
            ExtensionUse::Off => None,
            ExtensionUse::Auto | ExtensionUse::On => Some(InstalledExtension::find(binaries, EXTENSION)),
        };
        let (extension, missing) = match found {
            Some(Ok(extension)) => (Some(extension), None),
            Some(Err(missing)) if configuration.extension == ExtensionUse::On => {
                return Err(HostError::ExtensionMissing { directory: binaries.directory().to_owned(), missing });
            }
            Some(Err(missing)) => (None, Some(missing)),
            None => (None, None),
        };
        Ok(ServersMemory { configuration, host_bytes, extension, missing, groups: Arc::default() })
    }

    /// For servers that are not started: nothing is set.
    pub fn none() -> ServersMemory {
        let configuration = MemoryConfiguration { extension: ExtensionUse::Off, ..MemoryConfiguration::default() };
        ServersMemory { configuration, host_bytes: 0, extension: None, missing: None, groups: Arc::default() }
    }

    /// For servers that somebody else has started.
    ///
    /// # Errors
    /// [`HostError::Memory`] when the kernel does not tell of memory.
    pub fn of_others(configuration: MemoryConfiguration) -> Result<ServersMemory, HostError> {
        let host_bytes = host_bytes(&Host::new()?)?;
        Ok(ServersMemory { configuration, host_bytes, extension: None, missing: None, groups: Arc::default() })
    }

    /// Memory that the host has.
    pub fn host_bytes(&self) -> Bytes {
        self.host_bytes
    }

    /// What is known of the servers' control groups.
    pub(super) fn groups(&self) -> &ServerGroups {
        &self.groups
    }

    /// What was configured.
    pub fn configuration(&self) -> &MemoryConfiguration {
        &self.configuration
    }

    /// What the servers load, if anything.
    pub fn extension(&self) -> Option<&InstalledExtension> {
        self.extension.as_ref()
    }

    /// Says, where the extension would be used and is not there, what follows and what to do.
    pub fn tell_missing(&self, progress: &dyn Progress) {
        if let Some(notice) = self.missing_notice() {
            progress.notice(notice);
        }
    }

    /// The same, if there is anything to say.
    pub fn missing_notice(&self) -> Option<String> {
        self.missing.as_ref().map(|missing| {
            format!(
                "the servers' memory stays as it is: this PostgreSQL lacks the extension that resizes it ({missing}); \
                 install it (`make build` from the sources does), then `onecopy down` and `onecopy up`"
            )
        })
    }

    /// What the arbiter must know of a server.
    pub fn policy_of(&self, server: &str, data_directory: &Path) -> InstancePolicy {
        let memory = self.configuration.of_server(server);
        let written = WrittenSettings::read(data_directory).in_file("shared_buffers");
        let pool = self.pool(server, written.as_deref());
        InstancePolicy {
            floor_bytes: memory.floor.map_or(0, |floor| floor.of(pool.ceiling_bytes)),
            ceiling_bytes: None,
            weight: memory.weight.unwrap_or(1.0),
            pinned_bytes: None,
        }
    }

    /// Says what keeps a server's pool from being resized, with the remedy.
    pub fn tell_hindrance(&self, server: &str, data_directory: &Path, progress: &dyn Progress) {
        if let Some(hindrance) = self.hindrance(server, data_directory) {
            progress.notice(hindrance);
        }
    }

    /// Makes the extension's functions on the leader. Without them clients are served all the same, unless it was
    /// wanted by name. Those of an earlier version serve, too, and stay where this start `takes_over` a server that
    /// runs.
    ///
    /// # Errors
    /// What the leader says, where the configuration has `extension = "on"`.
    pub async fn make_functions(
        &self,
        name: &str,
        leader: &Server,
        takes_over: bool,
        progress: &dyn Progress,
    ) -> Result<(), HostError> {
        let Some(extension) = &self.extension else { return Ok(()) };
        match schema::make_missing(name, leader, extension, takes_over, progress).await {
            Err(error) if self.configuration.extension == ExtensionUse::Auto => {
                progress.notice(format!("the servers' memory stays as it is: {error}"));
                Ok(())
            }
            other => other,
        }
    }

    /// Adds to the settings of a server what its memory needs. What a person has written into its `postgresql.conf` is
    /// kept: the list of libraries is added to, and a size of `shared_buffers` is ceiling and start.
    pub fn add_to(&self, settings: &mut Settings, server: &str, data_directory: &Path) {
        let memory = self.configuration.of_server(server);
        let written = WrittenSettings::read(data_directory);
        let pool = self.pool(server, written.in_file("shared_buffers").as_deref());
        if memory.level == Some(Level::Own) {
            // Its pages are dropped from outside; the extension would not know of that.
            settings.set("shared_buffers", setting(pool.ceiling_bytes));
            return;
        }
        if self.extension.is_none() {
            return;
        }
        if let Some(libraries) = written.in_file("shared_preload_libraries") {
            settings.set("shared_preload_libraries", libraries);
        }
        settings.preload(EXTENSION);
        let share = |size: Option<Size>| size.map_or(0, |size| size.of(pool.ceiling_bytes));
        settings.set("shared_buffers", setting(pool.ceiling_bytes));
        if written.by_alter_system("shared_buffers").is_none() {
            settings.set("onecopy.memory_target", setting(pool.start_bytes));
        }
        settings.set("onecopy.memory_floor", setting(share(memory.floor).min(pool.ceiling_bytes)));
        if memory.level == Some(Level::Publish) {
            settings.set("onecopy.memory_reserve", setting(share(memory.reserve)));
        }
    }

    /// What a person has set by `ALTER SYSTEM` that keeps a server's pool from being resized, with the remedy.
    fn hindrance(&self, server: &str, data_directory: &Path) -> Option<String> {
        if self.extension.is_none() || self.configuration.of_server(server).level == Some(Level::Own) {
            return None;
        }
        let libraries = WrittenSettings::read(data_directory).by_alter_system("shared_preload_libraries")?;
        let mut complete = Settings::new();
        complete.set("shared_preload_libraries", &libraries).preload(EXTENSION);
        let complete = complete.get("shared_preload_libraries").filter(|complete| *complete != libraries)?.to_owned();
        let quoted = complete.split(',').map(|library| format!("'{}'", library.trim())).collect::<Vec<_>>().join(", ");
        Some(format!(
            "ALTER SYSTEM has set shared_preload_libraries of {server} without {EXTENSION}, \
             so its memory stays as it is; \
             run there: ALTER SYSTEM SET shared_preload_libraries = {quoted}, then `onecopy down` and `onecopy up`"
        ))
    }

    /// The pool of a server, in whose `postgresql.conf` this is `written` as `shared_buffers`.
    pub(super) fn pool(&self, server: &str, written: Option<&str>) -> Pool {
        let memory = self.configuration.of_server(server);
        let own = self.configuration.servers.iter().find(|(name, _)| name.as_str() == server).map(|(_, own)| own);
        let default = MemoryConfiguration::default();
        let is_configured =
            self.configuration.ceiling != default.ceiling || own.is_some_and(|own| own.ceiling.is_some());
        let written = written.filter(|written| *written != SHARED_BUFFERS_OF_INITDB).and_then(shared_buffers);
        if let (false, Some(bytes)) = (is_configured, written) {
            return Pool { ceiling_bytes: bytes, start_bytes: bytes };
        }
        let ceiling = memory.ceiling.unwrap_or(default.ceiling);
        let start = memory.start.unwrap_or(default.start);
        let ceiling_bytes = whole_chunks(ceiling.of(self.host_bytes).max(match ceiling {
            Size::Bytes(_) => CHUNK_BYTES,
            Size::Millionths(_) => POOL_BYTES_MIN,
        }));
        let start_bytes = whole_chunks(match start {
            Size::Bytes(bytes) => bytes,
            Size::Millionths(_) => start.of(ceiling_bytes).max(POOL_BYTES_MIN),
        });
        let start_bytes = start_bytes.clamp(CHUNK_BYTES, ceiling_bytes);
        Pool { ceiling_bytes, start_bytes }
    }
}

/// What memory this host has for us: all of it, or what a limit above us leaves.
///
/// # Errors
/// The kernel does not tell of memory.
pub(super) fn host_bytes(host: &Host) -> Result<Bytes, MemoryError> {
    let total_bytes = host.memory()?.total_bytes;
    let limits = host.limits_of(std::process::id())?;
    Ok(limits.iter().map(BindingLimit::bound_bytes).fold(total_bytes, Bytes::min))
}

pub(super) fn whole_chunks(bytes: Bytes) -> Bytes {
    bytes / CHUNK_BYTES * CHUNK_BYTES
}

/// A size as a setting; PostgreSQL's largest unit that all its versions take for both kinds of settings.
fn setting(bytes: Bytes) -> String {
    format!("{}kB", bytes / 1024)
}

/// What a person wrote as `shared_buffers`; none when it is no size, which PostgreSQL will say.
pub(super) fn shared_buffers(written: &str) -> Option<Bytes> {
    match written.parse::<Bytes>() {
        Ok(blocks) => blocks.checked_mul(BLOCK_BYTES),
        Err(_) => size::parse(written).ok(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const GIB: Bytes = 1 << 30;

    pub(in crate::memory) fn memory(configuration: MemoryConfiguration, host_bytes: Bytes) -> ServersMemory {
        let extension =
            InstalledExtension { name: EXTENSION.to_owned(), version: "1.0".to_owned(), library: "/x.so".into() };
        ServersMemory { configuration, host_bytes, extension: Some(extension), missing: None, groups: Arc::default() }
    }

    fn settings_of(memory: &ServersMemory, written: &str) -> Settings {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("postgresql.conf"), written).unwrap();
        let mut settings = Settings::new();
        memory.add_to(&mut settings, "leader", directory.path());
        settings
    }

    fn pool_of(memory: &ServersMemory, written: &str) -> (String, String) {
        let settings = settings_of(memory, written);
        let value = |name| settings.get(name).unwrap_or_default().to_owned();
        (value("shared_buffers"), value("onecopy.memory_target"))
    }

    fn mib(ceiling: u64, start: u64) -> (String, String) {
        (format!("{}kB", ceiling << 10), format!("{}kB", start << 10))
    }

    #[test]
    fn a_sixteenth_of_the_host_and_a_quarter_of_that_at_first() {
        let default = MemoryConfiguration::default;
        assert_eq!(pool_of(&memory(default(), 64 * GIB), ""), mib(4096, 1024));
        assert_eq!(pool_of(&memory(default(), 24 * GIB), "shared_buffers = 128MB"), mib(1536, 384));
        assert_eq!(pool_of(&memory(default(), GIB), ""), mib(128, 128));
        assert_eq!(pool_of(&memory(default(), 4 * GIB), ""), mib(256, 128));
    }

    #[test]
    fn what_is_configured_counts_and_else_what_is_written() {
        let ceiling = |ceiling| MemoryConfiguration { ceiling, ..MemoryConfiguration::default() };
        let configured = memory(ceiling(Size::Bytes(GIB)), 64 * GIB);
        assert_eq!(pool_of(&configured, "shared_buffers = 2GB"), mib(1024, 256));
        let small = memory(ceiling(Size::Bytes(65 << 20)), 64 * GIB);
        assert_eq!(pool_of(&small, ""), mib(64, 64));
        let default = memory(MemoryConfiguration::default(), 64 * GIB);
        assert_eq!(pool_of(&default, "shared_buffers = 2GB # much"), mib(2048, 2048));
        assert_eq!(pool_of(&default, "shared_buffers = 32768"), mib(256, 256));
        let start = MemoryConfiguration { start: Size::Bytes(64 << 20), ..MemoryConfiguration::default() };
        assert_eq!(pool_of(&memory(start, 64 * GIB), ""), mib(4096, 64));
    }

    #[test]
    fn libraries_of_a_person_are_kept() {
        let default = memory(MemoryConfiguration::default(), GIB);
        let settings = settings_of(&default, "shared_preload_libraries = 'pg_stat_statements'");
        assert_eq!(settings.get("shared_preload_libraries"), Some("pg_stat_statements, onecopy"));
        assert_eq!(settings.get("onecopy.memory_reserve"), None);
        let publish = MemoryConfiguration { level: Level::Publish, ..MemoryConfiguration::default() };
        let settings = settings_of(&memory(publish, 64 * GIB), "");
        assert_eq!(settings.get("onecopy.memory_reserve"), Some("262144kB"));
        let own = MemoryConfiguration { level: Level::Own, own_allowed: true, ..MemoryConfiguration::default() };
        let settings = settings_of(&memory(own, 64 * GIB), "");
        assert_eq!(settings.iter().collect::<Vec<_>>(), [("shared_buffers", "4194304kB")]);
    }

    #[test]
    fn without_the_extension_nothing_is_set() {
        assert_eq!(settings_of(&ServersMemory::none(), "shared_preload_libraries = 'x'"), Settings::new());
        let binaries = Binaries::find(None).unwrap();
        let off = MemoryConfiguration { extension: ExtensionUse::Off, ..MemoryConfiguration::default() };
        let chosen = ServersMemory::choose(off, &binaries).unwrap();
        assert!(chosen.extension().is_none() && chosen.missing.is_none());
    }

    #[test]
    fn what_alter_system_hinders_is_told() {
        let default = memory(MemoryConfiguration::default(), GIB);
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(default.hindrance("leader", directory.path()), None);
        let file = directory.path().join("postgresql.auto.conf");
        std::fs::write(&file, "shared_preload_libraries = 'a, b'\n").unwrap();
        let told = default.hindrance("leader", directory.path()).unwrap();
        assert!(told.contains("SET shared_preload_libraries = 'a', 'b', 'onecopy',"), "{told}");
        std::fs::write(&file, "shared_preload_libraries = 'a, onecopy'\n").unwrap();
        assert_eq!(default.hindrance("leader", directory.path()), None);
    }
}
