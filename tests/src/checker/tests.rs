//! Hand-made histories, one for each anomaly; `adya` must see each as we do.

use super::*;

/// `(session, invoked, completed, ending, operations)`.
type Row = (usize, u64, u64, Ending, Vec<Operation>);

fn history(rows: Vec<Row>) -> History {
    let transactions = rows
        .into_iter()
        .map(|(session, invoked, completed, ending, operations)| Transaction {
            session,
            invoked,
            completed,
            ending,
            operations,
            certified: false,
        })
        .collect();
    History { transactions }
}

fn append(key: i64, value: i64) -> Operation {
    Operation::Append { key, value }
}

fn read(key: i64, values: &[i64]) -> Operation {
    Operation::Read { key, values: values.to_vec() }
}

/// Transactions of one session each, all at the same time.
fn concurrent(operations: Vec<Vec<Operation>>) -> History {
    let rows = operations.into_iter().enumerate();
    history(
        rows.map(|(number, operations)| (number, number as u64, 100 + number as u64, Ending::Committed, operations))
            .collect(),
    )
}

fn adya_accepts(history: &History, level: Level) -> bool {
    let parsed = adya::History::from_json(&history.to_elle_json_lines()).expect("our own form parses");
    let options = adya::Opts { models: vec![level.adya_name().to_owned()], ..adya::Opts::default() };
    adya::check(&parsed, adya::Workload::ListAppend, &options).valid == adya::Valid::True
}

/// Our verdict, after `adya` agreed on whether there is a violation.
fn verdict(history: &History, level: Level) -> Result<(), Violation> {
    let ours = check(history, level);
    assert_eq!(ours.is_ok(), adya_accepts(history, level), "adya disagrees: {ours:?}");
    ours
}

fn cycle_reasons(history: &History, level: Level) -> (Level, Vec<Reason>) {
    match verdict(history, level) {
        Err(Violation::Cycle { level, steps }) => (level, steps.into_iter().map(|(_, reason, _)| reason).collect()),
        other => panic!("expected a cycle, got {other:?}"),
    }
}

#[test]
fn a_serial_history_is_strictly_serializable() {
    let serial = history(vec![
        (0, 0, 1, Ending::Committed, vec![append(1, 1), read(1, &[1])]),
        (1, 2, 3, Ending::Committed, vec![read(1, &[1]), append(1, 2)]),
        (0, 4, 5, Ending::Committed, vec![read(1, &[1, 2]), read(2, &[])]),
    ]);
    assert_eq!(verdict(&serial, Level::StrictSerializable), Ok(()));
}

#[test]
fn g0_write_cycle() {
    let (level, reasons) = cycle_reasons(
        &concurrent(vec![
            vec![append(1, 1), append(2, 1)],
            vec![append(1, 2), append(2, 2)],
            vec![read(1, &[1, 2]), read(2, &[2, 1])],
        ]),
        Level::Serializable,
    );
    assert_eq!(level, Level::Serializable);
    assert!(reasons.iter().all(|reason| matches!(reason, Reason::WriteWrite { .. })), "{reasons:?}");
}

#[test]
fn g1a_aborted_read() {
    let aborted = history(vec![
        (0, 0, 10, Ending::Aborted, vec![append(1, 1)]),
        (1, 1, 11, Ending::Committed, vec![read(1, &[1])]),
        (2, 2, 12, Ending::Committed, vec![append(2, 1), read(2, &[1])]),
        (3, 13, 14, Ending::Committed, vec![read(2, &[1])]),
    ]);
    let expected = Violation::AbortedRead { reader: 1, writer: 0, key: 1, value: 1 };
    assert_eq!(verdict(&aborted, Level::Serializable), Err(expected));
}

#[test]
fn g1b_intermediate_read() {
    let intermediate = concurrent(vec![vec![append(1, 1), append(1, 2)], vec![read(1, &[1])], vec![read(1, &[1, 2])]]);
    let expected = Violation::IntermediateRead { reader: 1, writer: 0, key: 1, value: 1 };
    assert_eq!(verdict(&intermediate, Level::Serializable), Err(expected));
}

#[test]
fn g1c_circular_information_flow() {
    let (_, reasons) = cycle_reasons(
        &concurrent(vec![vec![append(1, 1), read(2, &[1])], vec![append(2, 1), read(1, &[1])]]),
        Level::Serializable,
    );
    assert!(reasons.iter().all(|reason| matches!(reason, Reason::WriteRead { .. })), "{reasons:?}");
}

#[test]
fn g_single_read_skew() {
    let (_, reasons) = cycle_reasons(
        &concurrent(vec![
            vec![read(1, &[]), read(2, &[1])],
            vec![append(1, 1), append(2, 1)],
            vec![read(1, &[1]), read(2, &[1])],
        ]),
        Level::Serializable,
    );
    let read_writes = reasons.iter().filter(|reason| matches!(reason, Reason::ReadWrite { .. })).count();
    assert_eq!((reasons.len(), read_writes), (2, 1));
}

#[test]
fn g2_write_skew() {
    let (_, reasons) = cycle_reasons(
        &concurrent(vec![
            vec![read(1, &[]), append(2, 1)],
            vec![read(2, &[]), append(1, 1)],
            vec![read(1, &[1]), read(2, &[1])],
        ]),
        Level::Serializable,
    );
    assert!(reasons.iter().all(|reason| matches!(reason, Reason::ReadWrite { .. })), "{reasons:?}");
}

#[test]
fn read_only_anomaly_of_a_stale_certifier() {
    // The closed-batch case: REPORT sees CLOSE but not NEW, NEW did not see CLOSE.
    let (_, reasons) = cycle_reasons(
        &concurrent(vec![
            vec![read(1, &[]), append(2, 1)],
            vec![append(1, 1)],
            vec![read(1, &[1]), read(2, &[])],
            vec![read(1, &[1]), read(2, &[1])],
        ]),
        Level::Serializable,
    );
    assert_eq!(reasons.len(), 3);
}

#[test]
fn long_fork_of_two_readers() {
    let (_, reasons) = cycle_reasons(
        &concurrent(vec![
            vec![append(1, 1)],
            vec![append(2, 1)],
            vec![read(1, &[1]), read(2, &[])],
            vec![read(1, &[]), read(2, &[1])],
        ]),
        Level::Serializable,
    );
    assert_eq!(reasons.len(), 4);
}

#[test]
fn lost_update_of_two_appends_nobody_can_order() {
    let lost =
        concurrent(vec![vec![read(1, &[]), append(1, 1)], vec![read(1, &[]), append(1, 2)], vec![read(1, &[1, 2])]]);
    assert!(matches!(verdict(&lost, Level::Serializable), Err(Violation::Cycle { .. })));
}

#[test]
fn stale_read_of_own_session_breaks_session_order_only() {
    let stale = history(vec![
        (0, 0, 1, Ending::Committed, vec![append(1, 1)]),
        (0, 2, 3, Ending::Committed, vec![read(1, &[])]),
        (1, 4, 5, Ending::Committed, vec![read(1, &[1])]),
    ]);
    assert_eq!(verdict(&stale, Level::Serializable), Ok(()));
    let (level, reasons) = cycle_reasons(&stale, Level::SessionSerializable);
    assert_eq!(level, Level::SessionSerializable);
    assert!(reasons.contains(&Reason::Session));
}

#[test]
fn reads_of_a_session_that_go_back_break_session_order_only() {
    let back = history(vec![
        (0, 0, 9, Ending::Committed, vec![append(1, 1)]),
        (1, 1, 2, Ending::Committed, vec![read(1, &[1])]),
        (1, 3, 4, Ending::Committed, vec![read(1, &[])]),
    ]);
    assert_eq!(verdict(&back, Level::Serializable), Ok(()));
    assert_eq!(cycle_reasons(&back, Level::SessionSerializable).0, Level::SessionSerializable);
}

#[test]
fn stale_read_of_another_session_breaks_real_time_only() {
    let stale = history(vec![
        (0, 0, 1, Ending::Committed, vec![append(1, 1)]),
        (1, 2, 3, Ending::Committed, vec![append(2, 1)]),
        (2, 4, 5, Ending::Committed, vec![read(1, &[])]),
        (3, 6, 7, Ending::Committed, vec![read(1, &[1]), read(2, &[1])]),
    ]);
    assert_eq!(verdict(&stale, Level::SessionSerializable), Ok(()));
    let (level, reasons) = cycle_reasons(&stale, Level::StrictSerializable);
    assert_eq!(level, Level::StrictSerializable);
    assert!(reasons.contains(&Reason::RealTime));
}

#[test]
fn reads_must_agree_on_one_order() {
    let incompatible =
        concurrent(vec![vec![append(1, 1)], vec![append(1, 2)], vec![read(1, &[1, 2])], vec![read(1, &[2, 1])]]);
    let violation = verdict(&incompatible, Level::Serializable).expect_err("two orders");
    assert!(matches!(violation, Violation::IncompatibleOrder { reader: 3, key: 1, .. }), "{violation}");
}

#[test]
fn a_value_stands_once_and_has_an_author() {
    let twice = concurrent(vec![vec![append(1, 1)], vec![read(1, &[1, 1])], vec![read(1, &[1])]]);
    let expected = Violation::DuplicateElement { reader: 1, key: 1, value: 1 };
    assert_eq!(verdict(&twice, Level::Serializable), Err(expected));
    let nobodys = concurrent(vec![vec![append(1, 1)], vec![read(1, &[5])]]);
    let expected = Violation::UnknownElement { reader: 1, key: 1, value: 5 };
    assert_eq!(check(&nobodys, Level::Serializable), Err(expected));
}

#[test]
fn a_transaction_sees_its_own_appends_and_one_snapshot() {
    for operations in
        [vec![append(1, 1), read(1, &[])], vec![read(1, &[]), read(1, &[2])], vec![append(1, 1), read(1, &[1, 2])]]
    {
        let internal = concurrent(vec![operations, vec![append(1, 2)], vec![append(3, 1), read(3, &[1])]]);
        let violation = check(&internal, Level::Serializable).expect_err("contradicts itself");
        assert!(matches!(violation, Violation::Internal { reader: 0, key: 1, .. }), "{violation}");
    }
    let good = concurrent(vec![vec![append(1, 1), read(1, &[2, 1]), append(1, 3)], vec![append(1, 2)]]);
    assert_eq!(verdict(&good, Level::Serializable), Ok(()));
}

#[test]
fn a_commit_without_answer_counts_when_it_was_seen_and_precedes_nobody() {
    let seen = history(vec![
        (0, 0, 1, Ending::Unknown, vec![append(1, 1)]),
        (1, 2, 3, Ending::Committed, vec![read(1, &[])]),
        (2, 4, 5, Ending::Committed, vec![read(1, &[1])]),
    ]);
    assert_eq!(verdict(&seen, Level::StrictSerializable), Ok(()));
    let lost = history(vec![
        (0, 0, 1, Ending::Unknown, vec![append(1, 1)]),
        (2, 4, 5, Ending::Committed, vec![read(1, &[]), append(2, 1), read(2, &[1])]),
        (2, 6, 7, Ending::Committed, vec![read(2, &[1])]),
    ]);
    assert_eq!(verdict(&lost, Level::StrictSerializable), Ok(()));
}

#[test]
fn an_acknowledged_append_that_no_read_shows_is_lost_in_strict_order() {
    let lost = history(vec![
        (0, 0, 1, Ending::Committed, vec![append(1, 1)]),
        (1, 2, 3, Ending::Committed, vec![read(1, &[]), append(2, 1), read(2, &[1])]),
        (1, 4, 5, Ending::Committed, vec![read(2, &[1])]),
    ]);
    assert_eq!(check(&lost, Level::Serializable), Ok(()));
    assert!(matches!(
        check(&lost, Level::StrictSerializable),
        Err(Violation::Cycle { level: Level::StrictSerializable, .. })
    ));
}
