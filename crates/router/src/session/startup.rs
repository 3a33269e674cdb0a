//! What a client asks for in its start-up packet.

use bytes::BufMut;

use crate::wire::{Channel, SqlError, begin_message, end_message, sqlstate};

/// What a client asks for in its start-up packet.
pub(super) struct StartupOptions {
    pub user: String,
    pub database: String,
    pub settings: Vec<(String, String)>,
}

impl StartupOptions {
    pub fn of(parameters: Vec<(String, String)>) -> Result<StartupOptions, SqlError> {
        let mut startup = StartupOptions { user: String::new(), database: String::new(), settings: Vec::new() };
        let mut from_options = Vec::new();
        for (name, value) in parameters {
            match name.as_str() {
                "user" => startup.user = value,
                "database" => startup.database = value,
                "replication" if !matches!(value.as_str(), "false" | "off" | "no" | "0") => {
                    return Err(SqlError::fatal(
                        sqlstate::FEATURE_NOT_SUPPORTED,
                        "replication connections are not supported through the router",
                    )
                    .hint("Connect to the leader itself."));
                }
                "replication" => {}
                "options" => from_options = options(&value)?,
                name if name.starts_with("_pq_.") => {}
                name => startup.settings.push((name.to_ascii_lowercase(), value)),
            }
        }
        // As with PostgreSQL: those of the options are set first, wherever they stand, so the others count.
        startup.settings.splice(..0, from_options);
        if startup.user.is_empty() {
            return Err(SqlError::fatal(
                sqlstate::INVALID_AUTHORIZATION,
                "no PostgreSQL user name specified in startup packet",
            ));
        }
        if startup.database.is_empty() {
            startup.database = startup.user.clone();
        }
        Ok(startup)
    }
}

/// `-c name=value` and `--name=value`, with backslashes before blanks inside values.
fn options(text: &str) -> Result<Vec<(String, String)>, SqlError> {
    let mut words = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => words.last_mut().expect("never empty").extend(characters.next()),
            character if character.is_whitespace() => words.push(String::new()),
            character => words.last_mut().expect("never empty").push(character),
        }
    }
    let mut settings = Vec::new();
    let mut words = words.into_iter().filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        let assignment = if word == "-c" {
            words.next()
        } else {
            word.strip_prefix("--").or_else(|| word.strip_prefix("-c")).map(str::to_owned)
        };
        match assignment.as_deref().and_then(|assignment| assignment.split_once('=')) {
            Some((name, value)) => settings.push((name.replace('-', "_").to_ascii_lowercase(), value.to_owned())),
            None => {
                return Err(SqlError::fatal(
                    sqlstate::SYNTAX_ERROR,
                    format!("invalid command-line argument for server process: {word}"),
                ));
            }
        }
    }
    Ok(settings)
}

/// Later minor versions and protocol options are answered by what this router speaks.
pub(super) fn negotiate(client: &mut Channel, minor: u16, parameters: &[(String, String)]) {
    let options: Vec<&str> =
        parameters.iter().map(|(name, _)| name.as_str()).filter(|name| name.starts_with("_pq_.")).collect();
    if minor == 0 && options.is_empty() {
        return;
    }
    let start = begin_message(&mut client.output, b'v');
    client.output.put_u32(3 << 16);
    client.output.put_u32(options.len() as u32);
    for option in options {
        client.output.put_slice(option.as_bytes());
        client.output.put_u8(0);
    }
    end_message(&mut client.output, start);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_postgresql_reads_them() {
        let settings = options(r"-c geqo=off --work-mem=4MB -c search_path=a\ b").expect("well formed");
        let expected = [("geqo", "off"), ("work_mem", "4MB"), ("search_path", "a b")];
        assert_eq!(settings, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert!(options("-x").is_err());
    }

    /// Spec: I4
    #[test]
    fn a_parameter_counts_more_than_the_same_among_the_options() {
        let packet = [("client_encoding", "UTF8"), ("options", "-c client_encoding=LATIN1"), ("user", "u")];
        let startup =
            StartupOptions::of(packet.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()).unwrap();
        let values: Vec<&str> = startup.settings.iter().map(|(_, value)| value.as_str()).collect();
        assert_eq!(values, ["LATIN1", "UTF8"]);
    }

    #[test]
    fn a_replication_connection_is_refused() {
        let parameters = vec![("user".to_owned(), "u".to_owned()), ("replication".to_owned(), "database".to_owned())];
        assert_eq!(StartupOptions::of(parameters).err().map(|error| error.code), Some("0A000".to_owned()));
    }
}
