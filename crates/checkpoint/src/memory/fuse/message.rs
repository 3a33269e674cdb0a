//! The messages of FUSE that one file needs (`include/uapi/linux/fuse.h`), in the machine's own byte order.
//!
//! They come from the kernel; a message that is cut short or says what cannot be is an error all the same, never a
//! panic.

/// Bytes before each request.
pub(crate) const REQUEST_HEAD: usize = 40;
/// Bytes before each answer.
const ANSWER_HEAD: usize = 16;
/// What one write request carries at most, and one read request asks for.
pub(crate) const DATA_BYTES_MAX: u32 = 1 << 20;
/// A buffer for any request: the kernel wants room for its head and parameters beside the data.
pub(crate) const REQUEST_BYTES_MAX: usize = DATA_BYTES_MAX as usize + 4096;
/// How long the kernel may believe attributes, in seconds: nothing else changes them.
const ATTRIBUTES_VALID_S: u64 = 1 << 30;

pub(crate) const MAJOR: u32 = 7;
/// The first minor version that sends requests again.
pub(crate) const MINOR: u32 = 40;

const ASYNC_READ: u64 = 1 << 0;
const BIG_WRITES: u64 = 1 << 5;
const WRITEBACK_CACHE: u64 = 1 << 16;
const MAX_PAGES: u64 = 1 << 22;
const INIT_EXT: u64 = 1 << 30;
const HAS_RESEND: u64 = 1 << 39;
/// Without one of these the file is none that a guest's memory can be.
const NEEDED: u64 = WRITEBACK_CACHE | MAX_PAGES | INIT_EXT | HAS_RESEND;
/// Requests of the background (write-back, read-ahead) under way at once.
const BACKGROUND_MAX: u16 = 64;

const FOPEN_KEEP_CACHE: u32 = 1 << 1;
const NOTIFY_INVALIDATE_INODE: i32 = 2;
const NOTIFY_RESEND: i32 = 7;
/// The file, which is the mount's root.
const ROOT: u64 = 1;
const FATTR_SIZE: u32 = 1 << 3;

/// One request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// What its answer repeats.
    pub(crate) unique: u64,
    pub(crate) operation: Operation<'a>,
}

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Operation<'a> {
    Begin {
        major: u32,
        minor: u32,
        flags: u64,
        readahead: u32,
    },
    Attributes,
    SetAttributes {
        size_bytes: Option<u64>,
    },
    Open,
    Read {
        offset: u64,
        length: u32,
    },
    Write {
        offset: u64,
        data: &'a [u8],
    },
    Allocate {
        offset: u64,
        length: u64,
        mode: u32,
    },
    /// Flush, fsync, release, access: nothing to be done but to say so.
    Nothing,
    FileSystem,
    /// No answer is expected.
    Silent,
    End,
    Unknown,
}

/// Why bytes are no request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Not even its number is known: nothing can be answered.
    NoRequest,
    /// This one cannot be.
    Invalid { unique: u64 },
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl Request<'_> {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Request<'_>, Refusal> {
        let head = (u32_at(bytes, 0), u32_at(bytes, 4), u64_at(bytes, 8), bytes.get(REQUEST_HEAD..));
        let (Some(length), Some(code), Some(unique), Some(rest)) = head else { return Err(Refusal::NoRequest) };
        if length as usize != bytes.len() {
            return Err(Refusal::Invalid { unique });
        }
        let operation = operation(code, rest).ok_or(Refusal::Invalid { unique })?;
        Ok(Request { unique, operation })
    }
}

fn operation(code: u32, rest: &[u8]) -> Option<Operation<'_>> {
    Some(match code {
        // FORGET, INTERRUPT, BATCH_FORGET.
        2 | 36 | 42 => Operation::Silent,
        // GETATTR, SETATTR.
        3 => Operation::Attributes,
        4 => {
            let size_bytes = u64_at(rest, 16)?;
            Operation::SetAttributes { size_bytes: (u32_at(rest, 0)? & FATTR_SIZE != 0).then_some(size_bytes) }
        }
        14 => Operation::Open,
        15 => {
            let (offset, length) = (u64_at(rest, 8)?, u32_at(rest, 16)?);
            if length > DATA_BYTES_MAX {
                return None;
            }
            Operation::Read { offset, length }
        }
        16 => {
            let (offset, length, data) = (u64_at(rest, 8)?, u32_at(rest, 16)?, rest.get(40..)?);
            if length as usize != data.len() {
                return None;
            }
            Operation::Write { offset, data }
        }
        17 => Operation::FileSystem,
        // RELEASE, FSYNC, FLUSH, ACCESS.
        18 | 20 | 25 | 34 => Operation::Nothing,
        26 => {
            let (major, minor) = (u32_at(rest, 0)?, u32_at(rest, 4)?);
            let flags = u64::from(u32_at(rest, 12).unwrap_or(0)) | u64::from(u32_at(rest, 16).unwrap_or(0)) << 32;
            Operation::Begin { major, minor, flags, readahead: u32_at(rest, 8).unwrap_or(0) }
        }
        38 => Operation::End,
        43 => Operation::Allocate { offset: u64_at(rest, 8)?, length: u64_at(rest, 16)?, mode: u32_at(rest, 24)? },
        _ => Operation::Unknown,
    })
}

/// What the file looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Looks {
    pub(crate) size_bytes: u64,
    pub(crate) user_id: u32,
    pub(crate) group_id: u32,
}

/// An answer, as bytes. The buffer is used again and again.
#[derive(Default)]
pub(crate) struct Answer(Vec<u8>);

impl Answer {
    pub(crate) fn with_room() -> Answer {
        Answer(Vec::with_capacity(ANSWER_HEAD + DATA_BYTES_MAX as usize))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn begin(&mut self, unique: u64, error: i32) {
        self.0.clear();
        self.u32(0);
        self.0.extend_from_slice(&error.to_ne_bytes());
        self.u64(unique);
    }

    fn end(&mut self) {
        let length = u32::try_from(self.0.len()).expect("at most a megabyte");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
    }

    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_ne_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_ne_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_ne_bytes());
    }

    /// Done, or not: an errno.
    pub(crate) fn status(&mut self, unique: u64, errno: i32) {
        self.begin(unique, -errno);
        self.end();
    }

    /// Asks the kernel to send all requests again that were read and not answered.
    pub(crate) fn resend(&mut self) {
        self.begin(0, NOTIFY_RESEND);
        self.end();
    }

    /// Has the kernel forget what it has of the file's content, that is not written to.
    pub(crate) fn invalidate(&mut self) {
        self.begin(0, NOTIFY_INVALIDATE_INODE);
        self.u64(ROOT);
        // From its beginning, all of it.
        self.u64(0);
        self.u64(0);
        self.end();
    }

    /// The answer to `Begin`: what was agreed on, or the versions and flags that are missing.
    pub(crate) fn agreed(&mut self, unique: u64, flags: u64, readahead: u32) {
        let flags = flags & (ASYNC_READ | BIG_WRITES | NEEDED);
        self.begin(unique, 0);
        self.u32(MAJOR);
        self.u32(MINOR);
        self.u32(readahead);
        self.u32(u32::try_from(flags & u64::from(u32::MAX)).expect("masked"));
        self.u16(BACKGROUND_MAX);
        self.u16(BACKGROUND_MAX);
        self.u32(DATA_BYTES_MAX);
        // Times in nanoseconds.
        self.u32(1);
        self.u16(u16::try_from(DATA_BYTES_MAX / 4096).expect("256 pages"));
        self.u16(0);
        self.u32(u32::try_from(flags >> 32).expect("half of 64 bits"));
        self.0.extend_from_slice(&[0; 28]);
        self.end();
    }

    pub(crate) fn attributes(&mut self, unique: u64, looks: Looks) {
        self.begin(unique, 0);
        self.u64(ATTRIBUTES_VALID_S);
        self.u64(0);
        for value in [1, looks.size_bytes, looks.size_bytes / 512, 0, 0, 0] {
            self.u64(value);
        }
        for value in [0, 0, 0, libc::S_IFREG | 0o600, 1, looks.user_id, looks.group_id, 0, 4096, 0] {
            self.u32(value);
        }
        self.end();
    }

    pub(crate) fn opened(&mut self, unique: u64) {
        self.begin(unique, 0);
        self.u64(0);
        self.u32(FOPEN_KEEP_CACHE);
        self.u32(0);
        self.end();
    }

    pub(crate) fn written(&mut self, unique: u64, length: usize) {
        self.begin(unique, 0);
        self.u32(u32::try_from(length).expect("at most a megabyte"));
        self.u32(0);
        self.end();
    }

    pub(crate) fn file_system(&mut self, unique: u64, looks: Looks) {
        self.begin(unique, 0);
        for value in [looks.size_bytes / 4096, 0, 0, 1, 0] {
            self.u64(value);
        }
        for value in [4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0] {
            self.u32(value);
        }
        self.end();
    }

    /// Begins an answer whose data the caller appends with [`Answer::data`].
    pub(crate) fn begin_data(&mut self, unique: u64) {
        self.begin(unique, 0);
    }

    pub(crate) fn data(&mut self, data: &[u8]) {
        self.0.extend_from_slice(data);
        self.end();
    }
}

/// Whether a kernel that offers this can be served.
pub(crate) fn is_served(major: u32, minor: u32, flags: u64) -> bool {
    (major, minor) >= (MAJOR, MINOR) && major == MAJOR && flags & NEEDED == NEEDED
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(code: u32, parameters: &[u8]) -> Vec<u8> {
        let length = u32::try_from(REQUEST_HEAD + parameters.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), code.to_ne_bytes()].concat();
        bytes.extend_from_slice(&77u64.to_ne_bytes());
        bytes.resize(REQUEST_HEAD, 0);
        bytes.extend_from_slice(parameters);
        bytes
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn requests_are_told_apart() {
        let write = [words(&[0, 8192, 3, 0, 0]), b"abc".to_vec()].concat();
        let table = [
            (request(3, &[0; 16]), Some(Operation::Attributes)),
            (request(4, &words(&[8, 0, 5])), Some(Operation::SetAttributes { size_bytes: Some(5) })),
            (request(4, &words(&[1 << 5, 0, 5])), Some(Operation::SetAttributes { size_bytes: None })),
            (request(15, &words(&[0, 4096, 8192])), Some(Operation::Read { offset: 4096, length: 8192 })),
            (request(15, &words(&[0, 4096, 1 << 21])), None),
            (request(16, &write), Some(Operation::Write { offset: 8192, data: b"abc" })),
            (request(16, &write[..42]), None),
            (request(16, &words(&[0, 8192, 3, 0, 0, 0])), None),
            (
                request(43, &words(&[0, 4096, 8192, 3])),
                Some(Operation::Allocate { offset: 4096, length: 8192, mode: 3 }),
            ),
            (request(43, &words(&[0, 4096])), None),
            (request(1, b"ram\0"), Some(Operation::Unknown)),
        ];
        for (bytes, operation) in table {
            let expected = operation.map(|operation| Request { unique: 77, operation });
            assert_eq!(Request::parse(&bytes), expected.ok_or(Refusal::Invalid { unique: 77 }), "{bytes:?}");
            let short = &bytes[..bytes.len() - 1];
            assert_eq!(Request::parse(short), Err(Refusal::Invalid { unique: 77 }));
            assert_eq!(Request::parse(&bytes[..REQUEST_HEAD - 1]), Err(Refusal::NoRequest));
        }
    }

    #[test]
    fn an_old_kernel_is_not_served() {
        assert!(is_served(7, 40, NEEDED) && is_served(7, 45, u64::MAX));
        assert!(!is_served(7, 39, NEEDED) && !is_served(8, 0, NEEDED) && !is_served(7, 40, NEEDED & !HAS_RESEND));
    }

    #[test]
    fn answers_have_the_kernels_sizes() {
        type Make<'a> = &'a dyn Fn(&mut Answer);
        let looks = Looks { size_bytes: 1 << 30, user_id: 1, group_id: 2 };
        let mut answer = Answer::default();
        // fuse_init_out, fuse_attr_out, fuse_open_out, fuse_write_out, fuse_statfs_out.
        let sizes: [(Make, usize); 5] = [
            (&|answer| answer.agreed(1, u64::MAX, 0), 64),
            (&|answer| answer.attributes(1, looks), 104),
            (&|answer| answer.opened(1), 16),
            (&|answer| answer.written(1, 5), 8),
            (&|answer| answer.file_system(1, looks), 80),
        ];
        for (make, size) in sizes {
            make(&mut answer);
            assert_eq!(answer.bytes().len(), ANSWER_HEAD + size);
            assert_eq!(u32_at(answer.bytes(), 0).unwrap() as usize, answer.bytes().len());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_error(
            code in 0u32..50,
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = Request::parse(&bytes);
            if bytes.len() > 8 {
                let length = u32::try_from(bytes.len()).unwrap();
                bytes[..4].copy_from_slice(&length.to_ne_bytes());
                bytes[4..8].copy_from_slice(&code.to_ne_bytes());
                let _ = Request::parse(&bytes);
            }
        }
    }
}
