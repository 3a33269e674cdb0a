//! Reference and guide name every setting with its default.

use std::process::Command;

fn onecopy(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_onecopy")).args(arguments).output().expect("run onecopy");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Where settings are told.
const REFERENCE: &str =
    concat!(include_str!("../../../docs/reference/configuration.md"), include_str!("../../../docs/guide/memory.md"),);

#[test]
fn every_setting_is_told_with_its_default() {
    let settings = onecopy(&["config", "show"]);
    for (table, known) in [("router", ("listen", "\"127.0.0.1:6432\"")), ("memory", ("auto", "true"))] {
        let (_, begun) = settings.split_once(&format!("[{table}]\n")).expect("the table is shown");
        let pairs: Vec<(&str, &str)> =
            begun.lines().take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = ")).collect();
        assert!(pairs.contains(&known), "{settings}");
        for (name, default) in pairs {
            let row = REFERENCE.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
            let row = row.unwrap_or_else(|| panic!("there is no row for the setting {name} of {table}"));
            let told = row.trim_end_matches(" |").rsplit("| ").next().unwrap_or_default().trim_matches('`');
            assert_eq!(told, default.trim_matches('"'), "the default of {name} of {table}");
        }
    }
}
