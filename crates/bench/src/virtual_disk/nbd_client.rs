//! A client of an NBD server, as small as the protocol allows.
//!
//! Source: the NBD protocol's description (NetworkBlockDevice/nbd, doc/proto.md): fixed newstyle negotiation with
//! `NBD_OPT_EXPORT_NAME`, requests and simple replies.

use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;

use super::load::{Ask, Client};
use super::vhost_client::stamp;

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const OPTION: &[u8; 8] = b"IHAVEOPT";
const OPTION_EXPORT_NAME: u32 = 1;
/// Fixed newstyle, and no zeroes after the export's description.
const CLIENT_FLAGS: u32 = 3;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const REQUEST_BYTES_MAX: usize = 128 << 10;

/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The client.
pub struct NbdClient {
    stream: BufReader<UnixStream>,
    /// Bytes that the answer to each request under way brings.
    under_way: HashMap<u64, u32>,
    next: u64,
    data: Vec<u8>,
    /// Requests that were not sent yet: they go together, as a guest's go with one kick.
    unsent: Vec<u8>,
}

impl NbdClient {
    /// Connects to the export "" at a socket.
    pub fn connect(socket: &Path) -> anyhow::Result<NbdClient> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut stream = BufReader::with_capacity(REQUEST_BYTES_MAX * 4, stream);
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        ensure!(greeting[..16] == GREETING[..], "this is no NBD server");
        let mut answer = CLIENT_FLAGS.to_be_bytes().to_vec();
        answer.extend_from_slice(OPTION);
        answer.extend(OPTION_EXPORT_NAME.to_be_bytes());
        answer.extend(0_u32.to_be_bytes());
        stream.get_mut().write_all(&answer)?;
        // Size and flags.
        stream.read_exact(&mut [0; 10])?;
        let data = vec![0; REQUEST_BYTES_MAX];
        Ok(NbdClient { stream, under_way: HashMap::new(), next: 0, data, unsent: Vec::new() })
    }

    /// Reads one reply.
    fn reply(&mut self) -> anyhow::Result<()> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let number = |from: usize| u32::from_be_bytes(head[from..][..4].try_into().expect("four bytes"));
        ensure!(number(0) == REPLY, "not a simple reply");
        ensure!(number(4) == 0, "a request failed with {}", number(4));
        let cookie = u64::from_be_bytes(head[8..].try_into().expect("eight bytes"));
        let bytes = self.under_way.remove(&cookie).ok_or_else(|| anyhow::anyhow!("an answer to nothing"))?;
        Ok(self.stream.read_exact(&mut self.data[..bytes as usize])?)
    }
}

impl Client for NbdClient {
    fn begin(&mut self, ask: Ask) -> anyhow::Result<bool> {
        self.next += 1;
        let kind = if ask.is_write { WRITE } else { READ };
        self.unsent.extend(REQUEST.to_be_bytes());
        self.unsent.extend([0, 0]);
        self.unsent.extend(kind.to_be_bytes());
        self.unsent.extend(self.next.to_be_bytes());
        self.unsent.extend(ask.offset.to_be_bytes());
        self.unsent.extend(ask.length.to_be_bytes());
        if ask.is_write {
            let begin = self.unsent.len();
            self.unsent.resize(begin + ask.length as usize, 0);
            stamp(&mut self.unsent[begin..], self.next);
        }
        self.under_way.insert(self.next, if ask.is_write { 0 } else { ask.length });
        Ok(true)
    }

    fn wait(&mut self) -> anyhow::Result<u32> {
        let unsent = std::mem::take(&mut self.unsent);
        self.stream.get_mut().write_all(&unsent)?;
        self.unsent = unsent;
        self.unsent.clear();
        self.reply()?;
        let mut ended = 1;
        // What has arrived already; a reply that is not whole yet is waited for.
        while self.stream.buffer().len() >= 16 {
            self.reply()?;
            ended += 1;
        }
        Ok(ended)
    }
}
