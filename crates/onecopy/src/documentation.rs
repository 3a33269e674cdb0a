//! The commands that README and guide name are commands of this program, and of the Makefile.

use std::path::{Path, PathBuf};

use clap::CommandFactory;

use crate::CommandLine;

/// README and all pages of guide and reference, with what they say.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let listed = ["docs/guide", "docs/reference"].map(|directory| std::fs::read_dir(root.join(directory)).unwrap());
    let pages = listed.into_iter().flatten().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|kind| kind == "md"));
    pages.chain([root.join("README.md")]).map(|path| (path.clone(), std::fs::read_to_string(&path).unwrap())).collect()
}

/// The commands of a page's blocks for a shell, one a line, without comments.
fn shell_commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut is_shell = false;
    for line in text.lines() {
        match line.trim_start().strip_prefix("```") {
            Some(kind) => is_shell = kind == "sh",
            None if is_shell => commands.push(line.split(" #").next().unwrap_or_default().trim().to_owned()),
            None => {}
        }
    }
    commands
}

/// What stands between back quotes, outside of blocks.
fn quoted(text: &str) -> Vec<String> {
    let mut is_block = false;
    let prose = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_block ^= is_fence;
        !is_fence && !is_block
    });
    let prose: Vec<&str> = prose.collect();
    prose.join(" ").split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A command's words, as a shell splits them: variables before it and quotes are gone.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for letter in command.chars() {
        match (quote, letter) {
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), close) if open == close => quote = None,
            (None, ' ') => words.push(String::new()),
            _ => words.last_mut().unwrap().push(letter),
        }
    }
    let is_variable = |word: &String| word.split_once('=').is_some_and(|(name, _)| name.to_uppercase() == name);
    words.into_iter().filter(|word| !word.is_empty()).skip_while(is_variable).collect()
}

/// What of a quoted command is none: it may leave out what it needs, and tell of one option alone.
fn unknown_in(command: &str) -> Option<String> {
    let mut known = CommandLine::command();
    known.build();
    for word in words(command).into_iter().skip(1).take_while(|word| word != "--") {
        if let Some(below) = known.find_subcommand(&word) {
            known = below.clone();
        } else if let Some(option) = word.strip_prefix("--") {
            let name = option.split(['=', '[']).next().unwrap_or_default();
            if !known.get_arguments().any(|argument| argument.get_long() == Some(name)) {
                return Some(word);
            }
        } else if known.has_subcommands() && known.get_positionals().next().is_none() {
            return Some(word);
        }
    }
    None
}

#[test]
fn the_commands_of_readme_and_guide_are_commands() {
    let makefile = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Makefile")).unwrap();
    let mut seen = (0, 0, 0);
    for (page, text) in pages() {
        for command in shell_commands(&text) {
            let words = words(&command);
            let found = match words.first().map(String::as_str) {
                Some("onecopy") => {
                    seen.0 += 1;
                    <CommandLine as clap::Parser>::try_parse_from(&words).err().map(|error| error.to_string())
                }
                Some("make") => {
                    seen.1 += 1;
                    let target = words.get(1).map(|target| format!("\n{target}:")).unwrap_or_default();
                    (!makefile.contains(&target)).then(|| "the Makefile has no such target".to_owned())
                }
                _ => None,
            };
            assert_eq!(found, None, "{}: {command}", page.display());
        }
        for command in quoted(&text).iter().filter(|quoted| quoted.starts_with("onecopy ")) {
            seen.2 += 1;
            assert_eq!(unknown_in(command), None, "{}: `{command}`", page.display());
        }
    }
    assert!(seen.0 > 20 && seen.1 > 1 && seen.2 > 50, "{seen:?}: the pages are read otherwise than they are written");
}

/// Each command that a person gives, by its words, with its options: those that have no commands below, and are not for
/// processes of Onecopy alone.
fn commands(command: &clap::Command, name: &str) -> Vec<(String, Vec<String>)> {
    if !command.has_subcommands() {
        let options = command.get_arguments().filter(|argument| !argument.is_hide_set());
        let options = options.filter_map(|argument| argument.get_long()).filter(|option| *option != "help");
        return vec![(name.to_owned(), options.map(|option| format!("--{option}")).collect())];
    }
    let below = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    below.flat_map(|below| commands(below, &format!("{name} {}", below.get_name()))).collect()
}

#[test]
fn the_guide_names_every_command_and_option() {
    let mut known = CommandLine::command();
    known.build();
    let guide: String = pages().into_iter().map(|(_, text)| text).collect();
    let commands = commands(&known, "onecopy");
    assert!(commands.len() > 30, "{commands:?}");
    let names_whole = |option: &str| {
        let is_end = |rest: &str| !rest.starts_with(|letter: char| letter.is_ascii_lowercase() || letter == '-');
        guide.match_indices(option).any(|(at, _)| is_end(&guide[at + option.len()..]))
    };
    let unnamed: Vec<String> = commands
        .into_iter()
        .flat_map(|(name, options)| {
            let command = (!guide.contains(&name)).then(|| name.clone());
            let options = options.into_iter().filter(|option| !names_whole(option));
            command.into_iter().chain(options.map(move |option| format!("{name} {option}")))
        })
        .collect();
    assert!(unnamed.is_empty(), "README, guide and reference do not name {unnamed:#?}");
}

#[test]
fn what_is_no_command_is_found() {
    assert_eq!(unknown_in("onecopy disk serve --metrics"), None);
    assert_eq!(unknown_in("onecopy memory auto on|off [INSTANCE]"), None);
    assert_eq!(unknown_in("onecopy psql -- --nothing"), None);
    assert_eq!(unknown_in("onecopy disk serve --nothing"), Some("--nothing".to_owned()));
    assert_eq!(unknown_in("onecopy disk burn"), Some("burn".to_owned()));
    assert_eq!(words("A=1 onecopy psql -c 'SHOW  x'"), ["onecopy", "psql", "-c", "SHOW  x"]);
}
