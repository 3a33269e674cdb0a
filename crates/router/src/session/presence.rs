//! Whether the client is still there, for a session that waits for somebody else.
//!
//! A session that reads from its client sees the end of the connection by itself. One that waits for a server (a lock,
//! a long statement), for a place in a pool, for a gate or an epoch does not. So beside it the client's socket is
//! looked at now and then; nothing is read from it, and what was sent before it was closed stays where it is.
//!
//! A client whose connection is broken is gone at once. One that has closed its side may have said all that it wants to
//! say: what runs may end by itself for a moment, as on one server; then the next statement of those that were said,
//! and a client that takes its answers is there. Then the running statement is cancelled, so that it ends with an
//! answer, and what does not end is cut off: its back ends are closed, and each notices that itself
//! ([`NOTICE_INTERVAL`]).

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::CancelSlot;
use crate::backend::NOTICE_INTERVAL;
use crate::wire::Channel;

/// Between two looks at the socket of a client for which something is done.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What runs for a client that has closed its side may end by itself within this.
const CLOSED_GRACE: Duration = Duration::from_millis(1500);

/// What was cancelled must end within this.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// No back end works for a client for longer than this after it has gone, unless the server is too busy to notice.
pub const GONE_CLIENT_BOUND: Duration = LOOK_INTERVAL
    .saturating_add(CLOSED_GRACE)
    .saturating_add(LOOK_INTERVAL)
    .saturating_add(CANCEL_TIMEOUT)
    .saturating_add(NOTICE_INTERVAL);

/// How a client's connection looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Open,
    /// The client sends nothing any more.
    Closed,
    /// Nobody is there.
    Broken,
}

/// A client's connection, seen from beside its session.
#[derive(Debug)]
pub struct Presence {
    /// None when no second handle was to be had: then only the session itself sees its client go.
    socket: Option<OwnedFd>,
    /// The session waits for its client, and would see it go.
    listens: AtomicBool,
    stops_listening: Notify,
    /// How many statements have ended.
    ended: AtomicU64,
    /// How many bytes the client has taken.
    taken: Arc<AtomicU64>,
    gone: AtomicBool,
}

impl Presence {
    /// Looks at `client`.
    pub fn of(client: &Channel) -> Presence {
        let socket = client.handle().inspect_err(|error| tracing::warn!(%error, "a client is not looked after")).ok();
        Presence {
            socket,
            listens: AtomicBool::new(false),
            stops_listening: Notify::new(),
            ended: AtomicU64::new(0),
            taken: client.taken(),
            gone: AtomicBool::new(false),
        }
    }

    /// Whether the session waits for its client, and need not be told that it has gone.
    pub fn set_listening(&self, listens: bool) {
        if self.listens.swap(listens, SeqCst) && !listens {
            self.stops_listening.notify_one();
        }
    }

    /// A statement has ended: what the client has said before it closed its side goes on to the next one.
    pub fn note_end(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// Whether the client has gone, so that nothing more shall be begun for it.
    pub fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Runs `work` for the client; none when it was cut off because the client has gone. `running` is the statement
    /// that it waits for.
    pub async fn while_there<T>(&self, running: &CancelSlot, work: impl Future<Output = T>) -> Option<T> {
        let work = pin!(work);
        tokio::select! {
            biased;
            output = work => Some(output),
            () = self.gone_for_good(running) => None,
        }
    }

    async fn gone_for_good(&self, running: &CancelSlot) {
        let mut closed_since = None;
        let mut progress = (0, 0);
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            while self.listens.load(SeqCst) {
                self.stops_listening.notified().await;
            }
            let before = std::mem::replace(&mut progress, (self.ended.load(SeqCst), self.taken.load(SeqCst)));
            if progress != before {
                closed_since = None;
            }
            match self.line() {
                Line::Open => closed_since = None,
                Line::Closed if closed_since.get_or_insert_with(Instant::now).elapsed() < CLOSED_GRACE => {}
                Line::Closed | Line::Broken => break,
            }
        }
        self.gone.store(true, SeqCst);
        let deadline = Instant::now() + CANCEL_TIMEOUT;
        if let Some(cancelling) = running.cancel() {
            // Whether or not it was sent: what does not end is cut off.
            let _ = tokio::time::timeout_at(deadline, cancelling.send()).await;
        }
        tokio::time::sleep_until(deadline).await;
    }

    fn line(&self) -> Line {
        let Some(socket) = &self.socket else { return Line::Open };
        let mut sockets = [PollFd::new(socket, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut sockets, Some(&at_once)) {
            Ok(_) if sockets[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => Line::Broken,
            Ok(_) if sockets[0].revents().contains(PollFlags::RDHUP) => Line::Closed,
            _ => Line::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::wire::Socket;

    async fn pair() -> (TcpStream, Channel) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
        let (socket, _) = listener.accept().await.expect("a client");
        (client, Channel::new(Socket::Tcp(socket), 1000))
    }

    /// Looks until the line is `wanted`: what one end does reaches the other a moment later.
    async fn becomes(presence: &Presence, wanted: Line) {
        while presence.line() != wanted {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_line_is_seen_to_be_closed_behind_what_was_not_read() {
        let (mut client, channel) = pair().await;
        let presence = Presence::of(&channel);
        client.write_all(&[0; 100_000]).await.expect("it is open");
        assert_eq!(presence.line(), Line::Open);
        client.shutdown().await.expect("it is open");
        becomes(&presence, Line::Closed).await;
    }

    #[tokio::test]
    async fn a_line_is_seen_to_be_broken() {
        let (mut client, mut channel) = pair().await;
        let presence = Presence::of(&channel);
        channel.output.extend_from_slice(b"12");
        channel.flush().await.expect("it is open");
        client.read_u8().await.expect("two bytes were sent");
        // With one of them unread the client's kernel answers by a reset.
        drop(client);
        becomes(&presence, Line::Broken).await;
    }

    #[tokio::test]
    async fn work_for_a_client_that_has_closed_its_side_may_end_and_is_cut_off_later() {
        let (mut client, channel) = pair().await;
        let presence = Presence::of(&channel);
        client.shutdown().await.expect("it is open");
        becomes(&presence, Line::Closed).await;
        let running = CancelSlot::default();
        assert_eq!(presence.while_there(&running, tokio::time::sleep(LOOK_INTERVAL * 2)).await, Some(()));
        assert_eq!(presence.while_there(&running, std::future::pending::<()>()).await, None);
        assert!(presence.is_gone());
    }

    /// Spec: A2
    #[tokio::test]
    async fn work_goes_on_for_a_client_that_has_closed_its_side_while_statements_end_or_it_takes_answers() {
        const STEPS: u32 = 6;
        let (mut client, mut channel) = pair().await;
        let presence = Presence::of(&channel);
        client.shutdown().await.expect("its side is open");
        becomes(&presence, Line::Closed).await;
        let running = CancelSlot::default();
        let work = async {
            for step in 0..STEPS {
                tokio::time::sleep(LOOK_INTERVAL * 2).await;
                if step % 2 == 0 {
                    presence.note_end();
                } else {
                    channel.output.extend_from_slice(b"an answer");
                    channel.flush().await.expect("the client reads");
                }
            }
        };
        assert_eq!(presence.while_there(&running, work).await, Some(()));
    }
}
