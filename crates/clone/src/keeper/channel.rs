//! What keeper and hydrator say to each other: one message a packet, a word and a name, the file beside it.
//!
//! ```text
//! keeper                     hydrator
//!    ── kept NAME + file ──>            all that earlier hydrators gave, at its start
//!    ── begin ─────────────>
//!    <── keep NAME + file ──            replaces what had the name
//!    <── forget NAME ───────
//! ```
//!
//! A message that was sent is safe although its sender dies: the packet waits in the keeper's end.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::passing;

/// Files that a keeper holds, by name.
pub type KeptFiles = BTreeMap<String, OwnedFd>;

/// The longest name.
pub const NAME_BYTES_MAX: usize = 64;
/// A word and a name.
const MESSAGE_BYTES_MAX: usize = NAME_BYTES_MAX + 16;
/// How long one side waits for the other to read.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// One message.
#[derive(Debug)]
pub enum Message {
    /// Keep this file under this name.
    Keep(String, OwnedFd),
    /// Close the file of this name.
    Forget(String),
    /// This was kept.
    Kept(String, OwnedFd),
    /// That was all.
    Begin,
}

/// One end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Both ends; neither is inherited.
    ///
    /// # Errors
    /// Those of socketpair(2).
    pub fn pair() -> io::Result<(Channel, OwnedFd)> {
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Channel::over(own)?, other))
    }

    /// The end that was inherited.
    ///
    /// # Errors
    /// It is no socket.
    pub fn over(socket: OwnedFd) -> io::Result<Channel> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_TIMEOUT))?;
        Ok(Channel { socket })
    }

    /// To wait for a message with poll(2).
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Asks the other side to keep a file.
    ///
    /// # Errors
    /// The other side is gone, or does not read.
    pub fn keep(&self, name: &str, file: impl AsFd) -> io::Result<()> {
        self.send("keep", name, Some(&file.as_fd()))
    }

    /// Asks the other side to close a file.
    ///
    /// # Errors
    /// As [`Channel::keep`].
    pub fn forget(&self, name: &str) -> io::Result<()> {
        self.send("forget", name, None)
    }

    /// Gives all that was kept.
    ///
    /// # Errors
    /// As [`Channel::keep`].
    pub fn hand_over(&self, kept: &KeptFiles) -> io::Result<()> {
        for (name, file) in kept {
            self.send("kept", name, Some(&file.as_fd()))?;
        }
        self.send("begin", "", None)
    }

    fn send(&self, word: &str, name: &str, file: Option<&std::os::fd::BorrowedFd<'_>>) -> io::Result<()> {
        if name.len() > NAME_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the name is too long"));
        }
        let files = file.map(std::slice::from_ref).unwrap_or_default();
        passing::send(&self.socket, format!("{word} {name}").as_bytes(), files).map(drop)
    }

    /// The next message; none when the other side is gone.
    ///
    /// # Errors
    /// `WouldBlock` when there is none and `wait` is false; `InvalidData` for what is no message.
    pub fn receive(&self, wait: bool) -> io::Result<Option<Message>> {
        let (mut buffer, mut files) = ([0; MESSAGE_BYTES_MAX], Vec::new());
        let length = passing::receive(&self.socket, &mut buffer, &mut files, wait)?;
        if length == 0 {
            return Ok(None);
        }
        let text = std::str::from_utf8(&buffer[..length]).unwrap_or_default();
        let (word, name) = text.split_once(' ').unwrap_or_default();
        match (word, files.pop(), files.is_empty()) {
            ("keep", Some(file), true) => Ok(Some(Message::Keep(name.to_owned(), file))),
            ("kept", Some(file), true) => Ok(Some(Message::Kept(name.to_owned(), file))),
            ("forget", None, true) => Ok(Some(Message::Forget(name.to_owned()))),
            ("begin", None, true) => Ok(Some(Message::Begin)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("not a message: {text:?}"))),
        }
    }

    /// All that was kept, for a hydrator that begins.
    ///
    /// # Errors
    /// The keeper has gone before it gave all.
    pub fn take_over(&self) -> io::Result<KeptFiles> {
        let mut kept = KeptFiles::new();
        loop {
            match self.receive(true)? {
                Some(Message::Kept(name, file)) => drop(kept.insert(name, file)),
                Some(Message::Begin) => return Ok(kept),
                Some(other) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("out of place: {other:?}")));
                }
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_survives_its_sender() {
        let (keeper, other) = Channel::pair().unwrap();
        let hydrator = Channel::over(other).unwrap();
        hydrator.keep("bitmap", tempfile::tempfile().unwrap()).unwrap();
        hydrator.forget("journal").unwrap();
        drop(hydrator);
        assert!(matches!(keeper.receive(true).unwrap(), Some(Message::Keep(name, _)) if name == "bitmap"));
        assert!(matches!(keeper.receive(false).unwrap(), Some(Message::Forget(name)) if name == "journal"));
        assert!(keeper.receive(true).unwrap().is_none());
        assert!(keeper.hand_over(&KeptFiles::new()).is_err(), "nobody reads it");
    }

    #[test]
    fn nonsense_is_refused() {
        let (keeper, other) = Channel::pair().unwrap();
        for nonsense in ["", "keep bitmap", "begin ", "dance x", "\u{e4}"] {
            passing::send(&other, nonsense.as_bytes(), &[]).unwrap();
        }
        passing::send(&other, &[b'x'; MESSAGE_BYTES_MAX + 1], &[]).unwrap();
        let mut answers = Vec::new();
        for _ in 0..6 {
            answers.push(match keeper.receive(true) {
                Ok(Some(Message::Begin)) => "begin",
                Ok(None) => "closed",
                Err(error) if error.kind() == io::ErrorKind::InvalidData => "invalid",
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(answers, ["closed", "invalid", "begin", "invalid", "invalid", "invalid"]);
        assert!(Channel::over(tempfile::tempfile().unwrap().into()).is_err());
        assert!(keeper.keep(&"n".repeat(NAME_BYTES_MAX + 1), &other).is_err());
    }
}
