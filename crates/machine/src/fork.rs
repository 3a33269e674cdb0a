//! Machines that began as another one was: which stand on whose disk, and making one.
//!
//! ```text
//!   follower-2/disk ──> follower-1/disk@checkpoint-.. ──> leader/disk@checkpoint-.. ──> leader/image/root.img
//! ```
//!
//! A machine that is removed while others lie over its disks leaves these, and its image, where they are: its directory
//! has a file `layers` then, and no `machine.toml`. They go when nothing lies over them any more. A machine that is
//! made anew in that directory has its disk beside them, under the next number.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use onecopy_checkpoint::CheckpointError;
use onecopy_checkpoint::image::{Checkpoint, Image};
use onecopy_disk::{BaseSpecification, Disk};
use onecopy_postgres::ServiceUser;
use serde::{Deserialize, Serialize};

use crate::files::{absent_is_fine, remove_any, write_own_file};
use crate::{GuestImage, MachineConfiguration, MachineError, MachineHome, MachineName};

/// As deep as a chain of disks is followed.
const DEPTH_LOOKED: usize = 1000;

/// At which checkpoint a machine begins, for one start: the file `restore` in its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StartPoint {
    /// The checkpoint's number.
    pub number: u64,
    /// When it was taken, milliseconds since 1970: a number is given again where the newest one was forgotten. None: an
    /// earlier version has written it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_unix_ms: Option<u64>,
    /// The directory of the machine that it is of; none: its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<PathBuf>,
    /// Its memory begins as a private view of a file that the parent's forks have in common.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares: bool,
}

/// A disk that lies over a snapshot of another machine's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dependent {
    /// Whose disk it is.
    pub machine: MachineName,
    /// The disk's directory over which it lies.
    pub disk: PathBuf,
    /// The snapshot in that; empty where the fork has not begun, and its disk is not made.
    pub snapshot: String,
}

/// What of the disks below the directory `machines` something needs.
struct Needed {
    /// Disks that machines have, and what they lie over.
    disks: BTreeSet<PathBuf>,
    /// Which of these lie over which.
    dependents: Vec<Dependent>,
}

impl Needed {
    /// As if the machine `leaving` was not there; of a damaged disk of `asking` it is not known what it lies over.
    fn look(
        machines: &Path,
        asking: Option<&MachineName>,
        leaving: Option<&MachineName>,
    ) -> Result<Needed, MachineError> {
        let (mut disks, mut lying, mut dependents) = (BTreeSet::new(), Vec::new(), Vec::new());
        for name in MachineHome::names(machines)? {
            let (home, leaves) = (MachineHome::of(machines, &name), leaving == Some(&name));
            // A fork that has not begun yet has no disk, and needs all of its parent's; who makes one holds the parent.
            if !leaves
                && home.is_made()
                && let Ok(Some(StartPoint { parent: Some(parent), .. })) = StartPoint::of(&home)
                && let Ok(disk) = fs::canonicalize(&parent)
            {
                let parents = MachineHome::at(&disk)?;
                disks.extend(parents.disks().iter().filter_map(|disk| fs::canonicalize(disk).ok()));
                dependents.push(Dependent { machine: name.clone(), disk, snapshot: String::new() });
            }
            // What is being made or removed has no disk to lose; a fork that is being made holds its parent's lock.
            let has_one = home.is_made() && !leaves;
            for disk in home.disks() {
                let upper = resolve(&disk)?;
                // Earlier disks hold checkpoints, but those of a machine that was there before are layers only.
                if has_one && (disk == home.disk() || !home.layers_file().exists()) {
                    disks.insert(upper.clone());
                }
                let base = match Disk::geometry(&disk) {
                    Ok(geometry) => geometry.base,
                    // Damage must not keep what is damaged from being removed.
                    Err(_) if asking == Some(&name) => None,
                    Err(source) => return Err(MachineError::UnknownBase { machine: name, source }),
                };
                let Some(BaseSpecification::Disk { directory, snapshot }) = base else { continue };
                let directory = disk.join(directory);
                // One that is gone is nobody's.
                if directory.exists() {
                    lying.push((upper, Dependent { machine: name.clone(), disk: resolve(&directory)?, snapshot }));
                }
            }
        }
        while lying.iter().any(|(upper, over)| disks.contains(upper) && !disks.contains(&over.disk)) {
            let bases: Vec<PathBuf> =
                lying.iter().filter(|(upper, _)| disks.contains(upper)).map(|(_, over)| over.disk.clone()).collect();
            disks.extend(bases);
        }
        dependents.extend(lying.into_iter().filter(|(upper, _)| disks.contains(upper)).map(|(_, over)| over));
        Ok(Needed { disks, dependents })
    }
}

fn resolve(path: &Path) -> Result<PathBuf, MachineError> {
    fs::canonicalize(path).map_err(MachineError::file("resolve", path))
}

impl MachineHome {
    /// The directory that it lies in, with others.
    fn machines(&self) -> &Path {
        self.root().parent().unwrap_or(Path::new("/"))
    }

    /// The disks of other machines beside this one that lie over disks of it.
    ///
    /// # Errors
    /// [`MachineError::File`], [`MachineError::UnknownBase`]: it is not known what a disk of another one lies over.
    pub fn dependents(&self) -> Result<Vec<Dependent>, MachineError> {
        let own = resolve(self.root())?;
        let mut dependents = Needed::look(self.machines(), Some(self.name()), None)?.dependents;
        dependents.retain(|over| over.machine != *self.name() && over.disk.starts_with(&own));
        Ok(dependents)
    }

    /// A fork that has not begun, and is to begin at one of these checkpoints of this machine.
    pub(super) fn fork_to_begin_at(&self, image: &Image, numbers: &[u64]) -> Result<Option<MachineName>, MachineError> {
        let own = resolve(self.root())?;
        let is_ours = |start_point: &StartPoint| {
            let parent = start_point.parent.as_deref();
            parent.is_some_and(|parent| fs::canonicalize(parent).is_ok_and(|parent| parent == own))
        };
        let goes = |start_point: &StartPoint| {
            start_point.find(image).is_some_and(|checkpoint| numbers.contains(&checkpoint.number))
        };
        let names = MachineHome::names(self.machines())?;
        Ok(names.into_iter().find(|name| {
            let home = MachineHome::of(self.machines(), name);
            let start_point = StartPoint::of(&home).ok().flatten().filter(|_| home.is_made());
            start_point.is_some_and(|start_point| is_ours(&start_point) && goes(&start_point))
        }))
    }

    /// Its disks that others lie over, where it is to be removed.
    pub(super) fn layers(&self) -> Result<Vec<PathBuf>, MachineError> {
        let needed = Needed::look(self.machines(), Some(self.name()), Some(self.name()))?.disks;
        let is_needed = |disk: &PathBuf| fs::canonicalize(disk).is_ok_and(|disk| needed.contains(&disk));
        Ok(self.disks().into_iter().filter(is_needed).collect())
    }

    /// How many disks lie below this one's, each over the next.
    ///
    /// # Errors
    /// [`MachineError::Disk`].
    pub fn depth(&self) -> Result<usize, MachineError> {
        let (mut depth, mut disk) = (0, self.disk());
        while let Some(BaseSpecification::Disk { directory, .. }) =
            Disk::geometry(&disk).map_err(self.disk_failed())?.base
            && depth < DEPTH_LOOKED
        {
            (depth, disk) = (depth + 1, disk.join(directory));
        }
        Ok(depth)
    }

    /// Removes the layers below the directory `machines` that nothing lies over any more, and what broken off removals
    /// have left of machines that have some. No machine is made or removed there meanwhile.
    ///
    /// # Errors
    /// As [`MachineHome::remove`].
    pub fn forget_layers(machines: &Path) -> Result<(), MachineError> {
        let homes = || -> Result<Vec<MachineHome>, MachineError> {
            let homes = MachineHome::names(machines)?.into_iter().map(|name| MachineHome::of(machines, &name));
            Ok(homes.filter(|home| home.layers_file().exists()).collect())
        };
        // What goes may have been the last that lay over another one's.
        loop {
            let before = homes()?;
            for home in &before {
                if home.is_made() { home.forget_own_layers()? } else { home.remove_left()? }
            }
            if homes()? == before {
                return Ok(());
            }
        }
    }

    /// Of a machine that was made anew beside layers: those that are needed no more.
    fn forget_own_layers(&self) -> Result<(), MachineError> {
        // Its keeper may make its disk, or forget one, meanwhile.
        let (current, disks) = (self.disk(), self.disks());
        let needed = Needed::look(self.machines(), None, None)?.disks;
        let may_go = |disk: &PathBuf| *disk != current && *disk != self.disk();
        self.forget_disks(disks.into_iter().filter(may_go), &needed)
    }

    /// Whether the disk that is here is the one that a machine which comes had here before.
    pub(super) fn has_former_disk(&self) -> bool {
        self.went_by_file().exists() && self.disks().contains(&self.disk())
    }

    /// Of a machine that comes anew, with a disk of this number: those that were here before, but what others lie over.
    pub(super) fn forget_disks_before(&self, number: u64) -> Result<(), MachineError> {
        if !self.went_by_file().exists() {
            return Ok(());
        }
        remove_any(&self.went_by_file())?;
        let former: Vec<PathBuf> = (0..number).map(|number| self.numbered_disk(number)).collect();
        let disks = self.disks().into_iter().filter(|disk| former.contains(disk));
        let needed = Needed::look(self.machines(), Some(self.name()), Some(self.name()))?.disks;
        self.forget_disks(disks, &needed)
    }

    fn forget_disks(
        &self,
        disks: impl Iterator<Item = PathBuf>,
        needed: &BTreeSet<PathBuf>,
    ) -> Result<(), MachineError> {
        let mut left = false;
        for disk in disks {
            match fs::canonicalize(&disk).is_ok_and(|disk| needed.contains(&disk)) {
                true => left = true,
                false => self.empty_disk(&disk)?,
            }
        }
        match left {
            true => Ok(()),
            false => {
                absent_is_fine(fs::remove_file(self.layers_file())).map_err(MachineError::file("remove", self.root()))
            }
        }
    }

    /// Makes a machine that begins as `parent` was at a checkpoint: all but the disk, which its first start makes, of
    /// whatever command. One that is isolated begins without a cable in its network card, until
    /// [`Machine::connect`](crate::Machine::connect). What an interrupted attempt left is replaced.
    ///
    /// # Errors
    /// As [`MachineHome::make`].
    pub fn make_fork(
        &self,
        parent: &MachineHome,
        configuration: &MachineConfiguration,
        (number, shares): (u64, bool),
        is_isolated: bool,
        user: &ServiceUser,
    ) -> Result<(), MachineError> {
        if self.is_made() {
            return Err(MachineError::Exists { name: self.name().clone() });
        }
        let image = GuestImage::find(Some(&parent.image()))?;
        self.make_or_remove(|| {
            let _held = self.make_root(&image, user)?;
            match fs::read(parent.password_file()) {
                Ok(password) => write_own_file(&self.password_file(), &password, 0o600)?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(MachineError::file("read", parent.password_file())(error)),
            }
            StartPoint::of_fork(parent, number, shares)?.write(self)?;
            if is_isolated {
                write_own_file(&self.isolated_file(), b"", 0o600)?;
            }
            // Last: what has it is whole, or can begin.
            configuration.write(&self.configuration_file())
        })
    }
}

impl StartPoint {
    /// A checkpoint of `home`, for itself.
    pub(crate) fn own(home: &MachineHome, number: u64) -> Result<StartPoint, MachineError> {
        let image = Image::open(&home.checkpoints()).map_err(home.memory_failed())?;
        let known = image.checkpoints().into_iter().find(|known| known.number == number);
        let known = known.ok_or_else(|| home.memory_failed()(CheckpointError::UnknownCheckpoint { number }))?;
        Ok(StartPoint { number, taken_unix_ms: Some(known.taken_unix_ms), parent: None, shares: false })
    }

    /// A checkpoint of `parent`, for a fork of it.
    pub(crate) fn of_fork(parent: &MachineHome, number: u64, shares: bool) -> Result<StartPoint, MachineError> {
        Ok(StartPoint { parent: Some(parent.root().to_owned()), shares, ..StartPoint::own(parent, number)? })
    }

    /// The checkpoint that it is, of those that its machine has now.
    pub(crate) fn find(&self, image: &Image) -> Option<Checkpoint> {
        let is_then = |known: &Checkpoint| self.taken_unix_ms.is_none_or(|taken| taken == known.taken_unix_ms);
        image.checkpoints().into_iter().find(|known| known.number == self.number && is_then(known))
    }

    /// That of a machine, if it has one.
    pub(crate) fn of(home: &MachineHome) -> Result<Option<StartPoint>, MachineError> {
        let path = home.restore_file();
        match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(MachineError::file("read", &path)(error)),
            Ok(text) => {
                serde_json::from_slice(&text).map(Some).map_err(|error| MachineError::file("read", &path)(error.into()))
            }
        }
    }

    /// Writes it down for the machine's next start.
    pub(crate) fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        let path = home.restore_file();
        let text = serde_json::to_vec(self).map_err(|error| MachineError::file("write", &path)(error.into()))?;
        write_own_file(&path, &text, 0o600)
    }
}

#[cfg(test)]
mod tests {
    use onecopy_disk::{CreateOptions, OpenOptions};

    use super::*;
    use crate::home::copied_base;

    /// Spec: D6
    #[test]
    fn who_has_not_begun_yet_needs_its_parent_too() {
        let directory = tempfile::tempdir().unwrap();
        let [parent, fork] = ["first", "second"].map(|name| MachineHome::at(&directory.path().join(name)).unwrap());
        for home in [&parent, &fork] {
            fs::create_dir(home.root()).unwrap();
        }
        assert_eq!(parent.dependents().unwrap(), []);
        let parents = Some(parent.root().to_owned());
        StartPoint { number: 1, taken_unix_ms: None, parent: parents, shares: true }.write(&fork).unwrap();
        assert_eq!(parent.dependents().unwrap(), [], "its making was broken off, and nobody can delete it");
        MachineConfiguration::new(fork.image()).write(&fork.configuration_file()).unwrap();
        let names: Vec<String> = parent.dependents().unwrap().iter().map(|other| other.machine.to_string()).collect();
        assert_eq!(names, ["second"]);
        assert_eq!(fork.dependents().unwrap(), []);
    }

    /// Spec: D6
    #[test]
    fn a_disk_that_goes_from_between_others_leaves_its_name_at_every_instant() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        for disk in ["disk", "disk.1", "disk.2"] {
            fs::create_dir_all(home.root().join(disk).join("more")).unwrap();
            fs::write(home.root().join(disk).join("header"), "").unwrap();
        }
        let removed = home.numbered_disk(1);
        let which = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&removed).unwrap());
        let before = which();
        home.empty_disk(&removed).unwrap();
        assert_eq!(which(), before, "it was never away: an earlier disk would have been the machine's");
        assert_eq!(fs::read_dir(&removed).unwrap().count(), 0);
        assert_eq!((home.disk(), home.disks().len()), (home.numbered_disk(2), 2));
    }

    /// Machines of which each has one disk, over a snapshot of the disk of the one before.
    struct Chain {
        machines: tempfile::TempDir,
        homes: Vec<MachineHome>,
    }

    impl Chain {
        fn of(names: &[&str]) -> Chain {
            let mut chain = Chain { machines: tempfile::tempdir_in("/dev/shm").unwrap(), homes: Vec::new() };
            let mut below: Option<MachineHome> = None;
            for name in names {
                let home = MachineHome::of(chain.machines.path(), &name.parse().unwrap());
                chain.make(&home, below.as_ref());
                below = Some(home.clone());
                chain.homes.push(home);
            }
            chain
        }

        /// Makes what counts of a machine.
        fn make(&self, home: &MachineHome, below: Option<&MachineHome>) {
            fs::create_dir_all(home.image()).unwrap();
            fs::write(home.image().join("root.img"), "").unwrap();
            let base = below.map(|below| BaseSpecification::Disk { directory: below.disk(), snapshot: "one".into() });
            let disk = home.numbered_disk(home.next_disk());
            Disk::create(&disk, &CreateOptions { size_bytes: 1 << 20, base, copy_base: false }).unwrap();
            let opened = Disk::open(&disk, OpenOptions::default()).unwrap();
            opened.snapshot("one").unwrap();
            opened.close().unwrap();
            MachineConfiguration::new(home.image()).write(&home.configuration_file()).unwrap();
        }

        fn names(&self) -> Vec<String> {
            MachineHome::names(self.machines.path()).unwrap().iter().map(ToString::to_string).collect()
        }

        /// Each disk of the last one can be opened, so all that it lies over is there.
        fn check_last(&self) {
            let last = self.homes.last().unwrap();
            Disk::open(&last.disk(), OpenOptions::default()).unwrap().close().unwrap();
        }
    }

    /// A damaged disk keeps others from being removed, which it may lie over, and says whose it is; its own goes.
    ///
    /// Spec: D6, A4
    #[test]
    fn a_machine_with_a_damaged_disk_can_be_removed() {
        let chain = Chain::of(&["leader", "follower-1", "follower-2"]);
        let [leader, first, second] = &chain.homes[..] else { panic!("three") };
        fs::write(second.disk().join("header"), "damaged").unwrap();
        for error in [leader.dependents().unwrap_err(), first.remove().unwrap_err()] {
            let (message, remedy) = (error.to_string(), "onecopy vm delete follower-2");
            assert!(matches!(error, MachineError::UnknownBase { .. }) && message.contains(remedy), "{message}");
        }
        assert!(first.is_made());
        assert_eq!(second.dependents().unwrap(), []);
        second.remove().unwrap();
        assert_eq!(leader.dependents().unwrap().len(), 1);
        first.remove().unwrap();
        assert_eq!(chain.names(), ["leader"]);
    }

    /// A machine over whose disk others lie leaves it when it is removed, and when it is made anew in its place, until
    /// the last of them is gone: nothing of what they lie over goes before them, and nothing stays after them.
    ///
    /// Spec: D6, A4
    #[test]
    fn v37_a_disk_stays_as_long_as_others_lie_over_it_whoever_goes_first() {
        let chain = Chain::of(&["leader", "follower-1", "follower-2", "follower-3"]);
        let machines = chain.machines.path();
        let [leader, first, second, third] = &chain.homes[..] else { panic!("four") };
        assert_eq!((leader.depth().unwrap(), third.depth().unwrap()), (0, 3));

        // From the middle of the chain on, twice, as one that is made anew each time.
        fs::write(first.keeper_log(), "words").unwrap();
        let (beneath, needless) = (copied_base(&first.disk()), copied_base(&first.numbered_disk(1)));
        fs::write(&beneath, "of another host").unwrap();
        fs::write(&needless, "of another host").unwrap();
        first.remove().unwrap();
        assert!(!first.is_made() && first.disk().exists() && first.image().exists() && !first.keeper_log().exists());
        assert!(beneath.exists() && !needless.exists(), "its disk stands on one of them");
        let over_leader: Vec<_> = leader.dependents().unwrap();
        assert_eq!(over_leader.len(), 1, "the layer needs it, though no machine does: {over_leader:?}");
        chain.check_last();
        for disk in ["disk.1", "disk.2"] {
            chain.make(first, Some(leader));
            assert_eq!(first.disk(), first.root().join(disk));
            // Of its earlier ones that one goes which nothing lies over.
            MachineHome::forget_layers(machines).unwrap();
            assert!(first.numbered_disk(0).exists());
            chain.check_last();
            first.remove().unwrap();
            MachineHome::forget_layers(machines).unwrap();
            assert!(!first.root().join(disk).exists(), "nobody lies over {disk}");
            if disk == "disk.1" {
                // Another one lies over the new one.
                chain.make(first, Some(leader));
                let other = MachineHome::of(machines, &"other".parse().unwrap());
                chain.make(&other, Some(first));
                first.remove().unwrap();
                assert!(first.root().join("disk.1").exists() && first.numbered_disk(0).exists());
            }
        }
        chain.check_last();

        second.remove().unwrap();
        third.remove().unwrap();
        MachineHome::forget_layers(machines).unwrap();
        assert_eq!(chain.names(), ["follower-1", "leader", "other"]);
        assert!(!first.numbered_disk(0).exists(), "what the third lay over is gone with it");
        assert!(!beneath.exists(), "and what that stood on");
        assert!(first.root().join("disk.1").exists(), "and what another lies over is not");
        MachineHome::of(machines, &"other".parse().unwrap()).remove().unwrap();
        MachineHome::forget_layers(machines).unwrap();
        assert_eq!(chain.names(), ["leader"]);
        assert_eq!(leader.dependents().unwrap(), []);
    }
}
