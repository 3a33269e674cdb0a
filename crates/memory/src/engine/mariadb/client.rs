//! The command line client of MariaDB or MySQL as a child process that is asked one question after another.
//!
//! The client speaks every version's protocol and login, and reads the administrator's own option files: neither a
//! password nor a key has to be given to us, or stands on a command line that others can read.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::{InstanceName, Kind, MemoryError};

/// The row that ends an answer. What is asked for never has a row that begins so.
const END_OF_ANSWER: &str = "onecopy: end of answer";
/// No answer has more rows.
const ROWS_MAX: usize = 1000;
/// No row has more bytes that matter.
const ROW_BYTES_MAX: usize = 4096;
/// So much of what the client complains about is kept.
const COMPLAINT_BYTES_MAX: u64 = 2000;
/// The client gives up connecting after this, in seconds.
const CONNECT_TIMEOUT_S: &str = "5";
/// A client that has ended its output and not itself is waited for so long.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// How the client reaches the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MariaDbAccess {
    /// `mariadb` or `mysql`; none for the one of that name in the search path.
    pub program: Option<PathBuf>,
    /// An option file with host, socket, user, password, read after the usual ones (`--defaults-extra-file`); readable
    /// by us alone if it holds a password.
    pub defaults_file: Option<PathBuf>,
    /// The server's Unix socket; none for what the option files say.
    pub socket: Option<PathBuf>,
    /// Who logs in; none for what the option files say.
    pub user: Option<String>,
}

impl MariaDbAccess {
    /// The program that is run.
    pub(super) fn program(&self, kind: Kind) -> PathBuf {
        let usual = if kind == Kind::MySql { "mysql" } else { "mariadb" };
        self.program.clone().unwrap_or_else(|| PathBuf::from(usual))
    }

    fn command(&self, kind: Kind) -> Command {
        let mut command = Command::new(self.program(kind));
        if let Some(path) = &self.defaults_file {
            // It counts only as the first option.
            let mut option = std::ffi::OsString::from("--defaults-extra-file=");
            option.push(path);
            command.arg(option);
        }
        command.args(["--batch", "--skip-column-names", "--unbuffered", "--skip-auto-rehash", "--skip-reconnect"]);
        command.arg(format!("--connect-timeout={CONNECT_TIMEOUT_S}"));
        if let Some(socket) = &self.socket {
            command.arg("--protocol=socket").arg("--socket").arg(socket);
        }
        if let Some(user) = &self.user {
            command.arg("--user").arg(user);
        }
        command.env("LC_ALL", "C").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        command
    }
}

/// A client that has been started. Dropping it kills it: an answer that nobody has waited for must not be taken for the
/// next one's.
pub(super) struct Client {
    instance: InstanceName,
    program: PathBuf,
    child: Child,
    questions: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// Starts it; whether it can log in shows with the first question.
    pub(super) fn start(access: &MariaDbAccess, instance: &InstanceName, kind: Kind) -> Result<Client, MemoryError> {
        let program = access.program(kind);
        let failed = |status: String| MemoryError::Program {
            program: program.clone(),
            instance: instance.clone(),
            status,
            output: "is the client of MariaDB or MySQL installed?".to_owned(),
        };
        let mut child = access.command(kind).spawn().map_err(|error| failed(error.to_string()))?;
        let (Some(questions), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes".to_owned()));
        };
        let answers = BufReader::new(answers).lines();
        Ok(Client { instance: instance.clone(), program, child, questions, answers })
    }

    /// Asks statements, each ended by `;`, and gives all their rows, columns separated by tabs.
    ///
    /// # Errors
    /// [`MemoryError::Program`] with the server's words; the client is of no use after it.
    pub(super) async fn ask(&mut self, statements: &str) -> Result<Vec<String>, MemoryError> {
        let question = format!("{statements}\nSELECT '{END_OF_ANSWER}';\n");
        if self.questions.write_all(question.as_bytes()).await.is_err() || self.questions.flush().await.is_err() {
            return Err(self.ended().await);
        }
        let mut rows = Vec::new();
        loop {
            match self.answers.next_line().await {
                Ok(Some(row)) if row == END_OF_ANSWER => return Ok(rows),
                Ok(Some(row)) if rows.len() < ROWS_MAX && row.len() <= ROW_BYTES_MAX => rows.push(row),
                Ok(Some(_)) => return Err(self.failed("it printed more than was asked for", String::new())),
                Ok(None) | Err(_) => return Err(self.ended().await),
            }
        }
    }

    /// Why it has ended: batch mode ends at the first error and says it.
    async fn ended(&mut self) -> MemoryError {
        let mut complaint = Vec::new();
        if let Some(errors) = self.child.stderr.take() {
            let mut errors = errors.take(COMPLAINT_BYTES_MAX);
            let _ = tokio::time::timeout(END_TIMEOUT, errors.read_to_end(&mut complaint)).await;
        }
        let status = match tokio::time::timeout(END_TIMEOUT, self.child.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it closed its output".to_owned(),
        };
        self.failed(&status, essence(&String::from_utf8_lossy(&complaint)))
    }

    fn failed(&self, status: &str, output: String) -> MemoryError {
        MemoryError::Program {
            program: self.program.clone(),
            instance: self.instance.clone(),
            status: status.to_owned(),
            output,
        }
    }
}

/// The lines of a complaint that say something: batch mode repeats the statement between lines of dashes.
fn essence(complaint: &str) -> String {
    let errors: Vec<&str> = complaint.lines().filter(|line| line.starts_with("ERROR")).collect();
    let lines = if errors.is_empty() { complaint.lines().collect() } else { errors };
    let line = lines.join("; ");
    if line.is_empty() { "it said nothing".to_owned() } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_reduced_to_its_error() {
        let complaint = "--------------\nset global x=1\n--------------\n\n\
                         ERROR 1193 (HY000) at line 1: Unknown system variable 'x'\n";
        assert_eq!(essence(complaint), "ERROR 1193 (HY000) at line 1: Unknown system variable 'x'");
        assert_eq!(essence("mariadb: unknown option '--x'\n"), "mariadb: unknown option '--x'");
        assert_eq!(essence(""), "it said nothing");
    }

    #[test]
    fn no_password_is_on_the_command_line() {
        let access = MariaDbAccess {
            program: None,
            defaults_file: Some("/etc/secret.cnf".into()),
            socket: Some("/run/s".into()),
            user: Some("agent".to_owned()),
        };
        let command = access.command(Kind::MariaDb);
        let arguments: Vec<_> = command.as_std().get_args().map(|argument| argument.to_string_lossy()).collect();
        assert_eq!(arguments[0], "--defaults-extra-file=/etc/secret.cnf");
        assert!(arguments.iter().all(|argument| !argument.contains("password")), "{arguments:?}");
        assert!(command.as_std().get_envs().all(|(name, _)| name != "MYSQL_PWD"));
    }
}
