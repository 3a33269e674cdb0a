//! Clusters made: new ones, and copies of another server's. Each is made beside its place and renamed when it is whole.

use super::source::Source;
use super::{DATA, NEW_DATA, USER, needed_programs};
use crate::agent::execute::timeout;
use crate::agent::files;
use crate::agent::process::{Program, run, run_with};
use crate::agent::replies::{Reporter, Result, failed, failure};
use crate::protocol::{BaseBackup, Bytes, Executed, FailureKind, Initialize, Progress, WriteFile};
use std::fs::{File, OpenOptions, remove_dir_all, remove_file, rename};
use std::io::Write;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long `initdb` may take: seconds on a processor, a minute on an emulated one.
const INITIALIZE_TIMEOUT: Duration = Duration::from_secs(600);
/// Holds the superuser's password while `initdb` reads it.
const PASSWORD_FILE: &str = "/run/onecopy/password";
/// How often the host hears of a copy.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Makes a new cluster.
pub(super) fn initialize(options: &Initialize, reporter: &Reporter<'_>) -> Result<()> {
    let programs = needed_programs()?;
    prepare()?;
    reporter.say("making a new cluster");
    let mut arguments: Vec<String> = [
        &programs.path("initdb"),
        "--pgdata",
        NEW_DATA,
        "--username",
        USER,
        "--encoding=UTF8",
        "--locale=C.UTF-8",
        "--auth-local=peer",
        "--auth-host=scram-sha-256",
    ]
    .map(ToString::to_string)
    .to_vec();
    arguments.extend(options.options.iter().cloned());
    if let Some(password) = &options.password {
        let content = Bytes(format!("{password}\n").into_bytes());
        files::write(&WriteFile {
            path: PASSWORD_FILE.to_string(),
            mode: 0o600,
            owner: Some(USER.to_string()),
            content,
        })?;
        arguments.push(format!("--pwfile={PASSWORD_FILE}"));
    }
    let ended = run(&Program::of(arguments).run_by(USER)?, INITIALIZE_TIMEOUT);
    if options.password.is_some() {
        remove_file(PASSWORD_FILE).map_err(|error| failed("removing the password's file", error))?;
    }
    succeeded("initdb", &ended?)?;
    finish(&options.settings, options.host_based_authentication.as_deref())
}

/// Copies another server's cluster.
pub(super) fn copy(options: &BaseBackup, reporter: &Reporter<'_>) -> Result<()> {
    let programs = needed_programs()?;
    let limit = timeout(options.timeout_ms)?;
    // Everybody can read a command line.
    let Source { connection, password } = Source::of(&options.source)?;
    prepare()?;
    let mut arguments: Vec<String> = [
        &programs.path("pg_basebackup"),
        "--pgdata",
        NEW_DATA,
        "--dbname",
        &connection,
        "--write-recovery-conf",
        "--wal-method=stream",
        "--checkpoint=fast",
        "--progress",
    ]
    .map(ToString::to_string)
    .to_vec();
    if let Some(slot) = &options.slot {
        arguments.extend(["--slot".to_string(), slot.clone()]);
    }
    let mut program = Program::of(arguments).run_by(USER)?.until(reporter.cancelled());
    if let Some(password) = password {
        // pg_basebackup writes it into the copy's primary_conninfo, as it does with one in the connection string.
        program = program.knowing("PGPASSWORD", password);
    }
    let (sender, receiver) = mpsc::channel::<Vec<u8>>();
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || report(receiver, reporter));
        run_with(&program, limit, move |piece| {
            // The reporter is there for as long as this sender is.
            let _ = sender.send(piece.to_vec());
        })
    });
    succeeded("pg_basebackup", &ended?)?;
    finish(&options.settings, options.host_based_authentication.as_deref())
}

/// Tells the host how far pg_basebackup is.
fn report(pieces: mpsc::Receiver<Vec<u8>>, reporter: &Reporter<'_>) {
    let mut reported = Instant::now();
    for piece in pieces {
        let Some(progress) = progress(&String::from_utf8_lossy(&piece)) else { continue };
        if reported.elapsed() >= REPORT_INTERVAL {
            reported = Instant::now();
            reporter.progress(progress);
        }
    }
}

/// Out of `  23127/46254 kB (50%), 0/1 tablespace`.
fn progress(text: &str) -> Option<Progress> {
    let line = text.split(['\r', '\n']).rfind(|line| line.contains(" kB ("))?.trim();
    let (done, rest) = line.split_once('/')?;
    let (total, _) = rest.split_once(" kB")?;
    let bytes = |kilobytes: &str| kilobytes.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024);
    Some(Progress {
        message: "copying the cluster".to_string(),
        done_bytes: Some(bytes(done)?),
        total_bytes: Some(bytes(total)?),
    })
}

fn prepare() -> Result<()> {
    if Path::new(DATA).exists() {
        return Err(failure(FailureKind::Failed, format!("there is a cluster in {DATA} already")));
    }
    let parent = Path::new(DATA).parent().unwrap_or(Path::new("/"));
    match remove_dir_all(NEW_DATA) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(failed("removing what an earlier try has left", error));
        }
        _ => {}
    }
    let user = crate::agent::users::find(USER)?;
    std::fs::create_dir_all(parent)
        .and_then(|()| std::os::unix::fs::chown(parent, Some(user.user_id), Some(user.group_id)))
        .map_err(|error| failed("preparing the cluster's place", error))
}

fn succeeded(name: &str, ended: &Executed) -> Result<()> {
    match ended.status {
        Some(0) => Ok(()),
        _ => Err(failed(name, format!("{}{}", ended.stdout.to_text(), ended.stderr.to_text()).trim_end())),
    }
}

/// Adds the host's configuration, and gives the cluster its name.
fn finish(settings: &str, host_based_authentication: Option<&str>) -> Result<()> {
    if let Some(content) = host_based_authentication {
        let path = format!("{NEW_DATA}/pg_hba.conf");
        files::write(&WriteFile { path, mode: 0o600, owner: Some(USER.to_string()), content: content.into() })?;
    }
    let named = || {
        let mut configuration = OpenOptions::new().append(true).open(format!("{NEW_DATA}/postgresql.conf"))?;
        if !settings.is_empty() {
            write!(configuration, "\n# Onecopy\n{settings}\n")?;
        }
        configuration.sync_all()?;
        rename(NEW_DATA, DATA)?;
        File::open(Path::new(DATA).parent().unwrap_or(Path::new("/")))?.sync_all()
    };
    named().map_err(|error| failed("putting the cluster in its place", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_report_of_a_piece_counts() {
        let told = progress("    1/46254 kB (0%), 0/1 tablespace\r23127/46254 kB (50%), 0/1 tablespace\r").unwrap();
        assert_eq!((told.done_bytes, told.total_bytes), (Some(23127 * 1024), Some(46254 * 1024)));
        assert_eq!(progress("waiting for checkpoint"), None);
        assert_eq!(progress("x/y kB (1%)"), None);
    }
}
