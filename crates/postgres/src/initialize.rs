//! Making a data directory.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::beneath::{self, Directory};
use crate::service_user::sync_directory_of;
use crate::{PostgresError, ServerOptions, ServiceUser};

/// How much of a program's output an error quotes, in characters.
const OUTPUT_CHARACTERS_MAX: usize = 2000;
/// Holds the superuser's password while initdb runs.
const PASSWORD_FILE: &str = "initdb.password";

/// Runs initdb beside the final place and moves the result there: an interrupted run leaves nothing that could be taken
/// for a server.
pub(crate) async fn initialize(options: &ServerOptions) -> Result<(), PostgresError> {
    let data_directory = options.data_directory();
    if is_occupied(&data_directory) {
        return Err(PostgresError::DataDirectoryNotEmpty { path: data_directory });
    }
    // initdb takes the first line of the file and says nothing of the others.
    if options.password.is_empty() || options.password.contains(['\n', '\r', '\0']) {
        let reason = "the superuser's password is empty or has a line end or a zero byte";
        return Err(PostgresError::InvalidSetting { name: "password".to_owned(), reason });
    }
    options.user.create_directory(&options.home)?;
    let mut new_directory = data_directory.clone().into_os_string();
    new_directory.push(".new");
    let new_directory = PathBuf::from(new_directory);
    remove_if_there(&new_directory, &options.user)?;
    options.user.create_directory(&new_directory)?;
    let password_file = options.home.join(PASSWORD_FILE);
    options.user.write_file(&password_file, options.password.as_bytes(), 0o600)?;
    let result = run_initdb(options, &new_directory, &password_file).await;
    let removed = Directory::open_for(&options.home, &options.user)
        .and_then(|home| home.remove_file(Path::new(PASSWORD_FILE)))
        .map_err(PostgresError::file("remove", &password_file));
    result.and(removed)?;
    put_in_place(&new_directory, &data_directory)
}

async fn run_initdb(options: &ServerOptions, directory: &Path, password_file: &Path) -> Result<(), PostgresError> {
    let program = options.binaries.program("initdb");
    let mut command = options.user.command(&program);
    command.arg("--pgdata").arg(directory).arg("--pwfile").arg(password_file);
    command.arg("--username").arg(&options.superuser);
    command.args(["--data-checksums", "--encoding=UTF8", "--auth=scram-sha-256"]);
    // Order by code point: the same on every machine, whatever its C library. From 17 on PostgreSQL has it built in.
    if options.binaries.major_version() >= 17 {
        command.args(["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]);
    } else {
        command.arg("--locale=C.UTF-8");
    }
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    let output = command.output().await.map_err(|source| PostgresError::Spawn { program, source })?;
    succeeded("initdb", &output)
}

/// Turns a program's failure into an error with the end of what it printed.
pub(crate) fn succeeded(program: &str, output: &Output) -> Result<(), PostgresError> {
    if output.status.success() {
        return Ok(());
    }
    let printed = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let printed = String::from_utf8_lossy(&printed);
    let skipped = printed.chars().count().saturating_sub(OUTPUT_CHARACTERS_MAX);
    Err(PostgresError::Program {
        program: program.to_owned(),
        status: output.status.to_string(),
        output: printed.chars().skip(skipped).collect::<String>().trim().to_owned(),
    })
}

/// Whether something is there that must not be overwritten.
pub(crate) fn is_occupied(directory: &Path) -> bool {
    match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// Removes what an interrupted run left.
pub(crate) fn remove_if_there(directory: &Path, user: &ServiceUser) -> Result<(), PostgresError> {
    let absolute = std::path::absolute(directory).map_err(PostgresError::file("resolve", directory))?;
    beneath::remove_tree(&absolute, user).map_err(PostgresError::file("remove", directory))
}

/// Gives a finished directory its name; an empty directory of that name is replaced (rename(2)).
pub(crate) fn put_in_place(new_directory: &Path, directory: &Path) -> Result<(), PostgresError> {
    std::fs::rename(new_directory, directory).map_err(PostgresError::file("move into place", directory))?;
    sync_directory_of(directory)
}
