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

#[test]
fn the_guide_names_every_command_option_and_setting() {
    let guide = include_str!("../../../docs/guide.md");
    for command in ["up", "status", "down", "psql", "dsn", "router"] {
        assert!(guide.contains(&format!("onecopy {command}")), "the guide does not name {command}");
        let help = onecopy(&[command, "--help"]);
        let options = options(&help);
        assert!(options.contains(&"--help"), "{help}");
        for option in options.into_iter().filter(|option| *option != "--help") {
            assert!(guide.contains(option), "the guide does not name {option} of {command}");
        }
    }
    let settings = onecopy(&["config", "show"]);
    let router = settings.split("\n[leader]").next().expect("the router comes first");
    let pairs: Vec<(&str, &str)> = router.lines().filter_map(|line| line.split_once(" = ")).collect();
    assert!(pairs.contains(&("listen", "\"127.0.0.1:6432\"")), "{settings}");
    for (name, default) in pairs {
        let row = guide.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("the guide has no row for the setting {name}"));
        let told = row.trim_end_matches(" |").rsplit("| ").next().unwrap_or_default().trim_matches('`');
        assert_eq!(told, default.trim_matches('"'), "the default of {name}");
    }
}
