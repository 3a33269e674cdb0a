//! One of several connections to a server, made again whenever it is lost.
//!
//! ```text
//!   dialling --connected--> receiving --lost--> waiting --pause over--> dialling
//!       \--- failed ------------------------------^        closed: the end, from anywhere
//! ```

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::Shared;
use super::link::Link;
use super::negotiation::{self, Agreed, Refusal};
use crate::nbd::stream::Stream;

/// The first pause after a loss; each further failure doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause: how soon a server that came back is found.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How long one attempt may take, until requests can be sent.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a request may wait to be sent: a server that takes nothing more is as good as gone, and is dialled again.
const SEND_TIMEOUT: Duration = Duration::from_secs(20);

/// The work of a connection's thread, until the client is closed.
pub(super) fn run(shared: &Shared, connection: usize) {
    let mut pause = PAUSE_MIN;
    while shared.may_dial(connection) {
        match dial(shared) {
            Ok((stream, agreed)) => {
                pause = PAUSE_MIN;
                let Stream { mut incoming, outgoing, socket, .. } = stream;
                let link = Arc::new(Link::new(outgoing, socket, agreed));
                if !shared.publish(connection, &link) {
                    return;
                }
                let error = link.receive(&mut incoming);
                shared.withdraw(connection, &error);
                link.cut();
                link.give_up();
                debug!(server = %shared.url_text, connection, %error, "an NBD connection was lost");
            }
            Err(Refusal::Refused(reason)) => shared.refused(&reason),
            Err(Refusal::Lost(error)) => shared.lost(connection, &error),
        }
        shared.rest(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn dial(shared: &Shared) -> Result<(Stream, Agreed), Refusal> {
    let socket = Arc::new(shared.url.address.dial(DIAL_TIMEOUT)?);
    if let Some(account) = shared.account
        && let Some(found) = socket.peer_account()?.filter(|found| *found != account)
    {
        let reason = format!("a process of account {found} listens there, and not one of {account}");
        return Err(io::Error::other(reason).into());
    }
    socket.set_deadline(Some(Instant::now() + DIAL_TIMEOUT))?;
    let (stream, agreed) = negotiation::open(Stream::plain(socket), &shared.url, shared.tls.as_ref())?;
    stream.socket.set_deadline(None)?;
    stream.socket.set_send_timeout(SEND_TIMEOUT)?;
    if let Some(reason) = shared.mismatch(&agreed) {
        warn!(server = %shared.url_text, reason, "the export is not usable");
        return Err(Refusal::Lost(io::Error::other(reason)));
    }
    Ok((stream, agreed))
}
