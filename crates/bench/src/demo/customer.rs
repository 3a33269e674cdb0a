//! One customer of the shop: a connection through the router, and what a person does in a shop, over and over.
//!
//! Written as any careful program for a serializable database is: prepared statements, `READ ONLY` where it is true,
//! and a transaction that ends with 40001 is run again.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use anyhow::{Context, bail};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio_postgres::{Client, Error, IsolationLevel, Row, Statement};

use super::retry::again;
use super::shop::{CUSTOMERS, ITEMS};

/// Items on a page.
const PAGE_ITEMS: i32 = 20;

struct Statements {
    page: Statement,
    orders: Statement,
    lines: Statement,
    put: Statement,
    cart: Statement,
    take: Statement,
    order: Statement,
    line: Statement,
    empty_cart: Statement,
    spend: Statement,
    own_order: Statement,
}

/// What clients count, all together.
#[derive(Debug, Default)]
pub struct Tally {
    /// The shop closes: clients end after what they are doing.
    pub closing: AtomicBool,
    /// Transactions that only read, done.
    pub reads: AtomicU64,
    /// Transactions that write, committed.
    pub updates: AtomicU64,
    /// Serialization failures, each followed by another attempt.
    pub retries: AtomicU64,
    /// Orders placed.
    pub orders: AtomicU64,
    /// Orders whose customer did not see them right after.
    pub own_orders_unseen: AtomicU64,
    /// Looks at a customer's orders.
    pub histories: AtomicU64,
    /// Those in which an order was not the sum of its lines.
    pub histories_wrong: AtomicU64,
    /// Looks at the whole shop.
    pub audits: AtomicU64,
    /// Those in which the books did not balance.
    pub audits_wrong: AtomicU64,
}

/// A customer.
pub struct Customer {
    client: Client,
    statements: Statements,
    random: StdRng,
    tally: Arc<Tally>,
}

impl Customer {
    /// A customer who has just come; `seed` decides what it will do.
    ///
    /// # Errors
    /// What the router refuses.
    pub async fn enter(client: Client, seed: u64, tally: Arc<Tally>) -> anyhow::Result<Customer> {
        let statements = Statements {
            page: client.prepare("SELECT id, name, price_cents, stock FROM items WHERE id BETWEEN $1 AND $2").await?,
            orders: client.prepare("SELECT id, total_cents FROM orders WHERE customer_id = $1").await?,
            lines: client
                .prepare(
                    "SELECT l.order_id, sum(l.quantity * l.price_cents)::bigint FROM order_lines l \
                     JOIN orders o ON o.id = l.order_id WHERE o.customer_id = $1 GROUP BY 1",
                )
                .await?,
            put: client
                .prepare(
                    "INSERT INTO carts VALUES ($1, $2, $3) ON CONFLICT (customer_id, item_id) \
                     DO UPDATE SET quantity = excluded.quantity",
                )
                .await?,
            cart: client
                .prepare(
                    "SELECT i.id, least(c.quantity, i.stock), i.price_cents FROM carts c \
                     JOIN items i ON i.id = c.item_id WHERE c.customer_id = $1 AND i.stock > 0 ORDER BY i.id",
                )
                .await?,
            take: client.prepare("UPDATE items SET stock = stock - $2 WHERE id = $1").await?,
            order: client.prepare("INSERT INTO orders (customer_id, total_cents) VALUES ($1, $2) RETURNING id").await?,
            line: client.prepare("INSERT INTO order_lines VALUES ($1, $2, $3, $4)").await?,
            empty_cart: client.prepare("DELETE FROM carts WHERE customer_id = $1").await?,
            spend: client.prepare("UPDATE customers SET spent_cents = spent_cents + $2 WHERE id = $1").await?,
            own_order: client.prepare("SELECT total_cents FROM orders WHERE id = $1").await?,
        };
        Ok(Customer { client, statements, random: StdRng::seed_from_u64(seed), tally })
    }

    /// Does things until the shop closes.
    ///
    /// # Errors
    /// Any error but a serialization failure, and one of those that does not go away.
    pub async fn shop(mut self) -> anyhow::Result<()> {
        while !self.tally.closing.load(Relaxed) {
            let customer = self.random.random_range(1..=CUSTOMERS);
            match self.random.random_range(0..100) {
                0..60 => self.look_at_page().await.context("looking at a page of items")?,
                60..85 => self.look_at_orders(customer).await.context("looking at one's orders")?,
                85..94 => self.put_into_cart(customer).await.context("putting an item into the cart")?,
                _ => self.check_out(customer).await.context("ordering what is in the cart")?,
            }
        }
        Ok(())
    }

    async fn look_at_page(&mut self) -> anyhow::Result<()> {
        let first = self.random.random_range(1..=ITEMS - PAGE_ITEMS);
        let last = first + PAGE_ITEMS - 1;
        let page = again!(self.tally, self.client.query(&self.statements.page, &[&first, &last]));
        if page.len() != PAGE_ITEMS as usize {
            bail!("a page has {} items instead of {PAGE_ITEMS}", page.len());
        }
        self.tally.reads.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Two statements that must tell of one moment: each order's total, and what its lines add up to.
    async fn look_at_orders(&mut self, customer: i32) -> anyhow::Result<()> {
        let (mut orders, mut lines) =
            again!(self.tally, orders_and_lines(&mut self.client, &self.statements, customer));
        orders.sort_by_key(|row| row.get::<_, i64>(0));
        lines.sort_by_key(|row| row.get::<_, i64>(0));
        let amounts = |rows: &[Row]| -> Vec<(i64, i64)> { rows.iter().map(|row| (row.get(0), row.get(1))).collect() };
        if amounts(&orders) != amounts(&lines) {
            self.tally.histories_wrong.fetch_add(1, Relaxed);
        }
        self.tally.histories.fetch_add(1, Relaxed);
        self.tally.reads.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn put_into_cart(&mut self, customer: i32) -> anyhow::Result<()> {
        let item = self.random.random_range(1..=ITEMS);
        let quantity = self.random.random_range(1..=3);
        again!(self.tally, self.client.execute(&self.statements.put, &[&customer, &item, &quantity]));
        self.tally.updates.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn check_out(&mut self, customer: i32) -> anyhow::Result<()> {
        let order = again!(self.tally, place_order(&mut self.client, &self.statements, customer));
        self.tally.updates.fetch_add(1, Relaxed);
        if let Some((order, total_cents)) = order {
            self.tally.orders.fetch_add(1, Relaxed);
            self.look_at_own_order(order, total_cents).await?;
        }
        Ok(())
    }

    /// The confirmation page: it may be read on any server, and must show what was just ordered.
    async fn look_at_own_order(&mut self, order: i64, total_cents: i64) -> anyhow::Result<()> {
        let seen = again!(self.tally, self.client.query_opt(&self.statements.own_order, &[&order]));
        if seen.map(|row| row.get::<_, i64>(0)) != Some(total_cents) {
            self.tally.own_orders_unseen.fetch_add(1, Relaxed);
        }
        self.tally.reads.fetch_add(1, Relaxed);
        Ok(())
    }
}

async fn orders_and_lines(
    client: &mut Client,
    statements: &Statements,
    customer: i32,
) -> Result<(Vec<Row>, Vec<Row>), Error> {
    let transaction = client.build_transaction().read_only(true).start().await?;
    let orders = transaction.query(&statements.orders, &[&customer]).await?;
    let lines = transaction.query(&statements.lines, &[&customer]).await?;
    transaction.commit().await?;
    Ok((orders, lines))
}

/// One order of everything in the cart; none when the cart is empty. Returns its number and its total.
async fn place_order(client: &mut Client, statements: &Statements, customer: i32) -> Result<Option<(i64, i64)>, Error> {
    let transaction = client.build_transaction().isolation_level(IsolationLevel::Serializable).start().await?;
    let cart = transaction.query(&statements.cart, &[&customer]).await?;
    let cart: Vec<(i32, i32, i32)> = cart.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    if cart.is_empty() {
        transaction.commit().await?;
        return Ok(None);
    }
    let total_cents: i64 = cart.iter().map(|(_, quantity, price)| i64::from(*quantity) * i64::from(*price)).sum();
    let order: i64 = transaction.query_one(&statements.order, &[&customer, &total_cents]).await?.get(0);
    for (item, quantity, price_cents) in &cart {
        transaction.execute(&statements.take, &[item, quantity]).await?;
        transaction.execute(&statements.line, &[&order, item, quantity, price_cents]).await?;
    }
    transaction.execute(&statements.empty_cart, &[&customer]).await?;
    transaction.execute(&statements.spend, &[&customer, &total_cents]).await?;
    transaction.commit().await?;
    Ok(Some((order, total_cents)))
}
