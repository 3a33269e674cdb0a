//! Hermitage's scenarios for PostgreSQL (source: github.com/ept/hermitage, `postgres.md`), all at SERIALIZABLE.
//!
//! One server alone is the control: the same transactions must commit through the router, whether those that only read
//! are declared READ ONLY, and so read on a follower, or not.

use onecopy_tests::cluster::TestCluster;
use onecopy_tests::schedule::{Program, Scenario, SerialChecker, Stage};
use onecopy_tests::servers::LEADER;

const READ_1: &str = "SELECT * FROM test WHERE id = 1";
const READ_2: &str = "SELECT * FROM test WHERE id = 2";
const READ_ALL: &str = "SELECT * FROM test ORDER BY id";
const READ_BOTH: &str = "SELECT * FROM test WHERE id IN (1, 2) ORDER BY id";
const READ_THIRDS: &str = "SELECT * FROM test WHERE value % 3 = 0 ORDER BY id";

struct Case {
    name: &'static str,
    programs: Vec<Program>,
    schedule: &'static str,
    /// Who may commit: any one of these sets of letters.
    committed: &'static [&'static str],
}

fn cases() -> Vec<Case> {
    let update = Program::update;
    let read = Program::read;
    vec![
        Case {
            name: "G0 write cycles",
            programs: vec![
                update('1', &["UPDATE test SET value = 11 WHERE id = 1", "UPDATE test SET value = 21 WHERE id = 2"]),
                update('2', &["UPDATE test SET value = 12 WHERE id = 1", "UPDATE test SET value = 22 WHERE id = 2"]),
            ],
            schedule: "1 2 1 1 22",
            committed: &["1"],
        },
        Case {
            name: "G1a aborted reads",
            programs: vec![
                update('1', &["UPDATE test SET value = 101 WHERE id = 1"]).rolled_back(),
                read('2', &[READ_ALL, READ_ALL]),
            ],
            schedule: "1 2 1 22",
            committed: &["2"],
        },
        Case {
            name: "G1b intermediate reads",
            programs: vec![
                update('1', &["UPDATE test SET value = 101 WHERE id = 1", "UPDATE test SET value = 11 WHERE id = 1"]),
                read('2', &[READ_ALL, READ_ALL]),
            ],
            schedule: "1 2 11 22",
            committed: &["12"],
        },
        Case {
            name: "G1c circular information flow",
            programs: vec![
                update('1', &["UPDATE test SET value = 11 WHERE id = 1", READ_2]),
                update('2', &["UPDATE test SET value = 22 WHERE id = 2", READ_1]),
            ],
            schedule: "1 2 1 2 1 2",
            committed: &["1", "2"],
        },
        Case {
            name: "OTV observed transaction vanishes",
            programs: vec![
                update('1', &["UPDATE test SET value = 11 WHERE id = 1", "UPDATE test SET value = 19 WHERE id = 2"]),
                update('2', &["UPDATE test SET value = 12 WHERE id = 1", "UPDATE test SET value = 18 WHERE id = 2"]),
                read('3', &[READ_1, READ_2, READ_2, READ_1]),
            ],
            schedule: "11 2 1 3 2 3 2 3 3 3",
            committed: &["13"],
        },
        Case {
            name: "PMP predicate-many-preceders",
            programs: vec![
                read('1', &["SELECT * FROM test WHERE value = 30", READ_THIRDS]),
                update('2', &["INSERT INTO test (id, value) VALUES (3, 30)"]),
            ],
            schedule: "1 22 11",
            committed: &["12"],
        },
        Case {
            name: "PMP for write predicates",
            programs: vec![
                update('1', &["UPDATE test SET value = value + 10"]),
                update('2', &["DELETE FROM test WHERE value = 20", "SELECT * FROM test WHERE value = 20"]),
            ],
            schedule: "1 2 1 22",
            committed: &["1"],
        },
        Case {
            name: "P4 lost update",
            programs: vec![
                update('1', &[READ_1, "UPDATE test SET value = 11 WHERE id = 1"]),
                update('2', &[READ_1, "UPDATE test SET value = 11 WHERE id = 1"]),
            ],
            schedule: "1 2 1 2 1 2",
            committed: &["1"],
        },
        Case {
            name: "G-single read skew",
            programs: vec![
                read('1', &[READ_1, READ_2]),
                update(
                    '2',
                    &[
                        READ_1,
                        READ_2,
                        "UPDATE test SET value = 12 WHERE id = 1",
                        "UPDATE test SET value = 18 WHERE id = 2",
                    ],
                ),
            ],
            schedule: "1 22222 11",
            committed: &["12"],
        },
        Case {
            name: "G-single with predicate dependencies",
            programs: vec![
                read('1', &["SELECT * FROM test WHERE value % 5 = 0 ORDER BY id", READ_THIRDS]),
                update('2', &["UPDATE test SET value = 12 WHERE value = 10"]),
            ],
            schedule: "1 22 11",
            committed: &["12"],
        },
        Case {
            name: "G-single with a write predicate",
            programs: vec![
                update('1', &[READ_1, "DELETE FROM test WHERE value = 20"]),
                update(
                    '2',
                    &[READ_ALL, "UPDATE test SET value = 12 WHERE id = 1", "UPDATE test SET value = 18 WHERE id = 2"],
                ),
            ],
            schedule: "1 2222 11",
            committed: &["2"],
        },
        Case {
            name: "G2-item write skew",
            programs: vec![
                update('1', &[READ_BOTH, "UPDATE test SET value = 11 WHERE id = 1"]),
                update('2', &[READ_BOTH, "UPDATE test SET value = 21 WHERE id = 2"]),
            ],
            schedule: "1 2 1 2 1 2",
            committed: &["1", "2"],
        },
        Case {
            name: "G2 anti-dependency cycles",
            programs: vec![
                update('1', &[READ_THIRDS, "INSERT INTO test (id, value) VALUES (3, 30)"]),
                update('2', &[READ_THIRDS, "INSERT INTO test (id, value) VALUES (4, 42)"]),
            ],
            schedule: "1 2 1 2 1 2",
            committed: &["1", "2"],
        },
        Case {
            name: "G2 with two anti-dependency edges",
            programs: vec![
                update('1', &[READ_ALL, "UPDATE test SET value = 0 WHERE id = 1"]),
                update('2', &["UPDATE test SET value = value + 5 WHERE id = 2"]),
                read('3', &[READ_ALL]),
            ],
            schedule: "1 22 33 11",
            committed: &["23"],
        },
    ]
}

/// Plays every case; reading programs run on `server`, declared READ ONLY or not.
async fn play_all(cluster: &TestCluster, server: &str, declared: bool) -> anyhow::Result<()> {
    let mut scenario = Scenario {
        tables: "CREATE TABLE test (id int PRIMARY KEY, value int)",
        reset: "BEGIN; DELETE FROM test; INSERT INTO test (id, value) VALUES (1, 10), (2, 20); COMMIT;",
        final_state: READ_ALL,
        programs: Vec::new(),
    };
    for case in cases() {
        scenario.programs = case.programs;
        for program in &mut scenario.programs {
            program.read_only &= declared;
        }
        let stage = Stage::open(cluster, &scenario, &[server], Some("strict")).await?;
        stage.create_tables().await?;
        let outcome = stage.play(case.schedule).await?;
        let order = SerialChecker::open(cluster, &scenario).await?.explain(&outcome, true).await?;
        assert!(order.is_some(), "{} (reads on {server}): {outcome:?}", case.name);
        let committed = outcome.committed(&scenario);
        assert!(case.committed.contains(&committed.as_str()), "{} (reads on {server}): {outcome:?}", case.name);
        for program in outcome.programs.iter().filter_map(|program| program.error_code()) {
            assert_eq!(program, "40001", "{}: {outcome:?}", case.name);
        }
        stage.drop_tables().await?;
    }
    Ok(())
}

#[tokio::test]
async fn control_hermitage_on_one_server() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(0).await?;
    play_all(&cluster, LEADER, true).await?;
    Ok(())
}

/// Hermitage's scenarios (G0 to G2) commit what one PostgreSQL server commits at SERIALIZABLE.
///
/// Spec: I1
#[tokio::test]
async fn r8_hermitage_commits_through_the_router_what_one_server_commits() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |_| {}).await?;
    play_all(&cluster, "follower-1", true).await?;
    play_all(&cluster, LEADER, true).await?;
    play_all(&cluster, LEADER, false).await?;
    Ok(())
}
