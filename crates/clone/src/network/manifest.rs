//! What is told of an image when it is opened: its shape, where it is consistent, its small files.

mod checks;

use std::fmt::Formatter;
use std::marker::PhantomData;
use std::time::Duration;

use checks::ENTRIES_MAX;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use tokio::io::AsyncRead;
use tokio::time::timeout;

use super::UNRESPONSIVE_MAX;
use super::protocol::{Message, PART_BYTES_MAX, ProtocolError, read_message};
use crate::image::{Image, ImageDirectory, ImageFile, SmallFile, Tablespace};
use crate::recovery::RecoveryPoint;

/// The longest manifest, compressed: JSON of paths shrinks to a tenth.
const MANIFEST_BYTES_MAX: usize = 64 << 20;
/// The longest manifest, as JSON: some 250 bytes for each of [`ENTRIES_MAX`].
const MANIFEST_TEXT_BYTES_MAX: u64 = 512 << 20;
/// The most bytes of small files with their names: they are held in memory.
const SMALL_FILES_BYTES_MAX: usize = 1 << 30;
/// The most small files.
const SMALL_FILES_MAX: usize = 1 << 20;
/// A freeze waits for a checkpoint and for other freezes; then it is told. A source that says for so long that it lives
/// is given up.
const OPENING_TIMEOUT: Duration = Duration::from_secs(3600);
/// JSON of paths shrinks to a tenth at once.
const ZSTD_LEVEL: i32 = 1;

/// What a clone must know of the image that it is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Directories, files, tablespaces.
    pub image: Image,
    /// Where it is consistent, and what makes PostgreSQL take it.
    pub recovery: RecoveryPoint,
    /// So long the source's accesses waited, in microseconds.
    pub pause_us: u64,
}

/// A manifest as it comes from another host, which may say more than can be held.
#[derive(Deserialize)]
struct ComingManifest {
    #[serde(with = "ComingImage")]
    image: Image,
    recovery: RecoveryPoint,
    pause_us: u64,
}

/// An image as it comes: of each list no more is read than an image may have.
#[derive(Deserialize)]
#[serde(remote = "Image")]
struct ComingImage {
    #[serde(deserialize_with = "bounded")]
    directories: Vec<ImageDirectory>,
    #[serde(deserialize_with = "bounded")]
    files: Vec<ImageFile>,
    #[serde(deserialize_with = "bounded")]
    tablespaces: Vec<Tablespace>,
}

/// A list of at most [`ENTRIES_MAX`]: of a longer one the rest is not read.
fn bounded<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Bounded<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
            write!(formatter, "a list of at most {ENTRIES_MAX} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(entry) = entries.next_element()? {
                if list.len() == ENTRIES_MAX {
                    return Err(A::Error::custom(format_args!("a list of more than {ENTRIES_MAX} entries")));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(Bounded(PhantomData))
}

/// A manifest and its small files.
#[derive(Debug)]
pub struct Opening {
    /// The manifest.
    pub manifest: Manifest,
    /// What is copied at the freeze.
    pub small_files: Vec<SmallFile>,
}

/// Manifest and small files as messages, the last one included.
///
/// # Errors
/// [`ProtocolError::Malformed`] for a path that is no UTF-8.
pub fn to_messages(manifest: &Manifest, small_files: Vec<SmallFile>) -> Result<Vec<Message>, ProtocolError> {
    let text = serde_json::to_vec(manifest).map_err(|_| ProtocolError::Malformed("a path that is no UTF-8"))?;
    let packed = zstd::bulk::compress(&text, ZSTD_LEVEL)?;
    let mut messages: Vec<Message> =
        packed.chunks(PART_BYTES_MAX).map(|part| Message::ManifestPart { bytes: part.to_vec() }).collect();
    for file in small_files {
        let parts = file.content.len().div_ceil(PART_BYTES_MAX).max(1);
        messages.extend((0..parts).map(|number| {
            let start = number * PART_BYTES_MAX;
            let end = file.content.len().min(start + PART_BYTES_MAX);
            let bytes = file.content[start..end].to_vec();
            Message::FilePart { path: file.path.clone(), mode: file.mode, last: number + 1 == parts, bytes }
        }));
    }
    messages.push(Message::Opened);
    Ok(messages)
}

/// Receives what [`to_messages`] gave, as far as it may be taken on the other host's word.
///
/// # Errors
/// [`ProtocolError`]; [`ProtocolError::Refused`] when the source cannot be frozen, [`ProtocolError::NotTaken`] for what
/// is not believed.
pub async fn receive<R>(reader: &mut R) -> Result<Opening, ProtocolError>
where
    R: AsyncRead + Unpin,
{
    receive_within(reader, UNRESPONSIVE_MAX, OPENING_TIMEOUT).await
}

async fn receive_within<R>(
    reader: &mut R,
    unresponsive_max: Duration,
    in_all: Duration,
) -> Result<Opening, ProtocolError>
where
    R: AsyncRead + Unpin,
{
    let slow = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    let mut opening = timeout(in_all, gather(reader, unresponsive_max)).await.map_err(slow)??;
    checks::take(&mut opening)?;
    Ok(opening)
}

async fn gather<R>(reader: &mut R, unresponsive_max: Duration) -> Result<Opening, ProtocolError>
where
    R: AsyncRead + Unpin,
{
    let unresponsive = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    let (mut buffer, mut packed, mut files, mut files_bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut unfinished: Option<SmallFile> = None;
    loop {
        match timeout(unresponsive_max, read_message(reader, &mut buffer)).await.map_err(unresponsive)?? {
            Message::ManifestPart { bytes } if packed.len() + bytes.len() <= MANIFEST_BYTES_MAX => packed.extend(bytes),
            Message::ManifestPart { .. } => return Err(ProtocolError::Malformed("a manifest that is too long")),
            Message::FilePart { path, mode, last, bytes } => {
                files_bytes += bytes.len() + path.as_os_str().len();
                if files_bytes > SMALL_FILES_BYTES_MAX || files.len() == SMALL_FILES_MAX {
                    return Err(ProtocolError::Malformed("more small files than can be held"));
                }
                let file = unfinished.get_or_insert(SmallFile { path: path.clone(), mode, content: Vec::new() });
                if file.path != path {
                    return Err(ProtocolError::Malformed("a small file inside another"));
                }
                file.content.extend(bytes);
                if last {
                    files.extend(unfinished.take());
                }
            }
            Message::Opened if unfinished.is_none() => break,
            // The freeze takes its time.
            Message::KeepAlive => {}
            Message::Refused { reason } => return Err(ProtocolError::refused(&reason)),
            other => return Err(ProtocolError::Unexpected { got: other.name(), wanted: "a manifest" }),
        }
    }
    Ok(Opening { manifest: unpack(&packed)?, small_files: files })
}

fn unpack(packed: &[u8]) -> Result<Manifest, ProtocolError> {
    use std::io::Read as _;
    let text = zstd::Decoder::new(packed)?.take(MANIFEST_TEXT_BYTES_MAX);
    let ComingManifest { image, recovery, pause_us } = serde_json::from_reader(std::io::BufReader::new(text))
        .map_err(|error| ProtocolError::not_taken("manifest", error.to_string(), "it is of another form"))?;
    Ok(Manifest { image, recovery, pause_us })
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::image::FileIdentity;

    /// A control file of PostgreSQL 15, as far as it is looked at: `src/include/catalog/pg_control.h`.
    pub fn control() -> Vec<u8> {
        const CHECKSUM_OFFSET: usize = 288;
        let mut bytes = vec![0; 8192];
        let fields = [(8, 1300), (12, 202_209_061), (16, 6), (40, 5), (48, 1), (172, 1)];
        for (offset, value) in fields {
            bytes[offset..offset + 4].copy_from_slice(&u32::to_ne_bytes(value));
        }
        let step = |rest: u32, _| if rest & 1 == 1 { (rest >> 1) ^ 0x82F6_3B78 } else { rest >> 1 };
        let byte = |rest: u32, byte: &u8| (0..8).fold(rest ^ u32::from(*byte), step);
        let checksum = !bytes[..CHECKSUM_OFFSET].iter().fold(u32::MAX, byte);
        bytes[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 4].copy_from_slice(&checksum.to_ne_bytes());
        bytes
    }

    /// A manifest of files of these sizes.
    pub fn manifest(sizes: &[u64]) -> Manifest {
        let file = |(number, size_bytes): (usize, &u64)| ImageFile {
            path: PathBuf::from(format!("base/1/{number}")),
            size_bytes: *size_bytes,
            mode: 0o600,
            identity: FileIdentity { device: 1, inode: number as u64, born_nanoseconds: 0 },
        };
        let files = sizes.iter().enumerate().map(file).collect();
        let recovery = serde_json::json!({
            "mode": "crash", "consistent_at": onecopy_postgres::Lsn(7), "timeline": 1, "redo": onecopy_postgres::Lsn(5),
            "major_version": 15, "control": control(), "backup_label": null, "history": null,
        });
        let recovery = serde_json::from_value(recovery).unwrap();
        let directories = ["base", "base/1"].map(|path| ImageDirectory { path: path.into(), mode: 0o700 }).to_vec();
        Manifest { image: Image { directories, files, ..Image::default() }, recovery, pause_us: 3 }
    }

    async fn carried(messages: Vec<Message>) -> Result<Opening, ProtocolError> {
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        let send = async move {
            let mut buffer = Vec::new();
            for message in messages {
                if super::super::protocol::write_message(&mut near, &message, &mut buffer).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(send, receive(&mut far)).1
    }

    #[tokio::test]
    async fn an_opening_arrives_as_it_was() {
        let manifest = manifest(&vec![8192; 3000]);
        let small = |path: &str, length| SmallFile { path: path.into(), mode: 0o640, content: vec![9; length] };
        let files = vec![small("server.crt", 10), small("empty", 0), small("big", PART_BYTES_MAX * 2 + 1)];
        let mut messages = to_messages(&manifest, files.clone()).unwrap();
        messages.insert(0, Message::KeepAlive);
        let opening = carried(messages).await.unwrap();
        assert!(opening.manifest == manifest);
        assert!(opening.small_files == files);
    }

    #[tokio::test]
    async fn a_source_that_cannot_be_frozen_says_why_and_nothing_is_no_manifest() {
        let refusal = Message::Refused { reason: "wal_level is \x1b[31mminimal".to_owned() };
        let error = carried(vec![refusal]).await.unwrap_err();
        assert!(matches!(&error, ProtocolError::Refused(reason) if reason == "wal_level is  [31mminimal"), "{error}");
        let error = carried(vec![Message::Opened]).await.unwrap_err();
        assert!(matches!(&error, ProtocolError::NotTaken { field: "manifest", .. }), "{error}");
    }

    /// Spec: C3
    #[test]
    fn k22_a_list_without_end_is_read_no_further_than_an_image_may_have_entries() {
        fn read(text: &str) -> Result<Vec<u8>, serde_json::Error> {
            bounded(&mut serde_json::Deserializer::from_str(text))
        }
        assert_eq!(read("[1, 2]").unwrap(), [1, 2]);
        let most = format!("[{}0]", "0,".repeat(ENTRIES_MAX - 1));
        assert_eq!(read(&most).unwrap().len(), ENTRIES_MAX);
        // What follows is no JSON, and is not looked at.
        let error = read(&format!("[{}0, evil", "0,".repeat(ENTRIES_MAX))).unwrap_err().to_string();
        assert!(error.contains("more than 2000000 entries"), "{error}");
        let mut text = serde_json::to_value(manifest(&[8192])).unwrap();
        text["image"]["tablespaces"] = serde_json::json!(7);
        let packed = zstd::bulk::compress(&serde_json::to_vec(&text).unwrap(), 1).unwrap();
        let error = unpack(&packed).unwrap_err().to_string();
        assert!(error.contains("a list of at most 2000000 entries"), "{error}");
    }

    /// Spec: C3
    #[tokio::test]
    async fn k22_a_source_that_never_comes_to_the_end_is_given_up() {
        let (unresponsive_max, in_all, never) = (Duration::from_millis(100), Duration::from_millis(300), Duration::MAX);
        for (speaks, unresponsive_max, in_all) in [(false, unresponsive_max, never), (true, never, in_all)] {
            let (mut near, mut far) = tokio::io::duplex(1 << 16);
            let send = async move {
                let mut buffer = Vec::new();
                if !speaks {
                    std::future::pending::<()>().await;
                }
                loop {
                    super::super::protocol::write_message(&mut near, &Message::KeepAlive, &mut buffer).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            let error = tokio::select! {
                never = send => never,
                received = receive_within(&mut far, unresponsive_max, in_all) => received.unwrap_err(),
            };
            assert!(matches!(error, ProtocolError::Broken(_)), "{error}");
        }
    }
}
