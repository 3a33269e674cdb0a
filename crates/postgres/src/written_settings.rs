//! What people have written into a server's own configuration: `postgresql.conf`, and by `ALTER SYSTEM`.

use std::path::Path;

use crate::beneath::Directory;

/// Where `ALTER SYSTEM` writes; what is in it counts more than every other file.
const SYSTEM_FILE: &str = "postgresql.auto.conf";

/// Two files of a data directory, as far as one file can tell: files that they include are not followed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WrittenSettings {
    main: String,
    system: String,
}

impl WrittenSettings {
    /// Reads them; a data directory that is not there yet, or has none, has nothing written.
    pub fn read(data_directory: &Path) -> WrittenSettings {
        let text = |name: &str| {
            let read = Directory::open(data_directory).and_then(|directory| directory.read(Path::new(name)));
            let bytes = read.unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        WrittenSettings { main: text("postgresql.conf"), system: text(SYSTEM_FILE) }
    }

    /// What `postgresql.conf` says; [`crate::ServerOptions::settings`] count more.
    pub fn in_file(&self, name: &str) -> Option<String> {
        value_in(&self.main, name)
    }

    /// What `ALTER SYSTEM` has set; it counts more than [`crate::ServerOptions::settings`].
    pub fn by_alter_system(&self, name: &str) -> Option<String> {
        value_in(&self.system, name)
    }
}

/// The last value of a setting in the text of a configuration file.
///
/// Source: PostgreSQL, `src/backend/utils/misc/guc-file.l`: name, an optional `=`, a value that is a bare word or
/// quoted, a comment; names do not differ by case.
pub(crate) fn value_in(text: &str, name: &str) -> Option<String> {
    text.lines().rev().find_map(|line| {
        let line = line.trim_start();
        let end = line.find(|letter: char| !letter.is_ascii_alphanumeric() && !"_.$".contains(letter))?;
        let rest = line[end..].trim_start();
        let value = rest.strip_prefix('=').unwrap_or(rest).trim_start();
        line[..end].eq_ignore_ascii_case(name).then(|| unquoted(value))
    })
}

/// The value at the beginning of `text`.
fn unquoted(text: &str) -> String {
    let Some(quoted) = text.strip_prefix('\'') else {
        let end = text.find(|letter: char| letter.is_whitespace() || letter == '#').unwrap_or(text.len());
        return text[..end].to_owned();
    };
    let mut value = String::new();
    let mut letters = quoted.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' if letters.peek() == Some(&'\'') => value.extend(letters.next()),
            '\'' => break,
            // The other escapes are of letters that no value here has.
            '\\' => value.extend(letters.next()),
            _ => value.push(letter),
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_value_counts() {
        for (text, value) in [
            ("", None),
            ("#shared_buffers = 1GB", None),
            ("shared_buffers = 128MB\t\t# min 128kB", Some("128MB")),
            ("shared_buffers 1GB", Some("1GB")),
            ("  Shared_Buffers='2GB'#x", Some("2GB")),
            ("shared_buffers = 1GB\nshared_buffers = 2GB\nshared_buffers_more = 3GB", Some("2GB")),
            ("shared_buffers = 'it''s \\'so\\''", Some("it's 'so'")),
            ("shared_buffers =", Some("")),
        ] {
            assert_eq!(value_in(text, "shared_buffers").as_deref(), value, "{text:?}");
        }
    }

    #[test]
    fn both_files_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(WrittenSettings::read(directory.path()), WrittenSettings::default());
        std::fs::write(directory.path().join("postgresql.conf"), "work_mem = 1MB\n").expect("written");
        std::fs::write(directory.path().join(SYSTEM_FILE), "jit = 'off'\n").expect("written");
        let written = WrittenSettings::read(directory.path());
        assert_eq!((written.in_file("work_mem").as_deref(), written.in_file("jit")), (Some("1MB"), None));
        assert_eq!(
            (written.by_alter_system("jit").as_deref(), written.by_alter_system("work_mem")),
            (Some("off"), None)
        );
    }

    proptest! {
        #[test]
        fn our_own_files_are_understood(value in "[^\0\r\n]*") {
            let text = crate::Settings::new().set("a.b", &value).to_configuration_file().expect("valid");
            prop_assert_eq!(value_in(&text, "a.b"), Some(value));
        }

        #[test]
        fn no_text_is_too_strange(text in ".*", name in "[a-z]{1,3}") {
            let _ = value_in(&text, &name);
        }
    }
}
