//! What must be true of the shop when all is over, on every server.

use anyhow::Context;
use tokio_postgres::Client;

use super::claims::{Claims, grouped};
use super::cluster::{Cluster, wait_replayed};
use super::retry::until_back;
use super::shop::{DATABASE, ORDERS, tables};

/// Each: what must hold, and the query that counts where it does not.
const INVARIANTS: [(&str, &str); 4] = [
    (
        "of every item, what is in stock and what was sold make the initial stock",
        "SELECT count(*) FROM items i LEFT JOIN \
         (SELECT item_id, sum(quantity) AS sold FROM order_lines GROUP BY 1) l ON l.item_id = i.id \
         WHERE i.stock + coalesce(l.sold, 0) <> i.initial_stock OR i.stock < 0",
    ),
    (
        "every order's total is the sum of its lines",
        "SELECT count(*) FROM orders o LEFT JOIN \
         (SELECT order_id, sum(quantity * price_cents) AS total FROM order_lines GROUP BY 1) l ON l.order_id = o.id \
         WHERE o.total_cents IS DISTINCT FROM l.total",
    ),
    (
        "every customer has spent what the orders say",
        "SELECT count(*) FROM customers c LEFT JOIN \
         (SELECT customer_id, sum(total_cents) AS total FROM orders GROUP BY 1) o ON o.customer_id = c.id \
         WHERE c.spent_cents <> coalesce(o.total, 0)",
    ),
    (
        "no line is without its order",
        "SELECT count(*) FROM order_lines l LEFT JOIN orders o ON o.id = l.order_id WHERE o.id IS NULL",
    ),
];

/// Checks the shop through the router with the reads on each server, then the servers themselves against each other.
///
/// # Errors
/// When a server or the router does not answer.
pub async fn check(cluster: &Cluster, servers: &[String], placed: u64, claims: &mut Claims) -> anyhow::Result<()> {
    let client = cluster.connect(DATABASE).await?;
    for (claim, question) in INVARIANTS {
        let violations = on_each(&client, servers, question).await?;
        let held = violations.iter().all(|count| *count == 0);
        claims.add(held, if held { claim.to_owned() } else { format!("{claim}: violations {violations:?}") });
    }
    let expected = i64::from(ORDERS) + i64::try_from(placed)?;
    let orders = on_each(&client, servers, "SELECT count(*) FROM orders").await?;
    let initial = grouped(ORDERS.unsigned_abs().into());
    claims.add(
        orders.iter().all(|count| *count == expected),
        format!("no commit lost, none twice: {initial} orders and {} make {orders:?}", grouped(placed)),
    );
    compare_servers(cluster, servers, claims).await
}

/// One number, read through the router on each server.
async fn on_each(client: &Client, servers: &[String], question: &str) -> anyhow::Result<Vec<i64>> {
    let mut numbers = Vec::new();
    for server in servers {
        client.batch_execute(&format!("SET onecopy.server = '{server}'")).await?;
        numbers.push(until_back(async || Ok(client.query_one(question, &[]).await?.get(0))).await?);
    }
    Ok(numbers)
}

/// Hashes every table on every server, past the router.
async fn compare_servers(cluster: &Cluster, servers: &[String], claims: &mut Claims) -> anyhow::Result<()> {
    let (leader, followers) = servers.split_first().context("the cluster has no servers")?;
    let leader = cluster.connect_past_router(leader, DATABASE).await?;
    let on_leader = table_hashes(&leader).await?;
    for name in followers {
        let follower = cluster.connect_past_router(name, DATABASE).await?;
        wait_replayed(&leader, &follower).await?;
        let on_follower = table_hashes(&follower).await?;
        let differing: Vec<&str> = on_leader
            .iter()
            .zip(&on_follower)
            .filter(|(one, other)| one != other)
            .map(|(hash, _)| hash.table)
            .collect();
        let rows = grouped(on_follower.iter().map(|hash| hash.rows.unsigned_abs()).sum());
        let found = if differing.is_empty() { String::new() } else { format!(", but not {}", differing.join(", ")) };
        claims.add(
            differing.is_empty(),
            format!("{name} has the leader's rows in all {} tables ({rows} rows hashed){found}", on_follower.len()),
        );
    }
    Ok(())
}

/// What one table holds.
#[derive(Debug, PartialEq, Eq)]
struct TableHash {
    table: &'static str,
    rows: i64,
    hash: String,
}

async fn table_hashes(server: &Client) -> anyhow::Result<Vec<TableHash>> {
    let mut hashes = Vec::new();
    for table in tables() {
        let question =
            format!("SELECT count(*), md5(coalesce(string_agg(md5(t::text), '' ORDER BY t::text), '')) FROM {table} t");
        let row = server.query_one(&question, &[]).await.with_context(|| format!("cannot hash {table}"))?;
        hashes.push(TableHash { table, rows: row.get(0), hash: row.get(1) });
    }
    Ok(hashes)
}
