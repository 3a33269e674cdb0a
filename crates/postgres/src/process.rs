//! What the kernel tells of a process, whosever it is: proc(5).

use std::fs;

/// The numbers of all processes that can be seen.
pub fn process_ids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// What stands behind `name`, such as `Uid:`, in a process's status; none when it has ended. Source:
/// proc_pid_status(5), which shows no line end that stands in a program's name.
pub fn status_field(process_id: u32, name: &str) -> Option<String> {
    let status = fs::read(format!("/proc/{process_id}/status")).ok()?;
    let value = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name.as_bytes()))?;
    Some(String::from_utf8_lossy(value).trim().to_owned())
}

/// Whether a process is of this account by all its user ids: real, effective, saved and that for files.
pub fn runs_as(process_id: u32, user_id: u32) -> bool {
    let numbers = status_field(process_id, "Uid:");
    numbers.is_some_and(|numbers| numbers.split_ascii_whitespace().all(|number| number.parse() == Ok(user_id)))
}

/// Its number in the innermost PID namespace that it lives in; none when it has ended.
pub fn innermost_number(process_id: u32) -> Option<u32> {
    status_field(process_id, "NSpid:")?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Whether a process still executes: a zombie does not, though it may have threads that have not ended.
pub fn lives(process_id: u32) -> bool {
    stat_of(process_id).is_some_and(|fields| !fields.starts_with(['Z', 'X', 'x']))
}

/// The fields of proc_pid_stat(5) from its state on; none when there is no such process.
pub(crate) fn stat_of(process_id: u32) -> Option<String> {
    let bytes = fs::read(format!("/proc/{process_id}/stat")).ok()?;
    // They follow the program's name, which is in parentheses and may hold some itself.
    let end = bytes.iter().rposition(|byte| *byte == b')')?;
    Some(String::from_utf8_lossy(&bytes[end + 1..]).trim_start().to_owned())
}
