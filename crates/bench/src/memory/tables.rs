//! Tables like those of TPC-H, and queries like its: a small model of its schema with the same kinds of joins, not the
//! benchmark itself.

use super::MIB;
use super::site::{Site, Start};

/// Orders; each has four lines.
const ORDERS: u64 = 400_000;
const CUSTOMERS: u64 = 40_000;
const PARTS: u64 = 53_000;
const SUPPLIERS: u64 = 2_700;

/// The relations that queries read.
pub const RELATIONS: [&str; 6] = ["lineitem", "orders", "customer", "part", "supplier", "lineitem_order"];

/// The queries, by the number that TPC-H gives to what they are like.
pub const QUERIES: [(&str, &str); 8] = [
    (
        "1",
        "SELECT l_returnflag, sum(l_quantity), sum(l_extendedprice), sum(l_extendedprice * (1 - l_discount)), \
         avg(l_quantity), count(*) \
         FROM lineitem WHERE l_shipdate <= date '1998-09-01' GROUP BY l_returnflag ORDER BY l_returnflag",
    ),
    (
        "3",
        "SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue FROM customer \
         JOIN orders ON c_custkey = o_custkey \
         JOIN lineitem ON l_orderkey = o_orderkey WHERE c_mktsegment = 1 AND o_orderdate < date '1995-03-15' \
         AND l_shipdate > date '1995-03-15' GROUP BY l_orderkey ORDER BY revenue DESC, l_orderkey LIMIT 10",
    ),
    (
        "4",
        "SELECT o_orderpriority, count(*) FROM orders WHERE o_orderdate >= date '1993-07-01' \
         AND o_orderdate < date '1993-10-01' \
         AND EXISTS (SELECT FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_receiptdate) \
         GROUP BY 1 ORDER BY 1",
    ),
    (
        "5",
        "SELECT s_nationkey, sum(l_extendedprice * (1 - l_discount)) FROM customer \
         JOIN orders ON c_custkey = o_custkey \
         JOIN lineitem ON l_orderkey = o_orderkey JOIN supplier ON l_suppkey = s_suppkey AND c_nationkey = s_nationkey \
         WHERE o_orderdate >= date '1994-01-01' AND o_orderdate < date '1995-01-01' GROUP BY 1 ORDER BY 2 DESC",
    ),
    (
        "6",
        "SELECT sum(l_extendedprice * l_discount) FROM lineitem WHERE l_shipdate >= date '1994-01-01' \
         AND l_shipdate < date '1995-01-01' AND l_discount BETWEEN 0.05 AND 0.07 AND l_quantity < 24",
    ),
    (
        "14",
        "SELECT 100.0 * sum(l_extendedprice) FILTER (WHERE p_type < 25) / sum(l_extendedprice) FROM lineitem \
         JOIN part ON l_partkey = p_partkey WHERE l_shipdate >= date '1995-09-01' AND l_shipdate < date '1995-10-01'",
    ),
    (
        "18",
        "SELECT o_orderkey, o_totalprice, sum(l_quantity) FROM orders JOIN lineitem ON o_orderkey = l_orderkey \
         GROUP BY 1, 2 HAVING sum(l_quantity) > 180 ORDER BY 2 DESC, 1 LIMIT 100",
    ),
    (
        "20",
        "SELECT count(*) FROM supplier WHERE s_suppkey IN (SELECT l_suppkey FROM lineitem \
         JOIN part ON l_partkey = p_partkey \
         WHERE p_type < 10 AND l_shipdate >= date '1994-01-01' AND l_shipdate < date '1995-01-01' \
         GROUP BY l_suppkey HAVING sum(l_quantity) > 300)",
    ),
];

/// Makes the tables: the same rows each time.
pub async fn fill(site: &Site) -> anyhow::Result<()> {
    site.start(Start::plain(512 * MIB)).await?;
    site.server
        .connection()
        .connect_as_client()
        .await?
        .batch_execute(&format!("CREATE DATABASE {}", crate::cluster::DATABASE))
        .await?;
    let client = site.client().await?;
    client.batch_execute("CREATE EXTENSION onecopy; CREATE EXTENSION pg_prewarm; SELECT setseed(0.5)").await?;
    client.batch_execute(&script()).await?;
    client.batch_execute("VACUUM ANALYZE").await?;
    Ok(client.batch_execute("CHECKPOINT").await?)
}

fn script() -> String {
    format!(
        "CREATE TABLE supplier AS SELECT i AS s_suppkey, i % 25 AS s_nationkey, repeat('s', 120) AS s_comment \
            FROM generate_series(1, {SUPPLIERS}) i;
         CREATE TABLE part AS SELECT i AS p_partkey, (random() * 149)::int AS p_type, repeat('p', 120) AS p_comment \
            FROM generate_series(1, {PARTS}) i;
         CREATE TABLE customer AS SELECT i AS c_custkey, i % 25 AS c_nationkey, i % 5 AS c_mktsegment, \
            repeat('c', 140) AS c_comment
            FROM generate_series(1, {CUSTOMERS}) i;
         CREATE TABLE orders AS SELECT i AS o_orderkey, 1 + (random() * {CUSTOMERS})::int % {CUSTOMERS} AS o_custkey,
            date '1992-01-01' + (random() * 2400)::int AS o_orderdate, (random() * 4)::int AS o_orderpriority,
            (random() * 100000)::float8 AS o_totalprice, repeat('o', 60) AS o_comment \
            FROM generate_series(1, {ORDERS}) i;
         CREATE TABLE lineitem AS SELECT o_orderkey AS l_orderkey, 1 + (random() * {PARTS})::int % {PARTS} AS l_partkey,
            1 + (random() * {SUPPLIERS})::int % {SUPPLIERS} AS l_suppkey, 1 + (random() * 49)::int AS l_quantity,
            (random() * 10000)::float8 AS l_extendedprice, round((random() * 0.1)::numeric, 2)::float8 AS l_discount,
            (random() * 2)::int AS l_returnflag, o_orderdate + (random() * 120)::int AS l_shipdate,
            o_orderdate + (random() * 90)::int AS l_commitdate, o_orderdate + (random() * 150)::int AS l_receiptdate,
            repeat('l', 40) AS l_comment FROM orders, generate_series(1, 4);
         CREATE INDEX lineitem_order ON lineitem (l_orderkey); ALTER TABLE orders ADD PRIMARY KEY (o_orderkey);
         ALTER TABLE customer ADD PRIMARY KEY (c_custkey); ALTER TABLE part ADD PRIMARY KEY (p_partkey);
         ALTER TABLE supplier ADD PRIMARY KEY (s_suppkey)"
    )
}
