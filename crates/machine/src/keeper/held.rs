//! The checkpoint of a held server, for forks: its number is written down before it is taken, so that whoever comes
//! after an interruption forgets it.

use std::fs::{self, File};
use std::io::ErrorKind;

use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::take::Cause;

use crate::files::{absent_is_fine, write_own_file};
use crate::{MachineError, MachineHome};

/// Writes down that the checkpoint of this number is one, before it is taken.
pub(super) fn note(home: &MachineHome, number: u64) -> Result<(), MachineError> {
    let path = home.held_file();
    write_own_file(&path, number.to_string().as_bytes(), 0o600)?;
    synchronize(home).map_err(MachineError::file("synchronize", &path))
}

/// Forgets it, where it was taken, before another checkpoint is: that one would hold the changes since this one, or
/// have its number.
///
/// # Errors
/// A fork is being made of it; files cannot be read or removed.
pub(super) fn forget_left(home: &MachineHome) -> Result<(), Cause> {
    if !home.held_file().try_exists()? {
        return Ok(());
    }
    let Some(_alone) = home.keep_from_forks()? else {
        return Err("a fork of it is being made; try again when it is made".into());
    };
    forget(home, &mut Image::open_to_write(&home.checkpoints())?)
}

/// What is written down.
pub(super) fn noted(home: &MachineHome) -> Result<Option<u64>, Cause> {
    let path = home.held_file();
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    Ok(Some(text.trim().parse().map_err(|error| format!("{}: {error}; remove it", path.display()))?))
}

/// The same as [`forget_left`], while no fork is being made.
pub(super) fn forget(home: &MachineHome, image: &mut Image) -> Result<(), Cause> {
    let Some(number) = noted(home)? else { return Ok(()) };
    // Where it was not taken, there is none of its number.
    if image.next_number() == number + 1 {
        image.remove(&[number])?;
    }
    // After it: broken off here, there is nothing to be forgotten.
    absent_is_fine(fs::remove_file(home.held_file()))?;
    Ok(synchronize(home)?)
}

fn synchronize(home: &MachineHome) -> std::io::Result<()> {
    File::open(home.root())?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Hardware;
    use crate::keeper::checkpoint::make;

    /// Whoever takes it may die at any step: it is forgotten all the same, and another one of its number is not.
    ///
    /// Spec: D6
    #[test]
    fn the_checkpoint_of_a_held_server_is_forgotten_whoever_died() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        make(&home.checkpoints(), &Hardware::new("10.0", &[]).unwrap(), 4096, b"prefix").unwrap();
        let open = || Image::open_to_write(&home.checkpoints()).unwrap();
        let take = |parent| open().begin(parent).unwrap().commit(1, b"devices", "disk/checkpoint").unwrap();
        let numbers = || open().checkpoints().iter().map(|one| one.number).collect::<Vec<_>>();
        take(None);

        // Died before it was taken: the next one has its number, and stays.
        note(&home, open().next_number()).unwrap();
        forget_left(&home).unwrap();
        take(Some(1));
        forget(&home, &mut open()).unwrap();
        assert_eq!(numbers(), [1, 2]);

        // Died after it; one that forks are made of is not forgotten, and none is taken beside it.
        note(&home, open().next_number()).unwrap();
        take(Some(2));
        let making = home.keep_for_forks().unwrap();
        let error = forget_left(&home).unwrap_err().to_string();
        assert!(error.contains("a fork of it is being made"), "{error}");
        drop(making);
        assert_eq!(numbers(), [1, 2, 3]);
        forget_left(&home).unwrap();
        assert_eq!((numbers(), home.held_file().exists()), (vec![1, 2], false));
        fs::write(home.held_file(), "none").unwrap();
        forget_left(&home).unwrap_err();
    }
}
