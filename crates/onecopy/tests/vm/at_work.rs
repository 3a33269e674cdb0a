//! Machines at work: memory and a disk that know what they must hold, and a server with pgbench. All that is checked
//! belongs together: the writers' expectations lie in memory, what they are about on disk.

use onecopy_testing::{guest_exercise, seed};
use serde_json::Value;

use crate::machines::{MachineDirectory, until};

/// Bytes of memory that are written to, and how many of them a second.
const MEMORY_BYTES: u32 = 48 << 20;
const MEMORY_RATE: u32 = 8 << 20;
/// Bytes of a file that is written to.
const DISK_BYTES: u32 = 16 << 20;
/// Where the writers look whether they are to end.
const OVER: &str = "/run/exercise-over";
/// Their reports.
const REPORTS: [&str; 2] = ["/dev/shm/memory.json", "/dev/shm/disk.json"];
const AMCHECK: &str =
    "/usr/lib/postgresql/17/bin/pg_amcheck --install-missing --heapallindexed -h127.0.0.1 -Upostgres postgres";
const CHECKSUMS: &str = "export PATH=$PATH:/usr/lib/postgresql/17/bin PGDATA=/var/lib/onecopy/data; \
                         pg_ctl -m fast stop >/dev/null && pg_checksums --check | grep 'Bad checksums'";
/// Null when pgbench's transactions are whole.
pub const DIFFERENCE: &str = "SELECT nullif(count(DISTINCT sum), 1) FROM (SELECT sum(abalance) FROM pgbench_accounts \
                          UNION ALL SELECT sum(tbalance) FROM pgbench_tellers \
                          UNION ALL SELECT sum(bbalance) FROM pgbench_branches \
                          UNION ALL SELECT coalesce(sum(delta), 0) FROM pgbench_history) AS sums";

impl MachineDirectory {
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> String {
        self.directory.run(arguments).ok()
    }

    /// Everything that writes, in a guest that has a server.
    pub fn begin_work(&self, name: &str) {
        let program = guest_exercise::program().expect("it was built");
        let place = guest_exercise::PLACE;
        let install = format!("mkdir -p $(dirname {place}); cat > {place}; chmod 755 {place}");
        self.directory.run_with_input(&["vm", "exec", name, "--", "sh", "-c", &install], &program).ok();
        self.guest(name, &format!("{} pgbench -i -q -s1 {}", self.password(name), client("pgbench")));
        let background = |command: String, out: &str| {
            self.guest(name, &format!("setsid sh -c '{command}' > {out}.begun 2>&1 < /dev/null &"));
        };
        self.guest(name, &format!("truncate -s {DISK_BYTES} /root/exercise"));
        let common = format!("--seconds 86400 --until {OVER} --seed {}", seed());
        let [memory, disk] = REPORTS;
        // Who asks comes first.
        let exercise = |what: &str, report: &str| {
            format!("nice -n 19 {place} {what} {common} > {report}.new; mv {report}.new {report}")
        };
        background(exercise(&format!("--memory --span {MEMORY_BYTES} --rate {MEMORY_RATE}"), memory), memory);
        background(exercise(&format!("--device /root/exercise --span {DISK_BYTES} --threads 2"), disk), disk);
        let pgbench = format!("{} nice -n 10 pgbench -n -c2 -R20 -T86400 {}", self.password(name), client("pgbench"));
        background(pgbench, "/dev/shm/pgbench");
        until("pgbench is at work", || self.sql(name, "SELECT count(*) > 10 FROM pgbench_history") == "t");
    }

    /// What is put before a command that is to log in.
    fn password(&self, name: &str) -> String {
        let password = std::fs::read_to_string(self.home(name).join("password")).expect("a password");
        format!("PATH=$PATH:/usr/lib/postgresql/17/bin PGPASSWORD={}", password.trim())
    }

    pub fn sql(&self, name: &str, statement: &str) -> String {
        self.guest(name, &format!("{} psql -XAtq {} -c '{statement}'", self.password(name), client("psql")))
    }

    /// What the machine holds is right, and stays so while everything goes on; afterwards nothing writes any more.
    pub fn verify(&self, name: &str) {
        let wrong = self.wrong(name);
        assert_eq!(wrong, None, "{name}");
        assert_eq!(self.sql(name, DIFFERENCE), "", "balances of {name}");
        let transactions = || self.sql(name, "SELECT count(*) FROM pgbench_history").parse::<u64>().expect("a number");
        let before = transactions();
        until("pgbench goes on", || transactions() > before);
        let amcheck = self.guest(name, &format!("pkill -x pgbench; {} {AMCHECK} 2>&1", self.password(name)));
        assert_eq!(amcheck, "", "indexes of {name}");
        let checked = self.run(&["vm", "exec", name, "--user=postgres", "--", "sh", "-c", CHECKSUMS]);
        assert_eq!(checked.split_whitespace().last(), Some("0"), "{checked}");
        assert_eq!(self.guest(name, "dmesg | grep -ci 'ext4.*error' || true"), "0", "file system of {name}");
    }

    /// What the writers in a guest have found wrong by their end.
    pub fn wrong(&self, name: &str) -> Option<String> {
        self.guest(name, &format!("touch {OVER}"));
        let mut wrong = None;
        for report in REPORTS {
            let read = || self.guest(name, &format!("cat {report} 2>/dev/null || true"));
            until("a writer has compared all", || !read().is_empty());
            let told: Value = serde_json::from_str(&read()).expect("a report");
            assert!(told["writes"].as_u64() > Some(0) && told["compared"].as_u64() > Some(0), "{told}");
            if told["errors"] != 0 {
                wrong = Some(told.to_string());
            }
        }
        wrong
    }
}

fn client(program: &str) -> &'static str {
    if program == "pgbench" { "-h127.0.0.1 -Upostgres postgres" } else { "-h127.0.0.1 -Upostgres -dpostgres" }
}
