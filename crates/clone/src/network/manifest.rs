//! What is told of an image when it is opened: its shape, where it is consistent, its small files.

use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

use super::protocol::{Message, PART_BYTES_MAX, ProtocolError, read_message};
use crate::image::{Image, SmallFile};
use crate::recovery::RecoveryPoint;

/// The longest manifest, compressed: some ten million files.
const MANIFEST_BYTES_MAX: usize = 256 << 20;
/// The longest manifest, as JSON.
const MANIFEST_TEXT_BYTES_MAX: u64 = 4 << 30;
/// The most bytes of small files: they are held in memory.
const SMALL_FILES_BYTES_MAX: usize = 1 << 30;
/// The most small files.
const SMALL_FILES_MAX: usize = 1 << 20;
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

/// Receives what [`to_messages`] gave.
///
/// # Errors
/// [`ProtocolError`]; [`ProtocolError::Refused`] when the source cannot be frozen.
pub async fn receive<R>(reader: &mut R) -> Result<Opening, ProtocolError>
where
    R: AsyncRead + Unpin,
{
    let (mut buffer, mut packed, mut files, mut files_bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut unfinished: Option<SmallFile> = None;
    loop {
        match read_message(reader, &mut buffer).await? {
            Message::ManifestPart { bytes } if packed.len() + bytes.len() <= MANIFEST_BYTES_MAX => packed.extend(bytes),
            Message::ManifestPart { .. } => return Err(ProtocolError::Malformed("a manifest that is too long")),
            Message::FilePart { path, mode, last, bytes } => {
                files_bytes += bytes.len();
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
            Message::Refused { reason } => return Err(ProtocolError::Refused(reason)),
            other => return Err(ProtocolError::Unexpected { got: other.name(), wanted: "a manifest" }),
        }
    }
    let opening = Opening { manifest: unpack(&packed)?, small_files: files };
    check_paths(&opening)?;
    Ok(opening)
}

fn unpack(packed: &[u8]) -> Result<Manifest, ProtocolError> {
    use std::io::Read as _;
    let text = zstd::Decoder::new(packed)?.take(MANIFEST_TEXT_BYTES_MAX);
    serde_json::from_reader(std::io::BufReader::new(text))
        .map_err(|_| ProtocolError::Malformed("a manifest of another form"))
}

/// A clone writes inside its own directory only, whatever the other host says.
fn check_paths(opening: &Opening) -> Result<(), ProtocolError> {
    let image = &opening.manifest.image;
    let paths = image.files.iter().map(|file| &file.path);
    let paths = paths.chain(image.directories.iter().map(|directory| &directory.path));
    let mut paths = paths.chain(opening.small_files.iter().map(|file| &file.path));
    if paths.all(|path| is_inside(path)) { Ok(()) } else { Err(ProtocolError::Malformed("a path that leads outside")) }
}

fn is_inside(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::image::{FileIdentity, ImageFile};

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
            "major_version": 15, "control": [1, 2, 3], "backup_label": null, "history": null,
        });
        let recovery = serde_json::from_value(recovery).unwrap();
        Manifest { image: Image { files, ..Image::default() }, recovery, pause_us: 3 }
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
        let files = vec![small("postgresql.conf", 10), small("empty", 0), small("big", PART_BYTES_MAX * 2 + 1)];
        let mut messages = to_messages(&manifest, files.clone()).unwrap();
        messages.insert(0, Message::KeepAlive);
        let opening = carried(messages).await.unwrap();
        assert!(opening.manifest == manifest);
        assert!(opening.small_files == files);
    }

    #[tokio::test]
    async fn paths_that_lead_outside_are_refused() {
        for path in ["/etc/passwd", "../x", "base/../../x", ""] {
            let mut hostile = manifest(&[1]);
            hostile.image.files[0].path = path.into();
            let error = carried(to_messages(&hostile, Vec::new()).unwrap()).await.unwrap_err();
            assert!(error.to_string().contains("leads outside"), "{path:?}: {error}");
            let small = SmallFile { path: path.into(), mode: 0o600, content: Vec::new() };
            let error = carried(to_messages(&manifest(&[1]), vec![small]).unwrap()).await.unwrap_err();
            assert!(error.to_string().contains("leads outside"), "{path:?}: {error}");
        }
        let refusal = Message::Refused { reason: "wal_level is minimal".to_owned() };
        assert!(matches!(carried(vec![refusal]).await, Err(ProtocolError::Refused(_))));
        assert!(matches!(carried(vec![Message::Opened]).await, Err(ProtocolError::Malformed(_))));
    }
}
