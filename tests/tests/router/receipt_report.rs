//! All interleavings of PostgreSQL's isolation test `receipt-report` (source: PostgreSQL,
//! `src/test/isolation/specs/receipt-report.spec`): the daily report of a closed day must not miss a receipt.

use onecopy_tests::cluster::TestCluster;
use onecopy_tests::schedule::{Program, Scenario, SerialChecker, Stage, all_schedules};
use onecopy_tests::servers::LEADER;

/// Seven steps, of which two, two and three keep their order.
const PERMUTATIONS: usize = 210;
/// As PostgreSQL's own test says: only where s1 overlaps both others and s2 commits before s3 reads.
const ANOMALIES_EXPECTED: usize = 6;

fn scenario() -> Scenario {
    Scenario {
        tables: "CREATE TABLE ctl (k text NOT NULL PRIMARY KEY, deposit_date date NOT NULL);
                 CREATE TABLE receipt (receipt_no int NOT NULL PRIMARY KEY, deposit_date date NOT NULL, \
                 amount numeric(13, 2));",
        reset: "BEGIN; DELETE FROM ctl; DELETE FROM receipt;
                INSERT INTO ctl VALUES ('receipt', DATE '2008-12-22');
                INSERT INTO receipt VALUES (1, DATE '2008-12-22', 1.00), (2, DATE '2008-12-22', 2.00); COMMIT;",
        final_state: "SELECT c.deposit_date, r.* FROM ctl c CROSS JOIN receipt r ORDER BY receipt_no",
        programs: vec![
            Program::update(
                '1',
                &["INSERT INTO receipt VALUES (3, (SELECT deposit_date FROM ctl WHERE k = 'receipt'), 4.00)"],
            ),
            Program::update('2', &["UPDATE ctl SET deposit_date = DATE '2008-12-23' WHERE k = 'receipt'"]),
            Program::read(
                '3',
                &[
                    "SELECT * FROM ctl WHERE k = 'receipt'",
                    "SELECT * FROM receipt WHERE deposit_date = DATE '2008-12-22' ORDER BY receipt_no",
                ],
            ),
        ],
    }
}

/// Schedules whose outcome no serial order explains.
async fn anomalies(cluster: &TestCluster, server: &str) -> anyhow::Result<Vec<String>> {
    let scenario = scenario();
    let stage = Stage::open(cluster, &scenario, &[server], Some("strict")).await?;
    stage.create_tables().await?;
    let mut checker = SerialChecker::open(cluster, &scenario).await?;
    let mut unexplained = Vec::new();
    let schedules = all_schedules(&scenario);
    assert_eq!(schedules.len(), PERMUTATIONS);
    for schedule in schedules {
        let outcome = stage.play(&schedule).await?;
        // Who refuses everything is serializable, too.
        let refused = outcome.programs.iter().filter(|program| !program.committed).count();
        assert!(refused <= 1, "{schedule}: {outcome:?}");
        if checker.explain(&outcome, true).await?.is_none() {
            unexplained.push(schedule);
        }
    }
    stage.drop_tables().await?;
    Ok(unexplained)
}

#[tokio::test]
async fn control_receipt_report_on_plain_standbys_shows_the_anomaly() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(1).await?;
    let unexplained = anomalies(&cluster, "follower-1").await?;
    assert_eq!(unexplained.len(), ANOMALIES_EXPECTED, "{unexplained:?}");
    Ok(())
}

#[tokio::test]
async fn control_receipt_report_on_the_leader_alone_is_serializable() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(0).await?;
    assert_eq!(anomalies(&cluster, LEADER).await?, Vec::<String>::new());
    Ok(())
}

/// All 210 permutations of PostgreSQL's `receipt-report` are serializable in real-time order, with the report on any
/// server.
///
/// Spec: I1
#[tokio::test]
async fn r9_receipt_report_is_serializable_in_all_permutations_on_every_server() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    for server in [LEADER, "follower-1", "follower-2"] {
        assert_eq!(anomalies(&cluster, server).await?, Vec::<String>::new(), "reports on {server}");
    }
    Ok(())
}
