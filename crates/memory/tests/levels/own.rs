//! Level `own`.

use onecopy_memory::MemoryError;
use onecopy_memory::own::Own;

use crate::load::Load;
use crate::segment::{memory_bytes, take_away};
use crate::server::{CEILING_BYTES, PgbenchServer};

/// What the pool is shrunk to.
const TARGET_BYTES: u64 = 48 << 20;
/// What the rest of the shared memory may take.
const OTHER_BYTES: u64 = 32 << 20;
/// How often pages must have been read again and dropped again, and within how many loads.
const DROPS_MIN: u32 = 5;
const LOADS_MAX: usize = 10;

fn own(server: &PgbenchServer) -> Own {
    Own::open(server.data_directory()).expect("a stock server")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_a_stock_server_are_dropped_and_read_again() {
    let server = PgbenchServer::stock().await;
    let content = server.content().await;
    let own = own(&server);
    server.client().await.batch_execute("CHECKPOINT").await.expect("all is on disk");
    let (figures, memory_before) = (own.figures().expect("seen"), memory_bytes(server.data_directory()));
    assert_eq!(figures.pool_bytes, CEILING_BYTES);
    assert!(figures.resident_bytes > 100 << 20 && figures.resident_bytes <= CEILING_BYTES, "{figures:?}");
    assert_eq!(figures.dirty_bytes, 0, "after a checkpoint: {figures:?}");

    let dropped = own.shrink_to(TARGET_BYTES).expect("dropped");
    let memory = memory_bytes(server.data_directory());
    assert!(dropped.resident_bytes <= TARGET_BYTES, "{dropped:?}");
    assert!(memory < TARGET_BYTES + OTHER_BYTES && memory_before - memory > 50 << 20, "{memory_before} {memory}");
    assert_eq!(own.figures().expect("seen").pool_bytes, CEILING_BYTES, "the server does not know");
    let again = own.shrink_to(TARGET_BYTES).expect("nothing to do");
    assert_eq!((again.batches, again.bytes), (0, 0));

    assert_eq!(server.content().await, content, "all pages are read again");
    assert!(own.figures().expect("seen").resident_bytes > TARGET_BYTES, "and have memory again");
    let dropped = own.shrink_to(0).expect("dropped");
    assert!(dropped.resident_bytes < 8 << 20, "{dropped:?} {:?}", own.figures());
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dirty_pages_stay_until_they_are_written() {
    let server = PgbenchServer::stock().await;
    let client = server.client().await;
    client.batch_execute("UPDATE pgbench_accounts SET abalance = abalance + 1").await.expect("updated");
    let content = server.content().await;
    let own = own(&server);
    let dirty_bytes = own.figures().expect("seen").dirty_bytes;
    assert!(dirty_bytes > 50 << 20, "{dirty_bytes}");
    let dropped = own.shrink_to(0).expect("dropped");
    assert!(dropped.resident_bytes >= dirty_bytes / 2, "{dropped:?}");
    assert_eq!(server.content().await, content);
    client.batch_execute("CHECKPOINT").await.expect("written");
    let dropped = own.shrink_to(0).expect("dropped");
    assert!(dropped.resident_bytes < 8 << 20, "{dropped:?} {:?}", own.figures());
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_work_on_while_pages_are_dropped_under_them() {
    let server = PgbenchServer::stock().await;
    let own = own(&server);
    let mut drops = 0;
    // How often pages are dropped hangs on how busy the machine is.
    for _ in 0..LOADS_MAX {
        let mut load = Load::start(&server, 8);
        while load.runs() {
            let dropped = tokio::task::block_in_place(|| own.shrink_to(TARGET_BYTES)).expect("dropped");
            drops += u32::from(dropped.bytes > 0);
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        load.finish().await;
        if drops >= DROPS_MIN {
            break;
        }
    }
    assert!(drops >= DROPS_MIN, "pages were read again and dropped again: {drops}");
    server.assert_balanced().await;
    server.client().await.batch_execute("CHECKPOINT").await.expect("written");
    let content = server.content().await;
    own.shrink_to(0).expect("dropped");
    assert_eq!(server.content().await, content);
    server.assert_no_crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_touched_without_a_server() {
    let server = PgbenchServer::stock().await;
    let own = own(&server);
    server.crash_stop().await.expect("killed");
    let gone = own.shrink_to(0).expect_err("no server");
    assert!(matches!(gone, MemoryError::NoServer { .. }), "{gone}");
    server.start().await.expect("recovered");
    own.shrink_to(0).expect("the new server's memory is found again");
    server.assert_balanced().await;
}

/// The control: what the tests above compare is seen to differ when pages go and their headers do not say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_go_without_their_headers_are_missed() {
    let server = PgbenchServer::stock().await;
    let question = "SELECT count(*) FROM pgbench_accounts";
    let rows = server.number(question).await;
    take_away(server.data_directory());
    let after = server.client().await.query_one(question, &[]).await;
    // The server answers, an error or another number.
    match after {
        Ok(row) => assert_ne!(u64::try_from(row.get::<_, i64>(0)), Ok(rows)),
        Err(error) => assert!(error.as_db_error().is_some(), "{error}"),
    }
}
