//! A machine's checkpoints in a directory: whole ones, and ones that hold what changed since.
//!
//! ```text
//!  checkpoint.1 (whole) <── checkpoint.2 <── checkpoint.3        a page of 3: in 3, or in 2, or in 1, or zeros
//!                           compact(3): checkpoint.3 (whole)
//!                           remove(2):  checkpoint.1 (whole) <── checkpoint.3, with the pages of 2
//! ```
//!
//! A file is there whole or not at all, so the last checkpoint that was acknowledged is always there. What is damaged
//! is refused and never passed over: an older one is another machine's past, which somebody has to choose.

mod format;
#[cfg(test)]
mod tests;
mod view;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::files::{Folder, Stored};
use crate::{CheckpointError, PAGE_BYTES};
use format::{HEAD_BYTES, Head, Machine, Tables};
pub use view::View;
pub use writer::Writer;

const MACHINE: &str = "machine";
const CHECKPOINT: &str = "checkpoint.";
const NEW: &str = ".new";
/// Whoever reads is overtaken by so many compactions at most.
const COMPACTIONS_MAX: usize = 16;

/// A checkpoint that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its number.
    pub number: u64,
    /// The one that it holds the changes since; none: it is whole.
    pub parent: Option<u64>,
    /// When it was taken, milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// Pages whose content it holds itself.
    pub data_pages: u64,
}

impl Checkpoint {
    /// Memory whose content it holds itself, bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.data_pages * PAGE_BYTES as u64
    }
}

/// One checkpoint's file, its tables read and checked.
struct Layer {
    file: Stored,
    head: Head,
    tables: Tables,
}

/// The checkpoints of a machine.
pub struct Image {
    folder: Folder,
    machine: Machine,
    /// All files, also those that compaction has left over.
    heads: BTreeMap<u64, Head>,
    /// Held by who writes.
    lock: Option<Stored>,
}

impl Image {
    /// Makes a directory, which is there and empty, one of checkpoints, and opens it for writing. `prefix` is what the
    /// machine has sent for [`crate::restore::Prefix::parse`].
    ///
    /// # Errors
    /// There are checkpoints already; [`CheckpointError::Held`]: another one makes them; a size that no memory has; the
    /// file system refuses.
    pub fn create(directory: &Path, memory_bytes: u64, prefix: &[u8]) -> Result<Image, CheckpointError> {
        Image::create_in(Folder::open(directory)?, memory_bytes, prefix)
    }

    fn create_in(folder: Folder, memory_bytes: u64, prefix: &[u8]) -> Result<Image, CheckpointError> {
        let machine = Machine { identity: rand::random(), memory_bytes, prefix: prefix.to_vec() };
        let bytes = machine.to_bytes();
        if Machine::parse(&bytes).is_err() || bytes.len() as u64 > Machine::BYTES_MAX {
            return Err(CheckpointError::Size { size_bytes: memory_bytes });
        }
        // Of two who make one here at once the other is refused.
        if !folder.lock()? {
            return Err(CheckpointError::Held { path: folder.path_of("") });
        }
        if folder.names()?.iter().any(|name| name == MACHINE || name.starts_with(CHECKPOINT)) {
            return Err(CheckpointError::Exists { path: folder.path_of(MACHINE) });
        }
        folder.write_whole(MACHINE, &bytes)?;
        Image::open_in(folder, true)
    }

    /// Opens it for reading. Somebody may write meanwhile: this does not see it.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], also when it is of another version; the file system refuses.
    pub fn open(directory: &Path) -> Result<Image, CheckpointError> {
        Image::open_in(Folder::open(directory)?, false)
    }

    /// Opens it for writing, which one process at a time may.
    ///
    /// # Errors
    /// As [`Image::open`]; [`CheckpointError::Held`].
    pub fn open_to_write(directory: &Path) -> Result<Image, CheckpointError> {
        Image::open_in(Folder::open(directory)?, true)
    }

    fn open_in(folder: Folder, writes: bool) -> Result<Image, CheckpointError> {
        let path = folder.path_of(MACHINE);
        let lock = if writes { Some(lock(&folder)?) } else { None };
        let bytes = folder.read_whole(MACHINE, Machine::BYTES_MAX)?;
        let bytes = bytes.ok_or_else(|| CheckpointError::damaged(&path, "there is none"))?;
        let machine = Machine::parse(&bytes).map_err(|what| CheckpointError::damaged(&path, what))?;
        let mut image = Image { folder, machine, heads: BTreeMap::new(), lock };
        if writes {
            for name in image.folder.names()?.iter().filter(|name| is_left_over(name)) {
                image.folder.remove(name)?;
            }
        }
        for _ in 0..COMPACTIONS_MAX {
            if let Some(heads) = image.heads_of(&image.folder.names()?)? {
                image.heads = heads;
                return Ok(image);
            }
        }
        Err(CheckpointError::damaged(&image.path_of(""), "each time it is looked at a checkpoint has gone"))
    }

    /// None: a compaction has removed one of them meanwhile.
    fn heads_of(&self, names: &[String]) -> Result<Option<BTreeMap<u64, Head>>, CheckpointError> {
        let mut heads = BTreeMap::new();
        for number in names.iter().filter_map(|name| number_of(name)) {
            let Some(layer) = self.layer(number)? else { return Ok(None) };
            heads.insert(number, layer.head);
        }
        Ok(Some(heads))
    }

    /// What a restore needs beside a checkpoint.
    pub fn prefix(&self) -> &[u8] {
        &self.machine.prefix
    }

    /// The machine's memory, bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.machine.memory_bytes
    }

    /// Those that are there, oldest first.
    pub fn checkpoints(&self) -> Vec<Checkpoint> {
        let whole = self.heads.values().filter(|head| self.is_listed(head.number));
        whole
            .map(|head| Checkpoint {
                number: head.number,
                parent: (head.parent != 0).then_some(head.parent),
                taken_unix_ms: head.taken_unix_ms,
                data_pages: head.data_pages,
            })
            .collect()
    }

    /// The newest.
    pub fn last(&self) -> Option<Checkpoint> {
        self.checkpoints().pop()
    }

    /// The number that the next one has.
    pub fn next_number(&self) -> u64 {
        self.heads.keys().next_back().map_or(1, |last| last + 1)
    }

    /// How many others it stands on.
    pub fn depth(&self, number: u64) -> usize {
        let parent = |number: &u64| self.heads.get(number).map(|head| head.parent).filter(|parent| *parent != 0);
        // Each parent's number is smaller: this ends.
        std::iter::successors(parent(&number), parent).count()
    }

    /// The name of the disk's part of one, without what it stands on.
    ///
    /// # Errors
    /// As [`Image::view`].
    pub fn disk(&self, number: u64) -> Result<String, CheckpointError> {
        let layer = self.layer(number)?.ok_or(CheckpointError::UnknownCheckpoint { number })?;
        Ok(layer.tables.disk)
    }

    /// Opens one to be read.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownCheckpoint`]; [`CheckpointError::Damaged`].
    pub fn view(&self, number: u64) -> Result<View, CheckpointError> {
        if !self.is_listed(number) {
            return Err(CheckpointError::UnknownCheckpoint { number });
        }
        for _ in 0..COMPACTIONS_MAX {
            let Some(top) = self.layer(number)? else { break };
            if let Some(layers) = self.layers(top)? {
                return Ok(View::new(self.machine.identity, layers));
            }
        }
        Err(CheckpointError::UnknownCheckpoint { number })
    }

    /// A checkpoint and what it stands on, by what each opened file says of its parent: a compaction gives a file
    /// another one, and what was known of it before does not count. None: it has removed one of them meanwhile.
    fn layers(&self, top: Layer) -> Result<Option<Vec<Layer>>, CheckpointError> {
        let mut parent = top.head.parent;
        let mut layers = vec![top];
        // Each parent's number is smaller: this ends.
        while parent != 0 {
            let Some(layer) = self.layer(parent)? else { return Ok(None) };
            parent = layer.head.parent;
            layers.push(layer);
        }
        Ok(Some(layers))
    }

    /// Begins the next one: with what changed since `parent`, which is the last one, or whole. The disk's epoch has a
    /// name of at most 4096 bytes.
    ///
    /// # Errors
    /// [`CheckpointError::ReadOnly`]; [`CheckpointError::NotLast`]: what changed since another one is not what changed
    /// since this one; the file system refuses.
    pub fn begin(&mut self, parent: Option<u64>) -> Result<Writer<'_>, CheckpointError> {
        let number = self.next_number();
        let last = self.last().map(|last| last.number);
        match parent {
            Some(parent) if last != Some(parent) => Err(CheckpointError::NotLast { number: parent, last }),
            parent => Writer::begin(self, number, parent.unwrap_or(0)),
        }
    }

    /// Looks whether there is room for a checkpoint of so many pages: before it is written, because a full file system
    /// may stop more than this.
    ///
    /// # Errors
    /// [`CheckpointError::NoSpace`]; the file system refuses.
    pub fn check_space(&self, pages: u64) -> Result<(), CheckpointError> {
        let (free_bytes, wanted_bytes) = (self.folder.free_bytes()?, pages.saturating_mul(PAGE_BYTES as u64));
        match free_bytes >= wanted_bytes {
            true => Ok(()),
            false => Err(CheckpointError::NoSpace { path: self.path_of(""), free_bytes, wanted_bytes }),
        }
    }

    /// Makes one whole and removes those before it: what changed between them is forgotten. Later ones stay.
    ///
    /// # Errors
    /// As [`Image::view`], [`Image::check_space`] and [`Image::begin`]. What was there still is.
    pub fn compact(&mut self, number: u64) -> Result<(), CheckpointError> {
        let view = self.view(number)?;
        if self.heads[&number].parent != 0 {
            self.write_anew(number, 0, &view)?;
        }
        // Where a removal was broken off, later ones stand on an older one beside it.
        let beside = self.heads.range(number + 1..).filter(|(_, head)| (1..number).contains(&head.parent));
        let beside: Vec<u64> = beside.map(|(later, _)| *later).filter(|later| self.is_listed(*later)).collect();
        for later in beside {
            let view = self.view(later)?;
            self.write_anew(later, 0, &view)?;
        }
        self.unlink(self.heads.range(..number).map(|(older, _)| *older).collect())
    }

    /// Removes these. What they hold that a later one stands on becomes part of that one first; all others show what
    /// they did. After the newest is removed the next one is whole.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownCheckpoint`], then nothing is removed; as [`Image::view`], [`Image::check_space`] and
    /// [`Image::begin`]: those that others stand on are still there.
    pub fn remove(&mut self, numbers: &[u64]) -> Result<(), CheckpointError> {
        if let Some(number) = numbers.iter().copied().find(|number| !self.is_listed(*number)) {
            return Err(CheckpointError::UnknownCheckpoint { number });
        }
        // Each one that stays, with those below it that go.
        let stays: Vec<u64> = self.heads.keys().copied().filter(|number| !numbers.contains(number)).collect();
        let stays = stays.into_iter().filter(|number| self.is_listed(*number));
        let chains = stays.map(|number| self.chain(number, numbers)).collect::<Result<Vec<Vec<Layer>>, _>>()?;
        self.heads.extend(chains.iter().map(|chain| (chain[0].head.number, chain[0].head)));
        let chains: Vec<Vec<Layer>> = chains.into_iter().filter(|chain| chain.len() > 1).collect();
        let stood_on: BTreeSet<u64> = chains.iter().flatten().map(|layer| layer.head.number).collect();
        // The others make room.
        self.unlink(numbers.iter().copied().filter(|number| !stood_on.contains(number)).collect())?;
        for chain in chains {
            let (number, parent) = (chain[0].head.number, chain.last().map_or(0, |last| last.head.parent));
            self.write_anew(number, parent, &View::new(self.machine.identity, chain))?;
        }
        self.unlink(numbers.iter().copied().filter(|number| stood_on.contains(number)).collect())
    }

    /// A checkpoint and those below it that go, by what each file says of its parent: one that could not be made
    /// durable has another one than is known.
    fn chain(&self, number: u64, goes: &[u64]) -> Result<Vec<Layer>, CheckpointError> {
        let mut chain = vec![self.layer(number)?.ok_or(CheckpointError::UnknownCheckpoint { number })?];
        while let Some(number) = chain.last().map(|last| last.head.parent).filter(|parent| goes.contains(parent)) {
            chain.push(self.layer(number)?.ok_or(CheckpointError::UnknownCheckpoint { number })?);
        }
        Ok(chain)
    }

    /// Writes one that is there once more, with what a view says, and with this parent.
    fn write_anew(&mut self, number: u64, parent: u64, view: &View) -> Result<(), CheckpointError> {
        let taken_unix_ms = self.heads[&number].taken_unix_ms;
        self.check_space(view.present().count() as u64)?;
        let mut writer = Writer::begin(self, number, parent)?;
        let mut content = [0; PAGE_BYTES];
        // Of a whole one what is zeros need not be said.
        for (page, _) in view.told().filter(|(_, is_data)| *is_data || parent != 0) {
            view.read(page, &mut content)?;
            writer.page(page, &content)?;
        }
        writer.commit(taken_unix_ms, view.devices(), view.disk())?;
        Ok(())
    }

    /// Removes files on which nothing stands but one another.
    fn unlink(&mut self, mut numbers: Vec<u64>) -> Result<(), CheckpointError> {
        if numbers.is_empty() {
            return Ok(());
        }
        // Also what another one has written, and died: nothing goes before that is durable.
        self.folder.synchronize()?;
        numbers.sort_unstable();
        for number in numbers.iter().rev() {
            self.folder.remove(&name_of(*number))?;
        }
        self.folder.synchronize()?;
        self.heads.retain(|number, _| !numbers.contains(number));
        Ok(())
    }

    /// Whether it is there, and all that it stands on, as far as is known.
    fn is_listed(&self, number: u64) -> bool {
        let mut head = self.heads.get(&number);
        // Each parent's number is smaller: this ends.
        while let Some(Head { parent: 1.., .. }) = head {
            head = head.and_then(|head| self.heads.get(&head.parent));
        }
        head.is_some()
    }

    /// Reads head and tables of a file; none when it is not there.
    fn layer(&self, number: u64) -> Result<Option<Layer>, CheckpointError> {
        let Some(file) = self.folder.open_if_there(&name_of(number))? else { return Ok(None) };
        let wrong = |what: String| CheckpointError::damaged(file.path(), what);
        let length = file.length()?;
        if length < HEAD_BYTES as u64 {
            return Err(wrong(format!("it has {length} bytes")));
        }
        let mut head = [0; HEAD_BYTES];
        file.read(0, &mut head)?;
        let head = Head::parse(&head, &self.machine, number).map_err(wrong)?;
        if length != head.tables_at() + head.tables_bytes() {
            return Err(wrong(format!("it has {length} bytes, and its head tells of others")));
        }
        let mut tables = vec![0; usize::try_from(head.tables_bytes()).map_err(|error| wrong(error.to_string()))?];
        file.read(head.tables_at(), &mut tables)?;
        let tables = Tables::parse(&tables, &head, self.machine.identity).map_err(wrong)?;
        Ok(Some(Layer { file, head, tables }))
    }

    /// The directory's path of a file, for messages.
    fn path_of(&self, name: &str) -> PathBuf {
        self.folder.path_of(name)
    }
}

fn lock(folder: &Folder) -> Result<Stored, CheckpointError> {
    let file = folder.open_file(MACHINE)?;
    match file.lock()? {
        true => Ok(file),
        false => Err(CheckpointError::Held { path: file.path().to_owned() }),
    }
}

fn name_of(number: u64) -> String {
    format!("{CHECKPOINT}{number}")
}

/// What a killed writer has left. Other files are none of ours.
fn is_left_over(name: &str) -> bool {
    name.strip_suffix(NEW).is_some_and(|name| name == MACHINE || number_of(name).is_some())
}

/// The number in a checkpoint's name; other files are none of ours.
fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix(CHECKPOINT)?.parse().ok()?;
    (number > 0 && name_of(number) == name).then_some(number)
}
