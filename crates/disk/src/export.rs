//! A disk's content as a raw image.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::source::Source;
use crate::storage::Folder;
use crate::{BLOCK_BYTES, DiskError, View};

/// Bytes copied at a time.
const STEP_BYTES: u64 = 1 << 20;

/// Writes all blocks but those of zeros.
fn write_sparsely(file: &File, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let blocks: Vec<&[u8]> = bytes.chunks(BLOCK_BYTES as usize).collect();
    let mut begin = 0;
    for run in blocks.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
        let length: usize = run.iter().map(|block| block.len()).sum();
        if !is_zero(run[0]) {
            file.write_all_at(&bytes[begin..begin + length], offset + begin as u64)?;
        }
        begin += length;
    }
    Ok(())
}

/// Writes a view as a raw sparse image to a new file, durable with its name when this returns. `progress` is called
/// with bytes done.
///
/// # Errors
/// The view cannot be read, or the file not written.
pub fn export(view: &View, path: &Path, mut progress: impl FnMut(u64)) -> Result<(), DiskError> {
    let failed = |error| DiskError::io("write", path, error);
    let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
    file.set_len(view.size_bytes()).map_err(failed)?;
    let mut bytes = vec![0; STEP_BYTES as usize];
    let mut offset = 0;
    while offset < view.size_bytes() {
        let end = view.size_bytes().min(offset + STEP_BYTES);
        let is_zero = view.extents(offset..end)?.iter().all(|extent| extent.is_zero);
        if !is_zero {
            let step = &mut bytes[..(end - offset) as usize];
            view.read(offset, step)?;
            write_sparsely(&file, offset, step).map_err(failed)?;
        }
        offset = end;
        progress(offset);
    }
    file.sync_all().map_err(failed)?;
    // The file's name must last, too.
    Folder::around(path)?.synchronize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::record::{FOLDER, Recording};
    use crate::{At, CreateOptions, Disk, OpenOptions};

    /// An exported image and its name are durable when its export has ended.
    ///
    /// Spec: D4
    #[test]
    fn b66_an_exported_image_has_a_durable_name() {
        let home = tempfile::tempdir().unwrap();
        let (disk, images) = (home.path().join("disk"), home.path().join("images"));
        Disk::create(&disk, &CreateOptions { size_bytes: 2 * BLOCK_BYTES, base: None, copy_base: false }).unwrap();
        std::fs::create_dir(&images).unwrap();
        let disk = Disk::open(&disk, OpenOptions::default()).unwrap();
        disk.write(0, &[7; BLOCK_BYTES as usize], &[]).unwrap();
        let view = disk.view(&At::Current).unwrap();
        let recording = Recording::begin(&images);
        export(&view, &images.join("one"), |_| {}).unwrap();
        assert_eq!(std::fs::read(images.join("one")).unwrap(), [[7; 4096], [0; 4096]].concat());
        recording.recorder.refuse_synchronizations(FOLDER, libc::EIO);
        assert!(export(&view, &images.join("two"), |_| {}).is_err(), "nobody saw to it that the name lasts");
    }
}
