//! A source in memory that goes on changing, for tests of both sides.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::Runtime;

use super::{Checking, Ended, Finding, Frozen, ImageMaker, Making, Sessions, serve};
use crate::image::{FileNumber, SmallFile};
use crate::network::client::{Dial, Dialling, Stream};
use crate::network::image_store::ImageStore;
use crate::network::manifest::{Manifest, tests::manifest};
use crate::network::protocol::SessionId;
use crate::plan::Plan;
use crate::source::Follower;
use crate::{ByteRange, CHUNK_BYTES, CloneError, Origin, OriginError};

/// Numbers that look random, and are the same for the same seed (splitmix64 of Steele, Lea and Flood).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Files that change while they are read.
pub struct LiveFiles {
    files: Vec<RwLock<Vec<u8>>>,
    /// Reads of file 0 wait while this is closed.
    gate: Mutex<bool>,
    opened: Condvar,
    pub waiting: AtomicUsize,
    pub waiting_most: AtomicUsize,
}

impl LiveFiles {
    pub fn new(files: Vec<Vec<u8>>) -> LiveFiles {
        LiveFiles {
            files: files.into_iter().map(RwLock::new).collect(),
            gate: Mutex::new(true),
            opened: Condvar::new(),
            waiting: AtomicUsize::new(0),
            waiting_most: AtomicUsize::new(0),
        }
    }

    pub fn set_gate(&self, open: bool) {
        *self.gate.lock().unwrap() = open;
        self.opened.notify_all();
    }

    /// What a server does that writes: it asks, then it writes.
    pub fn write(&self, asked: Option<&ImageStore>, file: usize, chunk: u64, byte: u8) {
        let range = ByteRange::new(chunk * CHUNK_BYTES, CHUNK_BYTES);
        if let Some(image_store) = asked {
            let number = FileNumber(file as u32);
            if !image_store.has(number, range) && !image_store.take_now(number, range).unwrap() {
                image_store.take(number, range).unwrap();
            }
        }
        let mut content = self.files[file].write().unwrap();
        let end = content.len().min(range.end as usize);
        content[range.start as usize..end].fill(byte);
    }
}

impl Origin for LiveFiles {
    fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        if file.0 == 0 {
            let now = self.waiting.fetch_add(1, SeqCst) + 1;
            self.waiting_most.fetch_max(now, SeqCst);
            drop(self.opened.wait_while(self.gate.lock().unwrap(), |open| !*open).unwrap());
            self.waiting.fetch_sub(1, SeqCst);
        }
        let start = offset_bytes as usize;
        // A page at a time, as a kernel reads: a writer that does not ask tears.
        for (number, page) in buffer.chunks_mut(4096).enumerate() {
            let content = self.files[file.0 as usize].read().unwrap();
            let at = start + number * 4096;
            page.copy_from_slice(&content[at..at + page.len()]);
        }
        Ok(())
    }

    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError> {
        let waits = buffer.len() > 8192;
        if !waits {
            self.read(file, offset_bytes, buffer)?;
        }
        Ok(!waits)
    }
}

/// A host with such a source.
pub struct SourceHost {
    pub runtime: Runtime,
    pub live: Arc<LiveFiles>,
    pub frozen: Vec<Vec<u8>>,
    pub image_store: Arc<ImageStore>,
    pub sessions: Arc<Sessions>,
    pub ended: Arc<Mutex<Vec<Ended>>>,
    /// How often it was asked of the source what is hot.
    pub hot_asked: Arc<AtomicUsize>,
}

/// What is hot on every such host.
pub const HOT: [(u32, u64, u64); 2] = [(0, 8192 * 3, 8192 * 5), (0, 0, 8192)];

struct Maker {
    manifest: Manifest,
    image_store: Arc<ImageStore>,
    ended: Arc<Mutex<Vec<Ended>>>,
    hot_asked: Arc<AtomicUsize>,
}

impl ImageMaker for Maker {
    fn freeze(&self, _session: SessionId, plan: Plan) -> Making<'_> {
        Box::pin(async move {
            if plan.slot == "refuse" {
                let reason = "wal_level is minimal".to_owned();
                return Err(CloneError::Network { peer: "source".to_owned(), reason });
            }
            let content = b"of a server".to_vec();
            let small_files = vec![SmallFile { path: "server.crt".into(), mode: 0o600, content }];
            Ok(Frozen { manifest: self.manifest.clone(), small_files, image_store: Arc::clone(&self.image_store) })
        })
    }

    fn ended(&self, _session: SessionId, how: Ended) {
        self.ended.lock().unwrap().push(how);
    }

    fn hot(&self, _session: SessionId) -> Finding<'_> {
        self.hot_asked.fetch_add(1, SeqCst);
        Box::pin(async { HOT.map(|(file, start, end)| (FileNumber(file), ByteRange::from(start..end))).to_vec() })
    }

    fn cannot_catch_up(&self) -> Checking<'_> {
        Box::pin(async { Vec::new() })
    }
}

impl SourceHost {
    pub fn new(sizes: &[u64], seed: u64, directory: &Path, lease: Duration) -> SourceHost {
        let mut numbers = Numbers(seed);
        // Half of the chunks are zero, as in many a table.
        let mut chunk = |length: usize| match numbers.below(2) {
            0 => vec![0; length],
            _ => (0..length).map(|_| numbers.below(256) as u8).collect::<Vec<u8>>(),
        };
        let file = |size: &u64| {
            let mut content = Vec::new();
            while (content.len() as u64) < *size {
                content.extend(chunk((*size as usize - content.len()).min(CHUNK_BYTES as usize)));
            }
            content
        };
        let frozen: Vec<Vec<u8>> = sizes.iter().map(file).collect();
        let live = Arc::new(LiveFiles::new(frozen.clone()));
        let manifest = manifest(sizes);
        let origin: Arc<dyn Origin> = Arc::<LiveFiles>::clone(&live);
        let image_store = ImageStore::create(Arc::new(manifest.image.clone()), origin, directory).unwrap();
        let (image_store, ended) = (Arc::new(image_store), Arc::new(Mutex::new(Vec::new())));
        let hot_asked = Arc::new(AtomicUsize::new(0));
        let (maker_ended, maker_hot) = (Arc::clone(&ended), Arc::clone(&hot_asked));
        let maker = Maker { manifest, image_store: Arc::clone(&image_store), ended: maker_ended, hot_asked: maker_hot };
        let sessions = Arc::new(Sessions::new(Arc::new(maker), lease));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        SourceHost { runtime, live, frozen, image_store, sessions, ended, hot_asked }
    }

    /// A way to it over a wire of these qualities.
    pub fn dialler(&self, wire: Wire) -> Arc<WireDialler> {
        let (sessions, runtime) = (Arc::clone(&self.sessions), self.runtime.handle().clone());
        Arc::new(WireDialler { sessions, runtime, wire, dialled: AtomicUsize::new(0), is_cut: Mutex::new(false) })
    }

    pub fn plan(&self) -> Plan {
        let source = crate::plan::SourceServer {
            connection: serde_json::from_value(serde_json::json!({
                "host": "/tmp", "port": 5432, "user": "postgres", "password": null, "database": "postgres",
                "application_name": null,
            }))
            .unwrap(),
            data_directory: "/srv/source".into(),
            leader: None,
            replication: None,
        };
        Plan {
            source,
            target: "/srv/clone".into(),
            tablespaces: "/srv/clone.tablespaces".into(),
            user_name: "postgres".to_owned(),
            slot: "clone".to_owned(),
            recovery: crate::plan::Recovery::Auto,
            fill: crate::plan::FillOptions::default(),
            wal_keep_bytes_max: 1 << 30,
        }
    }
}

/// What is wrong with a wire.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wire {
    /// Each connection breaks after about so many bytes.
    pub breaks_after_bytes: Option<u64>,
    /// One in so many blocks of bytes from the source is damaged.
    pub damages_one_in: Option<u64>,
}

/// Connections in memory.
pub struct WireDialler {
    sessions: Arc<Sessions>,
    runtime: tokio::runtime::Handle,
    wire: Wire,
    pub dialled: AtomicUsize,
    pub is_cut: Mutex<bool>,
}

impl Dial for WireDialler {
    fn dial(&self) -> Dialling<'_> {
        let number = self.dialled.fetch_add(1, SeqCst) as u64;
        let is_cut = *self.is_cut.lock().unwrap();
        Box::pin(async move {
            if is_cut {
                return Err(CloneError::Network { peer: self.peer(), reason: "no route".to_owned() });
            }
            let (clone_end, near) = duplex(1 << 16);
            let (far, source_end) = duplex(1 << 16);
            let sessions = Arc::clone(&self.sessions);
            self.runtime.spawn(async move {
                let _ = serve(source_end, sessions).await;
            });
            self.runtime.spawn(carry(near, far, self.wire, number));
            Ok(Box::new(clone_end) as Box<dyn Stream>)
        })
    }

    fn peer(&self) -> String {
        "memory".to_owned()
    }
}

/// Carries bytes between two ends, until the wire breaks.
async fn carry(near: DuplexStream, far: DuplexStream, wire: Wire, seed: u64) {
    let (mut near_reader, mut near_writer) = tokio::io::split(near);
    let (mut far_reader, mut far_writer) = tokio::io::split(far);
    tokio::select! {
        _ = tokio::io::copy(&mut near_reader, &mut far_writer) => {}
        _ = carry_back(&mut far_reader, &mut near_writer, wire, seed) => {}
    }
}

/// Frame by frame, so that damage hits content and not lengths, which would only make a reader wait.
async fn carry_back(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    wire: Wire,
    seed: u64,
) -> std::io::Result<()> {
    const CONTENT_KIND: u8 = 9;
    const CONTENT_HEADER_BYTES: usize = 1 + 8 + 1 + 8 + 4;
    let mut numbers = Numbers(seed);
    let mut left = wire.breaks_after_bytes.map(|bytes| bytes / 2 + numbers.below(bytes));
    loop {
        let length = reader.read_u32_le().await?;
        let mut frame = vec![0; length as usize];
        reader.read_exact(&mut frame).await?;
        // It breaks in the middle of a frame.
        if left.is_some_and(|left| left < u64::from(length)) {
            writer.write_u32_le(length).await?;
            return writer.write_all(&frame[..frame.len() / 2]).await;
        }
        left = left.map(|left| left - u64::from(length));
        let is_hit = wire.damages_one_in.is_some_and(|bound| numbers.below(bound) == 0);
        if is_hit && frame[0] == CONTENT_KIND && frame.len() > CONTENT_HEADER_BYTES {
            let at = CONTENT_HEADER_BYTES as u64 + numbers.below((frame.len() - CONTENT_HEADER_BYTES) as u64);
            frame[at as usize] ^= 0x10;
        }
        writer.write_u32_le(length).await?;
        writer.write_all(&frame).await?;
    }
}
