//! One client from its first byte to its last.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::replies::Replies;
use super::transmission::Transmission;
use super::{Place, negotiation};
use crate::nbd::socket::Socket;
use crate::nbd::stream::Stream;

/// A client that has not opened an export by then holds a place for nothing.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(20);

/// Serves a client until it leaves, is lost, or the server closes. What it has begun is finished then, unless it is
/// lost or the server cuts it off, and its export given back. Reads that a lost client leaves behind keep its place
/// until they return.
pub(super) fn serve(place: &Arc<Place>, socket: Arc<Socket>) -> io::Result<()> {
    let shared = &place.shared;
    socket.set_deadline(Some(Instant::now() + NEGOTIATION_TIMEOUT))?;
    let Some((stream, agreement)) = negotiation::negotiate(shared, Stream::plain(socket), &place.keeps_its_place)?
    else {
        return Ok(());
    };
    let Stream { mut incoming, outgoing, socket, .. } = stream;
    socket.set_deadline(None)?;
    let replies = Arc::new(Replies::new(outgoing, socket, agreement.is_structured, &shared.budget));
    let sender = Arc::clone(&replies);
    let sender = thread::Builder::new().name("nbd-send".into()).spawn(move || sender.send_until_over())?;
    let mut transmission = Transmission::new(Arc::clone(place), agreement, Arc::clone(&replies));
    let outcome = transmission.run(&mut incoming);
    if outcome.is_err() && !shared.is_stopping() {
        replies.lose();
    }
    replies.end(|| shared.is_cut());
    // A client that was lost comes again and asks anew: what it had asked for must not be done behind that.
    transmission.withdraw();
    if sender.join().is_err() {
        return Err(io::Error::other("the sending thread panicked"));
    }
    outcome
}
