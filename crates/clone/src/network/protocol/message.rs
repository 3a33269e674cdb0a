//! What is said.

use std::fmt;
use std::io::Read as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Payload;
use crate::ByteRange;
use crate::image::FileNumber;

/// Which image is meant, and the right to read it: nobody can guess it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionId(pub(super) [u8; 16]);

impl SessionId {
    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// When the kernel gives none.
    pub fn generate() -> std::io::Result<SessionId> {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(SessionId(bytes))
    }
}

/// Only its beginning: enough for a log, not for a thief.
impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}..")
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Somebody waits for what is read.
    Demand,
    /// Nobody does.
    Background,
}

/// A range that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// Which of the connection's requests it is.
    pub id: u64,
    /// The file.
    pub file: FileNumber,
    /// From where.
    pub offset_bytes: u64,
    /// How much.
    pub length_bytes: u32,
}

/// Chunks of a file that the clone has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveredRange {
    /// The file.
    pub file: FileNumber,
    /// The first chunk.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// Why a range cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFailure {
    /// The source's disk says no.
    Io,
    /// The image is gone for good.
    Lost,
}

/// One message, of either side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The clone's side begins.
    Hello {
        /// [`super::VERSION`].
        version: u16,
        /// What the connection is for.
        lane: Lane,
        /// Which image; none for a new one.
        session: Option<SessionId>,
    },
    /// The source's side agrees.
    Welcome {
        /// [`super::VERSION`].
        version: u16,
        /// Which image it is from now on.
        session: SessionId,
        /// How long the image is kept without a connection.
        lease_seconds: u32,
    },
    /// The source's side does not agree; it closes.
    Refused {
        /// Why.
        reason: String,
    },
    /// What shall be frozen: a plan as JSON.
    Open {
        /// The plan.
        plan: Vec<u8>,
    },
    /// A part of the manifest.
    ManifestPart {
        /// The part.
        bytes: Vec<u8>,
    },
    /// A part of a small file; parts of one file follow each other.
    FilePart {
        /// Its path from the data directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// No part of this file follows.
        last: bool,
        /// The part.
        bytes: Vec<u8>,
    },
    /// The manifest and the small files are complete.
    Opened,
    /// A range is wanted.
    Read(ReadRequest),
    /// A range that was wanted.
    Content {
        /// Whose answer it is.
        id: u64,
        /// The bytes.
        payload: Payload,
    },
    /// A range that cannot be had.
    Failed {
        /// Whose answer it is.
        id: u64,
        /// Whether another attempt may help.
        failure: ReadFailure,
        /// Why.
        reason: String,
    },
    /// The clone has these: they need not be kept.
    Delivered(Vec<DeliveredRange>),
    /// What does the source use most?
    HotWanted,
    /// A part of that, hottest first.
    Hot {
        /// No part follows.
        last: bool,
        /// The part.
        ranges: Vec<(FileNumber, ByteRange)>,
    },
    /// Nothing to say, and still there.
    KeepAlive,
    /// The image may go.
    End {
        /// The clone has everything; else it is given up.
        whole: bool,
    },
}

impl Message {
    /// Its kind's number in a frame, and its name.
    pub(super) fn kind(&self) -> (u8, &'static str) {
        match self {
            Message::Hello { .. } => (1, "hello"),
            Message::Welcome { .. } => (2, "welcome"),
            Message::Refused { .. } => (3, "a refusal"),
            Message::Open { .. } => (4, "an opening"),
            Message::ManifestPart { .. } => (5, "a manifest"),
            Message::FilePart { .. } => (6, "a small file"),
            Message::Opened => (7, "the end of an opening"),
            Message::Read(_) => (8, "a read"),
            Message::Content { .. } => (9, "content"),
            Message::Failed { .. } => (10, "a failed read"),
            Message::Delivered(_) => (11, "an acknowledgement"),
            Message::KeepAlive => (12, "a sign of life"),
            Message::End { .. } => (13, "an end"),
            Message::HotWanted => (14, "a question for what is hot"),
            Message::Hot { .. } => (15, "what is hot"),
        }
    }

    /// What it is, for errors.
    pub fn name(&self) -> &'static str {
        self.kind().1
    }
}
