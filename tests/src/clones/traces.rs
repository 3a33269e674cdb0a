//! What is left of making a clone: nothing may be.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, ensure};
use onecopy_clone::service::Rendezvous;
use onecopy_testing::try_until_async;
use rustix::process::{Pid, Signal};

use crate::servers::TestServer;

/// Checks that nothing of a service is left, and that its clone's directory is an ordinary one.
///
/// # Errors
///
/// A process, a directory, a mark on a file, a mount, a file of ours.
pub async fn ensure_none(rendezvous: &Rendezvous, clone: &TestServer) -> anyhow::Result<()> {
    let service = rendezvous.directory();
    let left = async || Ok((processes(service)?, service.exists()));
    try_until_async(&format!("{} is gone", service.display()), left, |(processes, directory)| {
        processes.is_empty() && !directory
    })
    .await?;
    let directory = clone.server.data_directory();
    ensure_ordinary(directory)?;
    let marks = marks_in(directory)?;
    ensure!(marks.is_empty(), "marks are left: {marks:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!mounts.contains(&*directory.to_string_lossy()), "a mount is left: {mounts}");
    Ok(())
}

/// Checks that a data directory is as any other: its version is a file, nothing is named after us.
///
/// # Errors
///
/// What is there.
pub fn ensure_ordinary(directory: &Path) -> anyhow::Result<()> {
    let version = std::fs::symlink_metadata(directory.join("PG_VERSION"))?;
    ensure!(version.is_file(), "PG_VERSION is {version:?}");
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        // The server's own settings are ours to write, and stay.
        let is_ours = name.to_string_lossy().starts_with("onecopy") && !name.to_string_lossy().ends_with(".conf");
        ensure!(!is_ours, "{name:?} is left in {}", directory.display());
    }
    Ok(())
}

/// Processes that have this word on their command line: a service's directory, say.
///
/// # Errors
///
/// The list of processes cannot be read.
pub fn processes(word: &Path) -> anyhow::Result<Vec<(Pid, String)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(process) = number.and_then(Pid::from_raw) else { continue };
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.split('\0').any(|argument| Path::new(argument) == word) {
            found.push((process, line.replace('\0', " ")));
        }
    }
    Ok(found)
}

/// Sends a signal to the process of a service whose command line has `command`, as soon as there is exactly one: on a
/// busy machine a hydrator is taken for dead now and then, and what a keeper starts has the keeper's words for a
/// moment.
///
/// # Errors
///
/// There are none, or several, all the time; the list of processes cannot be read.
pub async fn signal(rendezvous: &Rendezvous, command: &str, signal: Signal) -> anyhow::Result<()> {
    let send = async || {
        let mut found = processes(rendezvous.directory())?;
        found.retain(|(_, line)| line.split(' ').any(|word| word == command));
        let is_sent = matches!(found[..], [(process, _)] if rustix::process::kill_process(process, signal).is_ok());
        Ok((is_sent, found))
    };
    try_until_async(&format!("there is one {command}"), send, |(is_sent, _)| *is_sent).await?;
    Ok(())
}

/// Marks on files and directories below this one, in any process, as `/proc/<pid>/fdinfo` tells them
/// (proc_pid_fdinfo(5)).
fn marks_in(directory: &Path) -> anyhow::Result<Vec<String>> {
    let mut inodes = std::collections::HashSet::new();
    collect_inodes(directory, &mut inodes)?;
    ensure!(!inodes.is_empty(), "{} is empty", directory.display());
    let mut marks = Vec::new();
    for process in std::fs::read_dir("/proc")?.flatten() {
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fdinfo")) else { continue };
        for descriptor in descriptors.flatten() {
            let Ok(text) = std::fs::read_to_string(descriptor.path()) else { continue };
            let of_files = text.lines().filter_map(|line| line.strip_prefix("fanotify ino:"));
            let known = of_files.filter(|mark| identity_of(mark).is_some_and(|identity| inodes.contains(&identity)));
            marks.extend(known.map(|mark| format!("{}: {mark}", descriptor.path().display())));
        }
    }
    Ok(marks)
}

/// Device and inode of a mark: `INODE sdev:DEVICE ..`.
fn identity_of(mark: &str) -> Option<(u64, u64)> {
    let (inode, rest) = mark.split_once(' ')?;
    let device = rest.strip_prefix("sdev:")?.split(' ').next()?;
    Some((u64::from_str_radix(device, 16).ok()?, u64::from_str_radix(inode, 16).ok()?))
}

/// Device, as the kernel has it, and inode. Another test's file on another file system may have the same number.
fn identity(file: &std::fs::Metadata) -> (u64, u64) {
    let device = file.dev();
    ((u64::from(rustix::fs::major(device)) << 20) | u64::from(rustix::fs::minor(device)), file.ino())
}

fn collect_inodes(directory: &Path, inodes: &mut std::collections::HashSet<(u64, u64)>) -> anyhow::Result<()> {
    inodes.insert(identity(&std::fs::metadata(directory).with_context(|| directory.display().to_string())?));
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A server that runs removes files while we look.
        let Ok(metadata) = std::fs::metadata(entry.path()) else { continue };
        if metadata.is_dir() {
            collect_inodes(&entry.path(), inodes)?;
        } else {
            inodes.insert(identity(&metadata));
        }
    }
    Ok(())
}
