//! The demonstration as somebody runs it: it holds what it claims, says so when something does not, and leaves nothing.
//!
//! It needs the program `onecopy` beside `onecopy-bench`; `make test` builds both.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use onecopy_testing::TestDirectory;
use onecopy_testing::process::send;
use rustix::process::Signal;
use tokio_postgres::NoTls;

/// The line after which customers come.
const LOAD_BEGINS: &str = "reads/s";

/// A demonstration that runs, with a directory for what it makes.
struct Demo {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    directory: TestDirectory,
}

impl Demo {
    fn start(seconds: u32) -> Demo {
        let directory = TestDirectory::new().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_onecopy-bench"))
            .args(["demo", "--clients", "4", "--seconds", &seconds.to_string()])
            .env("TMPDIR", directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Demo { child, lines, directory }
    }

    /// Reads on to the line that contains `text`.
    fn wait_for(&mut self, text: &str) {
        let found = self.lines.by_ref().map(Result::unwrap).find(|line| line.contains(text));
        assert!(found.is_some(), "the demonstration ended before it said {text:?}");
    }

    /// The connection string of its cluster's shop.
    fn shop(&self) -> String {
        let entries = std::fs::read_dir(self.directory.path()).unwrap().map(|entry| entry.unwrap().path());
        let clusters: Vec<PathBuf> = entries.map(|entry| entry.join("cluster")).filter(|path| path.exists()).collect();
        let program = PathBuf::from(env!("CARGO_BIN_EXE_onecopy-bench")).with_file_name("onecopy");
        let output = Command::new(program).arg("dsn").arg("--dir").arg(&clusters[0]).output().unwrap();
        let dsn = String::from_utf8(output.stdout).unwrap();
        dsn.trim().strip_suffix("/postgres").unwrap().to_owned() + "/shop"
    }

    /// Reads to the end. Returns the lines with claims, and how it ended; checks that it left nothing.
    fn end(&mut self) -> (Vec<String>, ExitStatus) {
        let claims = self.lines.by_ref().map(Result::unwrap).filter(|line| line.starts_with("  ["));
        let (claims, status) = (claims.collect(), self.child.wait().unwrap());
        assert_eq!(std::fs::read_dir(self.directory.path()).unwrap().count(), 0, "it left something");
        (claims, status)
    }

    fn interrupt(&self) {
        send(self.child.id(), Signal::INT);
    }
}

impl Drop for Demo {
    /// A test that has failed still lets the demonstration clean up.
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.interrupt();
            self.lines.by_ref().for_each(drop);
            let _ = self.child.wait();
        }
    }
}

#[test]
fn it_holds_all_that_it_claims_and_leaves_nothing() {
    let mut demo = Demo::start(2);
    let (claims, status) = demo.end();
    assert!(claims.iter().all(|line| line.starts_with("  [ ok ] ")), "{claims:#?}");
    assert_eq!(claims.len(), 13, "{claims:#?}");
    assert!(status.success(), "{status}");
}

/// The negative control: one piece and one order vanish while customers are in the shop.
#[tokio::test]
async fn it_fails_when_the_books_do_not_balance() {
    // For so long that it still goes on, and audits come, however late the theft is.
    let mut demo = Demo::start(20);
    demo.wait_for(LOAD_BEGINS);
    let (client, connection) = tokio_postgres::connect(&demo.shop(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let theft = "UPDATE items SET stock = stock - 1 WHERE id = 7; DELETE FROM order_lines WHERE order_id = 77; \
                 DELETE FROM orders WHERE id = 77";
    while let Err(error) = client.batch_execute(theft).await {
        assert!(!client.is_closed(), "the demonstration is over: {error}");
    }
    drop(client);
    let (claims, status) = demo.end();
    let failed: Vec<&String> = claims.iter().filter(|line| line.starts_with("  [FAIL] ")).collect();
    for word in ["audits", "initial stock", "every customer has spent", "no commit lost"] {
        assert!(failed.iter().any(|line| line.contains(word)), "nothing about {word:?}: {claims:#?}");
    }
    assert_eq!((failed.len(), status.code()), (4, Some(1)), "{claims:#?}");
}

#[test]
fn interrupted_amid_the_load_it_leaves_nothing() {
    let mut demo = Demo::start(600);
    demo.wait_for(LOAD_BEGINS);
    demo.interrupt();
    let (claims, status) = demo.end();
    assert_eq!((claims.len(), status.code()), (0, Some(1)));
}
