//! psql: scripts, its own describing commands, COPY, variables, errors.

use onecopy_tests::cluster::TestCluster;

use crate::program::{postgresql, run, run_well};

const SCRIPT: &str = r"
\set ON_ERROR_STOP 1
CREATE TABLE items (id serial PRIMARY KEY, name text NOT NULL, price numeric(8,2));
INSERT INTO items (name, price) VALUES ('tea', 2.50), ('coffee', 3.75) RETURNING id;
\copy items (name, price) FROM stdin WITH (FORMAT csv)
sugar,1.10
milk,0.90
\.
BEGIN;
UPDATE items SET price = price * 2 WHERE name = 'tea';
SAVEPOINT cheaper;
UPDATE items SET price = 0;
ROLLBACK TO cheaper;
COMMIT;
BEGIN READ ONLY;
SELECT name, price FROM items ORDER BY id;
COMMIT;
SELECT count(*) AS counted FROM items \gset
\echo counted :counted
\copy (SELECT id FROM items ORDER BY id) TO stdout
\bind 3
SELECT 1;
";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn psql_runs_scripts_copies_and_describes() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |_| {}).await?;
    let mut psql = postgresql("psql", &cluster)?;
    psql.args(["-XqAt", "-v", "VERBOSITY=verbose"]);
    let script = SCRIPT.replace("\\bind 3\n", "");
    let output = run_well(psql, &script).await?;
    assert_eq!(output, "1\n2\ntea|5.00\ncoffee|3.75\nsugar|1.10\nmilk|0.90\ncounted 4\n1\n2\n3\n4\n1\n");
    for (command, expected) in [
        ("\\d items", "items_pkey"),
        ("\\dt", "items"),
        ("\\l", "shop"),
        ("\\df", "List of functions"),
        ("\\du", "postgres"),
    ] {
        let mut psql = postgresql("psql", &cluster)?;
        psql.args(["-X", "-c", command]);
        assert!(run_well(psql, "").await?.contains(expected), "{command}");
    }
    let mut psql = postgresql("psql", &cluster)?;
    psql.args(["-XAt", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-c", "SELECT nam FROM items"]);
    let printed = run(psql, "").await?;
    assert!(!printed.success && printed.errors.contains("42703") && printed.errors.contains("LINE 1"), "{printed:?}");
    let mut psql = postgresql("psql", &cluster)?;
    psql.env("PGPASSWORD", "wrong").args(["-Xw", "-c", "SELECT 1"]);
    let printed = run(psql, "").await?;
    assert!(!printed.success && printed.errors.contains("password authentication failed"), "{printed:?}");
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pg_dump_of_the_router_restores_to_the_same_rows() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |_| {}).await?;
    let mut psql = postgresql("psql", &cluster)?;
    psql.args(["-Xq"]);
    let tables = "CREATE TABLE items (id serial PRIMARY KEY, name text); \
        INSERT INTO items (name) SELECT 'item ' || n FROM generate_series(1, 500) n;";
    run_well(psql, tables).await?;
    let mut dump = postgresql("pg_dump", &cluster)?;
    dump.args(["--table", "items", "--clean", "--if-exists"]);
    let dumped = run_well(dump, "").await?;
    assert!(dumped.contains("item 500"), "the dump lacks rows");
    let mut psql = postgresql("psql", &cluster)?;
    psql.args(["-Xq", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null"]);
    run_well(psql, &dumped).await?;
    let mut psql = postgresql("psql", &cluster)?;
    psql.args(["-XAt", "-c", "SELECT count(*), max(name), (SELECT last_value FROM items_id_seq) FROM items"]);
    assert_eq!(run_well(psql, "").await?, "500|item 99|500\n");
    Ok(())
}
