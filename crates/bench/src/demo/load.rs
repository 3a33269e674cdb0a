//! The mixed load: customers and auditors on connections of their own, and one line a second of what they get.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_router::RouterStatus;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Row};

use super::claims::{Claims, grouped};
use super::cluster::Cluster;
use super::customer::{Customer, Tally};
use super::retry::again;
use super::shop::DATABASE;

/// How long an auditor rests: an audit reads whole tables.
const AUDIT_PAUSE: Duration = Duration::from_millis(300);

/// How long clients may take to end what they are doing.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(90);

/// How much longer a machine that has more to do may take until each claim has something to tell.
const LATE_TIMEOUT: Duration = Duration::from_secs(60);

/// How often that is looked for.
const LATE_INTERVAL: Duration = Duration::from_millis(200);

/// How much is to be done.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Customers at a time.
    pub clients: u16,
    /// For how long, in seconds.
    pub seconds: u32,
}

/// Runs the load, prints a line a second and checks what its clients saw. Returns how many orders they placed.
///
/// # Errors
/// When a client gets any error but a serialization failure, or the status cannot be asked for.
pub async fn run(load: Load, cluster: &Cluster, claims: &mut Claims) -> anyhow::Result<u64> {
    let tally = Arc::new(Tally::default());
    let before = cluster.status().await?.router;
    let mut clients = JoinSet::new();
    for seed in 0..load.clients {
        let customer = Customer::enter(cluster.connect(DATABASE).await?, seed.into(), Arc::clone(&tally)).await?;
        clients.spawn(customer.shop());
    }
    for server in &before.servers {
        let auditor = cluster.connect(DATABASE).await?;
        auditor.batch_execute(&format!("SET onecopy.server = '{}'", server.name)).await?;
        clients.spawn(audit(auditor, Arc::clone(&tally)));
    }
    let watching = async {
        watch(load.seconds, cluster, &before, &tally).await?;
        wait_for_all(cluster, &before, &tally).await
    };
    tokio::select! {
        watched = watching => watched?,
        Some(ended) = clients.join_next() => {
            ended?.context("a client of the load has failed")?;
            bail!("a client of the load has ended before its time");
        }
    }
    // A commit that were cut off could be there and not be counted.
    tally.closing.store(true, Relaxed);
    let all_ended = async {
        while let Some(ended) = clients.join_next().await {
            ended?.context("a client of the load has failed")?;
        }
        anyhow::Ok(())
    };
    let in_time = tokio::time::timeout(CLOSING_TIMEOUT, all_ended).await;
    in_time.with_context(|| format!("a client's transaction has not ended in {} s", CLOSING_TIMEOUT.as_secs()))??;
    let after = cluster.status().await?.router;
    say!();
    check(&tally, &before, &after, claims);
    Ok(tally.orders.load(Relaxed))
}

/// Audits over and over. Stock and books must agree: no piece is lost or appears, no cent is spent that was not
/// charged.
async fn audit(mut client: Client, tally: Arc<Tally>) -> anyhow::Result<()> {
    while !tally.closing.load(Relaxed) {
        let (stock, books) = again!(tally, look_at_everything(&mut client));
        if stock != books {
            tally.audits_wrong.fetch_add(1, Relaxed);
        }
        tally.audits.fetch_add(1, Relaxed);
        tally.reads.fetch_add(1, Relaxed);
        tokio::time::sleep(AUDIT_PAUSE).await;
    }
    Ok(())
}

/// Pieces and cents.
type Totals = (i64, i64);

/// What has left the stock and what customers have spent; then, by a second statement of the same transaction, what the
/// lines of all orders say.
async fn look_at_everything(client: &mut Client) -> Result<(Totals, Totals), tokio_postgres::Error> {
    const STOCK: &str = "SELECT (SELECT sum(initial_stock - stock)::bigint FROM items), \
                         (SELECT sum(spent_cents)::bigint FROM customers)";
    const BOOKS: &str = "SELECT sum(quantity)::bigint, sum(quantity * price_cents)::bigint FROM order_lines";
    let totals = |row: Row| (row.get(0), row.get(1));
    let transaction = client.build_transaction().read_only(true).start().await?;
    let stock = totals(transaction.query_one(STOCK, &[]).await?);
    let books = totals(transaction.query_one(BOOKS, &[]).await?);
    transaction.commit().await?;
    Ok((stock, books))
}

/// Prints a line a second.
async fn watch(seconds: u32, cluster: &Cluster, before: &RouterStatus, tally: &Tally) -> anyhow::Result<()> {
    let names = before.servers.iter().map(|server| format!("{:>11}", server.name)).collect::<String>();
    say!("                                       reads on");
    say!("  second  reads/s  updates/s  retries {names}  epoch age");
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.tick().await;
    let mut last = (Instant::now(), Counts::of(tally), before.clone());
    for second in 1..=seconds {
        ticks.tick().await;
        let now = (Instant::now(), Counts::of(tally), cluster.status().await?.router);
        let rate = |count: u64| (count as f64 / (now.0 - last.0).as_secs_f64()).round() as u64;
        say!(
            "  {second:>6} {:>8} {:>10} {:>8} {}  {:>9}",
            grouped(rate(now.1.reads - last.1.reads)),
            grouped(rate(now.1.updates - last.1.updates)),
            (now.1.retries - last.1.retries) + (now.2.update_retries - last.2.update_retries),
            shares(&last.2, &now.2).iter().map(|share| format!("{share:>9.0} %")).collect::<String>(),
            epoch_age(&now.2),
        );
        last = now;
    }
    Ok(())
}

/// Lets customers in for longer where the machine was too busy for one of each kind.
async fn wait_for_all(cluster: &Cluster, before: &RouterStatus, tally: &Tally) -> anyhow::Result<()> {
    let deadline = Instant::now() + LATE_TIMEOUT;
    while Instant::now() < deadline {
        let counted = [&tally.orders, &tally.histories, &tally.audits].iter().all(|counter| counter.load(Relaxed) > 0);
        if counted && reads_by_server(before, &cluster.status().await?.router).iter().all(|reads| *reads > 0) {
            break;
        }
        tokio::time::sleep(LATE_INTERVAL).await;
    }
    Ok(())
}

/// What has been counted up to one moment.
struct Counts {
    reads: u64,
    updates: u64,
    retries: u64,
}

impl Counts {
    fn of(tally: &Tally) -> Counts {
        Counts {
            reads: tally.reads.load(Relaxed),
            updates: tally.updates.load(Relaxed),
            retries: tally.retries.load(Relaxed),
        }
    }
}

/// Reads that each server answered between two looks.
fn reads_by_server(before: &RouterStatus, after: &RouterStatus) -> Vec<u64> {
    before.servers.iter().zip(&after.servers).map(|(before, after)| after.reads.saturating_sub(before.reads)).collect()
}

/// The same in percent.
fn shares(before: &RouterStatus, after: &RouterStatus) -> Vec<f64> {
    let reads = reads_by_server(before, after);
    let sum = reads.iter().sum::<u64>().max(1);
    reads.iter().map(|reads| *reads as f64 * 100.0 / sum as f64).collect()
}

/// How old the shop's newest epoch is.
fn epoch_age(status: &RouterStatus) -> String {
    let shop = status.databases.iter().find(|database| database.name == DATABASE);
    shop.and_then(|database| database.epoch_age_ms).map_or("-".to_owned(), |age_ms| format!("{age_ms} ms"))
}

fn check(tally: &Tally, before: &RouterStatus, after: &RouterStatus, claims: &mut Claims) {
    let counted = |counter: &AtomicU64| counter.load(Relaxed);
    let (orders, unseen) = (counted(&tally.orders), counted(&tally.own_orders_unseen));
    claims.add(
        orders > 0 && unseen == 0,
        format!("{} orders, each seen by its customer's next read, on whatever server ({unseen} not)", grouped(orders)),
    );
    let (histories, wrong) = (counted(&tally.histories), counted(&tally.histories_wrong));
    claims.add(
        histories > 0 && wrong == 0,
        format!("{} looks at a customer's orders, each total the sum of its lines ({wrong} not)", grouped(histories)),
    );
    let (audits, wrong) = (counted(&tally.audits), counted(&tally.audits_wrong));
    claims.add(
        audits > 0 && wrong == 0,
        format!("{} audits amid the load, on every server: stock and books agree ({wrong} not)", grouped(audits)),
    );
    let told = before.servers.iter().zip(shares(before, after));
    let told: Vec<String> = told.map(|(server, share)| format!("{share:.0} % on {}", server.name)).collect();
    claims.add(
        reads_by_server(before, after).iter().all(|reads| *reads > 0),
        format!("every server answered reads: {}", told.join(", ")),
    );
    say!(
        "  {} reads, {} updates; serialization failures: {} tried again by clients, {} by the router",
        grouped(counted(&tally.reads)),
        grouped(counted(&tally.updates)),
        grouped(counted(&tally.retries)),
        grouped(after.update_retries - before.update_retries),
    );
}
