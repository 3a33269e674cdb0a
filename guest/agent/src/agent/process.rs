//! Programs: started, fed, listened to, and ended in time.

use super::in_progress::Cancelled;
use super::replies::{Result, failed, failure, malformed};
use super::users::{self, User};
use crate::protocol::{Bytes, Executed, FailureKind, OUTPUT_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where programs are looked up.
pub(crate) const PATH: &str = "/usr/lib/onecopy:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How soon a program's end is seen.
const END_PAUSE: Duration = Duration::from_millis(5);
/// A program may leave others that hold its output open (`sh -c 'daemon &'`): what they write after its end is not
/// waited for any longer.
const OUTPUT_AFTER_END: Duration = Duration::from_millis(200);

/// What is to be run.
pub(crate) struct Program {
    arguments: Vec<String>,
    user: Option<User>,
    input: Vec<u8>,
    environment: Vec<(&'static str, String)>,
    cancelled: Cancelled,
}

impl Program {
    pub(crate) fn new(arguments: &[&str]) -> Program {
        Program::of(arguments.iter().map(ToString::to_string).collect())
    }

    pub(crate) fn of(arguments: Vec<String>) -> Program {
        let (input, environment) = (Vec::new(), Vec::new());
        Program { arguments, user: None, input, environment, cancelled: Cancelled::default() }
    }

    pub(crate) fn run_by(mut self, name: &str) -> Result<Program> {
        self.user = Some(users::find(name)?);
        Ok(self)
    }

    pub(crate) fn reading(mut self, input: Vec<u8>) -> Program {
        self.input = input;
        self
    }

    /// With a variable that only its user, and root, can see.
    pub(crate) fn knowing(mut self, name: &'static str, value: String) -> Program {
        self.environment.push((name, value));
        self
    }

    /// It is killed when that is set.
    pub(crate) fn until(mut self, cancelled: Cancelled) -> Program {
        self.cancelled = cancelled;
        self
    }

    fn command(&self) -> Result<Command> {
        let (name, arguments) = self.arguments.split_first().ok_or_else(|| malformed("no program is named"))?;
        let mut command = Command::new(name);
        command.args(arguments).env_clear().env("PATH", search_path()).env("LANG", "C.UTF-8");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // A group of its own, to end it with all that it has started.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match &self.user {
            Some(user) => {
                command.uid(user.user_id).gid(user.group_id).env("HOME", &user.home).env("USER", &user.name);
                command.current_dir("/");
            }
            None => {
                command.env("HOME", "/root").env("USER", "root").current_dir("/");
            }
        }
        Ok(command)
    }
}

/// The server's own programs are found by their names as well.
fn search_path() -> String {
    match super::postgres::programs() {
        Some(programs) => format!("{PATH}:{}", programs.directory.display()),
        None => PATH.to_string(),
    }
}

/// Runs a program to its end and keeps what it writes.
pub(crate) fn run(program: &Program, timeout: Duration) -> Result<Executed> {
    run_with(program, timeout, |_| {})
}

/// The same; `on_error_output` is told of each piece that the program writes to its standard error.
pub(crate) fn run_with(
    program: &Program,
    timeout: Duration,
    on_error_output: impl FnMut(&[u8]) + Send + 'static,
) -> Result<Executed> {
    let deadline = Instant::now() + timeout;
    let name = program.arguments.first().cloned().unwrap_or_default();
    let mut child = program.command()?.spawn().map_err(|error| failed(&format!("starting {name}"), error))?;
    let input = program.input.clone();
    let stdin = child.stdin.take();
    // A program may end without having read it all; whoever feeds it then gets an error, which says nothing.
    std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
    let stdout = child.stdout.take().map(|stream| Output::follow(stream, |_| {}));
    let stderr = child.stderr.take().map(|stream| Output::follow(stream, on_error_output));
    let status = wait(&mut child, deadline, &program.cancelled)
        .map_err(|error| failed(&format!("waiting for {name}"), error))?;
    let (stdout, stdout_cut) = stdout.map(Output::end).unwrap_or_default();
    let (stderr, stderr_cut) = stderr.map(Output::end).unwrap_or_default();
    match status {
        Some(status) => Ok(Executed {
            status: status.code(),
            signal: status.signal(),
            stdout: Bytes(stdout),
            stderr: Bytes(stderr),
            truncated: stdout_cut || stderr_cut,
        }),
        None => {
            let said = String::from_utf8_lossy(&stderr).trim_end().to_string();
            if program.cancelled.load(Ordering::Acquire) {
                return Err(failure(FailureKind::Failed, format!("{name} was killed: its host does not wait for it")));
            }
            let message = format!(
                "{name} was killed after {} ms{}{said}",
                timeout.as_millis(),
                if said.is_empty() { "" } else { ": " }
            );
            Err(failure(FailureKind::Timeout, message))
        }
    }
}

/// None: it was killed, because its time was over or nobody waits for it.
fn wait(child: &mut Child, deadline: Instant, cancelled: &Cancelled) -> std::io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline || cancelled.load(Ordering::Acquire) {
            if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // Gone already is what is wanted.
                let _ = kill_process_group(group, Signal::KILL);
            }
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(END_PAUSE);
    }
}

/// One stream of a program, read on a thread of its own.
struct Output {
    stream: Arc<OwnedFd>,
    kept: Arc<Mutex<Kept>>,
    reader: JoinHandle<()>,
}

/// What was read of a stream.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    is_cut: bool,
    /// Of all that was read, also of what is not kept.
    read_bytes: u64,
}

impl Output {
    fn follow(stream: impl Into<OwnedFd>, mut on_piece: impl FnMut(&[u8]) + Send + 'static) -> Output {
        let stream = Arc::new(stream.into());
        let kept = Arc::new(Mutex::new(Kept::default()));
        let (source, keeper) = (Arc::clone(&stream), Arc::clone(&kept));
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 16 * 1024];
            loop {
                // Waited for without the lock, and read with it: what has left the pipe is counted.
                let mut descriptors = [PollFd::new(&*source, PollFlags::IN)];
                match poll(&mut descriptors, None) {
                    Ok(_) => {}
                    Err(Errno::INTR) => continue,
                    Err(_) => return,
                }
                let mut kept = keeper.lock().unwrap_or_else(PoisonError::into_inner);
                let length = match rustix::io::read(&*source, &mut buffer) {
                    Ok(length @ 1..) => length,
                    Err(Errno::INTR) => continue,
                    _ => return,
                };
                on_piece(&buffer[..length]);
                let room = OUTPUT_BYTES_MAX - kept.bytes.len();
                kept.bytes.extend_from_slice(&buffer[..length.min(room)]);
                kept.is_cut |= length > room;
                kept.read_bytes += length as u64;
            }
        });
        Output { stream, kept, reader }
    }

    /// What was written, and whether there was more. All that lies in the pipe now is read, however long a busy machine
    /// takes for that.
    fn end(self) -> (Vec<u8>, bool) {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let end = {
            let kept = kept();
            kept.read_bytes + rustix::io::ioctl_fionread(&*self.stream).unwrap_or(0)
        };
        let deadline = Instant::now() + OUTPUT_AFTER_END;
        while !self.reader.is_finished() && (Instant::now() < deadline || kept().read_bytes < end) {
            std::thread::sleep(END_PAUSE);
        }
        let mut kept = kept();
        (std::mem::take(&mut kept.bytes), kept.is_cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: Duration = Duration::from_secs(120);

    fn shell(script: &str) -> Program {
        Program::new(&["sh", "-c", script])
    }

    #[test]
    fn a_program_is_fed_and_listened_to() {
        let ended = run(&Program::new(&["cat"]).reading(b"hello".to_vec()), SECONDS).unwrap();
        assert_eq!((ended.status, ended.stdout.0.as_slice(), ended.truncated), (Some(0), &b"hello"[..], false));
        let ended = run(&shell("echo no >&2; exit 3"), SECONDS).unwrap();
        assert_eq!((ended.status, ended.stderr.to_text().as_str()), (Some(3), "no\n"));
        assert_eq!(run(&shell("kill -9 $$"), SECONDS).unwrap().signal, Some(9));
    }

    #[test]
    fn output_is_bounded_and_the_rest_is_drained() {
        let ended = run(&shell("head -c 3000000 /dev/zero; echo end >&2"), SECONDS).unwrap();
        assert_eq!((ended.status, ended.stdout.0.len(), ended.truncated), (Some(0), OUTPUT_BYTES_MAX, true));
        assert_eq!(ended.stderr.to_text(), "end\n");
    }

    #[test]
    fn what_takes_too_long_is_killed_with_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script = format!("sleep 1000 & echo $! >{}; wait", file.display());
        // More time where the machine needs more to come so far.
        let mut timeouts_ms = [500, 5_000, 50_000].into_iter();
        let pid = loop {
            let timeout = Duration::from_millis(timeouts_ms.next().expect("the program begins"));
            let failure = run(&shell(&script), timeout).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Timeout);
            match std::fs::read_to_string(&file) {
                Ok(pid) if pid.ends_with('\n') => break pid,
                _ => {}
            }
        };
        let gone =
            || !std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|stat| !stat.contains(") Z "));
        let deadline = Instant::now() + SECONDS;
        while !gone() && Instant::now() < deadline {
            std::thread::sleep(END_PAUSE);
        }
        assert!(gone(), "the program's child lives");
    }

    #[test]
    fn a_daemon_that_keeps_the_output_open_is_not_waited_for() {
        let ended = run(&shell("sleep 1000 & echo $!"), SECONDS).unwrap();
        assert_eq!(ended.status, Some(0));
        // It lives still, and its number is all that was written.
        let daemon = Pid::from_raw(ended.stdout.to_text().trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(daemon, Signal::KILL).unwrap();
    }

    #[test]
    fn what_a_program_wrote_before_its_end_is_told_whoever_is_late() {
        let script = shell("echo one >&2; echo two >&2");
        let is_late = |_: &[u8]| std::thread::sleep(3 * OUTPUT_AFTER_END);
        let ended = run_with(&script, SECONDS, is_late).unwrap();
        assert_eq!(ended.stderr.to_text(), "one\ntwo\n");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let failure = run(&Program::new(&["no-such-program"]), SECONDS).unwrap_err();
        assert!(failure.message.contains("starting no-such-program"), "{failure}");
        assert_eq!(run(&Program::new(&[]), SECONDS).unwrap_err().kind, FailureKind::Malformed);
    }
}
