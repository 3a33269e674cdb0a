//! A connection's two directions, plain or encrypted.

use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;

use super::protocol::Violation;
use super::socket::Socket;
use super::tls::{Decrypting, Encrypting, Session};

/// What is read ahead: many small requests in one system call.
const READ_AHEAD_BYTES: usize = 128 << 10;

/// The direction in which bytes come.
pub(crate) enum Incoming {
    Plain(Arc<Socket>),
    Encrypted(Box<Decrypting>),
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Incoming::Plain(socket) => (&**socket).read(into),
            Incoming::Encrypted(session) => session.read(into),
        }
    }
}

/// The direction in which bytes go.
pub(crate) enum Outgoing {
    Plain(Arc<Socket>),
    Encrypted(Encrypting),
}

impl Outgoing {
    /// Ends this direction in order.
    pub(crate) fn finish(&mut self) {
        // The connection is over either way.
        match self {
            Outgoing::Plain(socket) => socket.shutdown(Shutdown::Write),
            Outgoing::Encrypted(session) => drop(session.finish()),
        }
    }
}

impl Write for Outgoing {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Outgoing::Plain(socket) => (&**socket).write(from),
            Outgoing::Encrypted(session) => session.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection.
pub(crate) struct Stream {
    pub(crate) incoming: BufReader<Incoming>,
    pub(crate) outgoing: Outgoing,
    pub(crate) socket: Arc<Socket>,
    pub(crate) is_encrypted: bool,
}

impl Stream {
    pub(crate) fn plain(socket: Arc<Socket>) -> Stream {
        Stream {
            incoming: BufReader::with_capacity(READ_AHEAD_BYTES, Incoming::Plain(Arc::clone(&socket))),
            outgoing: Outgoing::Plain(Arc::clone(&socket)),
            socket,
            is_encrypted: false,
        }
    }

    /// Encrypts all that follows. What the other side sent before must have been read: else somebody in between could
    /// slip in what seems to come from the encrypted side.
    pub(crate) fn encrypt(self, shake: impl FnOnce(Arc<Socket>) -> io::Result<Arc<Session>>) -> io::Result<Stream> {
        if !self.incoming.buffer().is_empty() {
            return Err(Violation::new("plain bytes where encryption begins").into());
        }
        let session = shake(Arc::clone(&self.socket))?;
        let incoming = Incoming::Encrypted(Box::new(Decrypting::of(Arc::clone(&session))));
        Ok(Stream {
            incoming: BufReader::with_capacity(READ_AHEAD_BYTES, incoming),
            outgoing: Outgoing::Encrypted(Encrypting::of(session)),
            socket: self.socket,
            is_encrypted: true,
        })
    }

    /// Reads a field of fixed length.
    pub(crate) fn array<const COUNT: usize>(&mut self) -> io::Result<[u8; COUNT]> {
        let mut bytes = [0; COUNT];
        self.incoming.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads data whose length the other side told; more than `maximum_bytes` are a violation.
    pub(crate) fn data(&mut self, length: u32, maximum_bytes: u32) -> io::Result<Vec<u8>> {
        if length > maximum_bytes {
            return Err(Violation::new(format!("{length} bytes where {maximum_bytes} are the most")).into());
        }
        let mut bytes = vec![0; length as usize];
        self.incoming.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}
