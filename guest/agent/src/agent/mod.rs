//! The agent: listens to the host, works, replies.
//!
//! ```text
//! port ──> lines ──> dispatch ──> a thread a command (at most COMMANDS_MAX) ──> answers ──> port
//!                        └── power off ─┐
//! power button ─────────────────────────┴─> main thread: stops the server, ends with SWITCH_OFF
//! ```
//! The guest's first process starts it again when it ends with another status.

mod button;
mod clock;
mod dispatch;
mod execute;
mod files;
mod free_pages;
mod health;
mod identity;
mod in_progress;
mod lines;
mod port;
mod postgres;
mod process;
mod replies;
mod users;

use dispatch::Dispatch;
use replies::Replies;
use std::io;
use std::sync::Arc;
use std::sync::mpsc;

/// The exit status that tells the guest's first process to switch off.
pub const SWITCH_OFF: u8 = 10;

/// Somebody wants the guest to be switched off.
pub(crate) struct SwitchOff;

/// Serves the host on the guest's port until the guest is to be switched off; the database server is stopped then.
/// An error is one of the port.
pub fn serve() -> io::Result<()> {
    let port = Arc::new(port::open()?);
    let (switch_off, wanted) = mpsc::channel();
    button::watch(&switch_off);
    postgres::bound_log();
    free_pages::prepare();
    let replies = Arc::new(Replies::new(Arc::clone(&port)));
    std::thread::spawn(move || listen(&port, &Dispatch::new(replies, switch_off)));
    // The listening thread holds a sender for as long as the port lives.
    wanted.recv().map_err(|_| io::Error::other("the port to the host is gone"))?;
    postgres::stop_for_good();
    Ok(())
}

/// Reads requests until the port fails.
fn listen(port: &port::Port, dispatch: &Dispatch) {
    let mut lines = lines::Lines::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match port.read(&mut buffer) {
            Ok(0) => lines.forget(),
            Ok(length) => {
                for line in lines.add(&buffer[..length]) {
                    dispatch.line(line);
                }
            }
            Err(error) => {
                eprintln!("onecopy-guest: reading from the host: {error}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
