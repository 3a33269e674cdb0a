//! A client of the tests.

use super::*;

/// A client that says what it is told to.
pub(super) struct Client {
    pub(super) stream: UnixStream,
    cookie: u64,
}

impl Client {
    pub(super) fn greeted(socket: &Path) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&3_u32.to_be_bytes()).unwrap();
        Client { stream, cookie: 0 }
    }

    pub(super) fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.stream.write_all(&option_message(option, data)).unwrap();
        let mut answers = Vec::new();
        loop {
            let mut head = [0; AnswerHeader::BYTES];
            self.stream.read_exact(&mut head).unwrap();
            let header = AnswerHeader::parse(&head).unwrap();
            let mut data = vec![0; header.length as usize];
            self.stream.read_exact(&mut data).unwrap();
            answers.push((header.kind, data));
            if header.kind == answer::ACK || header.kind & answer::ERROR != 0 {
                return answers;
            }
        }
    }

    pub(super) fn send(&mut self, command: u16, flags: u16, range: Range<u64>, data: &[u8]) -> u64 {
        self.cookie += 1;
        let length = (range.end - range.start) as u32;
        let header = RequestHeader { flags, command, cookie: self.cookie, offset: range.start, length };
        self.stream.write_all(&header.encode()).unwrap();
        self.stream.write_all(data).unwrap();
        self.cookie
    }

    /// The next reply's cookie, and its payload or errno.
    pub(super) fn receive(&mut self) -> (u64, Result<Vec<u8>, u32>) {
        let mut head = [0; ReplyHeader::CHUNK_BYTES];
        self.stream.read_exact(&mut head[..4]).unwrap();
        let length = ReplyHeader::bytes(u32::from_be_bytes(head[..4].try_into().unwrap())).unwrap();
        self.stream.read_exact(&mut head[4..length]).unwrap();
        match ReplyHeader::parse(&head[..length]).unwrap() {
            ReplyHeader::Simple { error: 0, cookie } => (cookie, Ok(Vec::new())),
            ReplyHeader::Simple { error, cookie } => (cookie, Err(error)),
            ReplyHeader::Chunk { kind, cookie, length, .. } => {
                let mut payload = vec![0; length as usize];
                self.stream.read_exact(&mut payload).unwrap();
                if kind == chunk::OFFSET_DATA {
                    return (cookie, Ok(payload[8..].to_vec()));
                }
                match Payload::parse(kind, &payload).unwrap() {
                    Payload::Hole { length, .. } => (cookie, Ok(vec![0; length as usize])),
                    Payload::Status { .. } => (cookie, Ok(payload[4..].to_vec())),
                    Payload::Failure { error, .. } => (cookie, Err(error)),
                    Payload::None => (cookie, Ok(Vec::new())),
                }
            }
        }
    }

    pub(super) fn ask(&mut self, command: u16, flags: u16, range: Range<u64>, data: &[u8]) -> Result<Vec<u8>, u32> {
        let cookie = self.send(command, flags, range, data);
        let (answered, outcome) = self.receive();
        assert_eq!(answered, cookie);
        outcome
    }
}
