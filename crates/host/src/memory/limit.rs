//! How much a server's control group may have.

use std::path::Path;

use onecopy_memory::{Bytes, Level, size};
use onecopy_postgres::WrittenSettings;

use super::starting::{CHUNK_BYTES, POOL_BYTES_MIN, ServersMemory, shared_buffers, whole_chunks};

/// What a server needs beside its pool, at the least: back ends, sorts, write-ahead log, some page cache.
const BESIDE_POOL_BYTES_MIN: Bytes = 256 << 20;

/// Of a limit the arbiter keeps a twentieth free: a nineteenth of the rest.
const LIMIT_KEPT_PART: Bytes = 19;

impl ServersMemory {
    /// The limit of a server's control group, if there shall be one.
    ///
    /// # Errors
    /// In words, what to write instead, when its pool and what it needs beside that would not fit.
    pub fn limit_of(&self, server: &str, data_directory: &Path) -> Result<Option<Bytes>, String> {
        let memory = self.configuration().of_server(server);
        let Some(limit) = memory.limit else { return Ok(None) };
        let written = WrittenSettings::read(data_directory).in_file("shared_buffers");
        let pool_bytes = match (self.extension(), memory.level) {
            // Its pool is as PostgreSQL makes it.
            (None, level) if level != Some(Level::Own) => {
                written.as_deref().and_then(shared_buffers).unwrap_or(POOL_BYTES_MIN)
            }
            _ => self.pool(server, written.as_deref()).ceiling_bytes,
        };
        let least_bytes = pool_bytes.saturating_add(BESIDE_POOL_BYTES_MIN);
        let least_bytes = least_bytes.saturating_add(least_bytes / LIMIT_KEPT_PART);
        let limit_bytes = limit.of(self.host_bytes());
        if limit_bytes >= least_bytes {
            return Ok(Some(limit_bytes));
        }
        let [limit_text, pool, beside, least] =
            [limit_bytes, pool_bytes, BESIDE_POOL_BYTES_MIN, whole_chunks(least_bytes) + CHUNK_BYTES].map(size::text);
        Err(format!(
            "the limit of {server} is {limit_text}, but its pool may have {pool}, and it needs {beside} and a little \
             room beside that; write a `limit` of at least {least} into [memory], or a lower `ceiling`"
        ))
    }
}

#[cfg(test)]
mod tests {
    use onecopy_memory::Size;

    use super::super::configuration::{CgroupUse, MemoryConfiguration};
    use super::super::starting::tests::memory;

    #[test]
    fn a_limit_leaves_room_for_pool_and_processes() {
        let limited = |limit: u64| MemoryConfiguration {
            cgroup: CgroupUse::Auto,
            ceiling: Size::Bytes(512 << 20),
            limit: Some(Size::Bytes(limit << 20)),
            ..MemoryConfiguration::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let limit = |limit| memory(limited(limit), 64 << 30).limit_of("leader", directory.path());
        assert_eq!(limit(1024), Ok(Some(1 << 30)));
        for too_little in [0, 512, 768, 808] {
            let error = limit(too_little).unwrap_err();
            assert!(error.contains("its pool may have 512MB") && error.contains("at least 810MB"), "{error}");
        }
        assert_eq!(limit(810), Ok(Some(810 << 20)));
        let none = memory(MemoryConfiguration::default(), 64 << 30);
        assert_eq!(none.limit_of("leader", directory.path()), Ok(None));
    }
}
