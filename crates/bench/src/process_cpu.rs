//! Processor time of other processes: what one transaction costs, whatever the wall clock says on a shared machine.

use std::fs;
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::time::clock_getcpuclockid;
use nix::unistd::{Pid, SysconfVar, sysconf};

/// Processor time that all threads of a process have used, from its own clock (nanoseconds, unlike `/proc`).
pub fn process_time(process_id: u32) -> anyhow::Result<Duration> {
    let pid = Pid::from_raw(process_id.try_into()?);
    let clock =
        clock_getcpuclockid(pid).with_context(|| format!("process {process_id} has no clock: has it ended?"))?;
    Ok(clock.now().with_context(|| format!("cannot read the clock of process {process_id}"))?.into())
}

/// How often a family is counted anew because a child has ended meanwhile.
const COUNTS_MAX: usize = 100;

/// Processor time of a process, of its children, and of those children that have ended: a PostgreSQL server as a whole.
/// In steps of the kernel's tick, 10 ms as a rule.
pub fn family_time(process_id: u32) -> anyhow::Result<Duration> {
    let ticks_a_second = sysconf(SysconfVar::CLK_TCK)?.ok_or_else(|| anyhow!("the kernel does not tell its tick"))?;
    for _ in 0..COUNTS_MAX {
        let before = stat(process_id)?;
        let children = children_ticks(process_id)?;
        // A child that ends moves from its own line to its parent's: it may be counted twice, or not at all.
        if stat(process_id)?.ended_children_ticks == before.ended_children_ticks {
            let ticks = before.own_ticks + before.ended_children_ticks + children;
            return Ok(Duration::from_secs_f64(ticks as f64 / ticks_a_second as f64));
        }
    }
    Err(anyhow!("the children of process {process_id} come and go too fast to be counted"))
}

fn stat(process_id: u32) -> anyhow::Result<Stat> {
    let path = format!("/proc/{process_id}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("process {process_id} has ended"))?;
    parse_stat(&text).ok_or_else(|| anyhow!("strange {path}: {text:?}"))
}

fn children_ticks(parent: u32) -> anyhow::Result<u64> {
    let mut ticks = 0;
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let Ok(entry) = entry else { continue };
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // Any process may end between the listing and here.
        let Ok(stat) = stat(id) else { continue };
        if stat.parent == parent {
            ticks += stat.own_ticks;
        }
    }
    Ok(ticks)
}

#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    own_ticks: u64,
    ended_children_ticks: u64,
}

/// Reads `/proc/<pid>/stat` (`proc_pid_stat(5)`): fields 4 and 14 to 17.
fn parse_stat(text: &str) -> Option<Stat> {
    // The program's name, field 2, may hold spaces and parentheses: what follows its last one counts.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Stat {
        parent: number(4)?.try_into().ok()?,
        own_ticks: number(14)? + number(15)?,
        ended_children_ticks: number(16)? + number(17)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_a_strange_name() {
        let text = "42 (a) b) S 7 42 42 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 1 0 5 6 7";
        assert_eq!(parse_stat(text), Some(Stat { parent: 7, own_ticks: 33, ended_children_ticks: 77 }));
        for broken in ["", "42 (a", "42 (a) S", "42 (a) S x 1 1 1 1 1 1 1 1 1 1 1 1"] {
            assert_eq!(parse_stat(broken), None);
        }
    }

    #[test]
    fn own_clocks_go_forward() {
        let me = std::process::id();
        let before = process_time(me).unwrap();
        let mut sum = 0_u64;
        while process_time(me).unwrap() == before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(family_time(me).is_ok());
        // Beyond the largest process id that Linux gives (PID_MAX_LIMIT).
        assert!(process_time((1 << 22) + 1).is_err());
    }
}
