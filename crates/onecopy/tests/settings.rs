//! The user's guide names every option and every setting.

use std::process::Command;

fn onecopy(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_onecopy")).args(arguments).output().expect("run onecopy");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Words of `text` that begin with `--`.
fn options(text: &str) -> Vec<&str> {
    let word =
        |text: &str| text.find(|letter: char| !letter.is_ascii_lowercase() && letter != '-').unwrap_or(text.len());
    text.match_indices(" --")
        .map(|(at, _)| &text[at + 1..][..word(&text[at + 1..])])
        .filter(|option| option.len() > 2)
        .collect()
}

/// Every command that people use.
const COMMANDS: [&[&str]; 32] = [
    &["up"],
    &["status"],
    &["scale"],
    &["reinit"],
    &["clone"],
    &["down"],
    &["psql"],
    &["dsn"],
    &["memory", "status"],
    &["memory", "set"],
    &["memory", "auto"],
    &["memory", "history"],
    &["memory", "agent"],
    &["disk", "create"],
    &["disk", "info"],
    &["disk", "check"],
    &["disk", "snapshot"],
    &["disk", "export"],
    &["disk", "serve"],
    &["disk", "limit"],
    &["disk", "stop"],
    &["vm", "create"],
    &["vm", "list"],
    &["vm", "start"],
    &["vm", "pause"],
    &["vm", "resume"],
    &["vm", "stop"],
    &["vm", "console"],
    &["vm", "exec"],
    &["vm", "delete"],
    &["router"],
    &["host"],
];

/// All that a user is told of commands, options and settings.
const GUIDE: &str = concat!(
    include_str!("../../../docs/guide/cluster.md"),
    include_str!("../../../docs/guide/clone.md"),
    include_str!("../../../docs/guide/memory.md"),
    include_str!("../../../docs/guide/disk.md"),
    include_str!("../../../docs/guide/machines.md"),
    include_str!("../../../docs/guide/router.md"),
    include_str!("../../../docs/reference/configuration.md"),
);

#[test]
fn the_guide_names_every_command_option_and_setting() {
    for command in COMMANDS {
        let name = command.join(" ");
        assert!(GUIDE.contains(&format!("onecopy {name}")), "the guide does not name {name}");
        let help = onecopy(&[command, &["--help"]].concat());
        let options = options(&help);
        assert!(options.contains(&"--help"), "{help}");
        for option in options.into_iter().filter(|option| *option != "--help") {
            assert!(GUIDE.contains(option), "the guide does not name {option} of {name}");
        }
    }
    let settings = onecopy(&["config", "show"]);
    for (table, known) in [("router", ("listen", "\"127.0.0.1:6432\"")), ("memory", ("auto", "true"))] {
        let (_, begun) = settings.split_once(&format!("[{table}]\n")).expect("the table is shown");
        let pairs: Vec<(&str, &str)> =
            begun.lines().take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = ")).collect();
        assert!(pairs.contains(&known), "{settings}");
        for (name, default) in pairs {
            let row = GUIDE.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
            let row = row.unwrap_or_else(|| panic!("the guide has no row for the setting {name} of {table}"));
            let told = row.trim_end_matches(" |").rsplit("| ").next().unwrap_or_default().trim_matches('`');
            assert_eq!(told, default.trim_matches('"'), "the default of {name} of {table}");
        }
    }
}
