//! Which server process a connection has, beyond its number, which another process may have later.

use std::fmt;

/// A server process: no other has both its number and its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerProcess {
    /// Its number. The kernel gives it to another process once this one has ended.
    pub id: u32,
    /// When it was started, microseconds since 1970 by the server's clock.
    pub started_us: i64,
}

/// As a row value of SQL, like one of [`ServerProcess::ROW`].
impl fmt::Display for ServerProcess {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "({}, {})", self.id, self.started_us)
    }
}

impl ServerProcess {
    /// What of a row of `pg_stat_activity` tells it.
    /// PostgreSQL's own operator, whatever others the search path leads to.
    pub const ROW: &'static str = "pid, (EXTRACT(epoch FROM backend_start)::pg_catalog.numeric \
                                   OPERATOR(pg_catalog.*) 1000000::pg_catalog.numeric)::pg_catalog.int8";

    /// From the two values of [`ServerProcess::ROW`].
    pub fn of_row(row: &[Option<String>]) -> Option<ServerProcess> {
        let [Some(id), Some(started_us)] = row else { return None };
        Some(ServerProcess { id: id.parse().ok()?, started_us: started_us.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_tells_a_process() {
        let row = |values: [Option<&str>; 2]| values.map(|value| value.map(str::to_owned));
        let process = ServerProcess { id: 7, started_us: 1_700_000_000_123_456 };
        assert_eq!(ServerProcess::of_row(&row([Some("7"), Some("1700000000123456")])), Some(process));
        assert_eq!(process.to_string(), "(7, 1700000000123456)");
        // The server shows it to nobody but a monitor.
        assert_eq!(ServerProcess::of_row(&row([Some("7"), None])), None);
        assert_eq!(ServerProcess::of_row(&row([Some("7"), Some("now")])), None);
        assert_eq!(ServerProcess::of_row(&row([Some("7"), Some("1")])[..1]), None);
    }
}
