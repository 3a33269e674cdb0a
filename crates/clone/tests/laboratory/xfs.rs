//! An XFS file system in a file: blocks can be shared there.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

/// The least that mkfs.xfs makes is 300 MB.
const SIZE_BYTES: u64 = 1 << 30;
const UNMOUNT_ATTEMPTS_MAX: u32 = 1200;

/// Mounted until it is dropped; the processes that work there are killed then.
pub struct XfsMount {
    directory: PathBuf,
}

impl XfsMount {
    /// Makes one in a new file in `directory`.
    pub fn new(directory: &Path) -> XfsMount {
        let (image, mount) = (directory.join("xfs.image"), directory.join("xfs"));
        std::fs::File::create(&image).and_then(|file| file.set_len(SIZE_BYTES)).expect("a sparse file");
        std::fs::create_dir(&mount).expect("made");
        run(
            Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image),
            "xfsprogs is installed: run scripts/setup.sh",
        );
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount), "the kernel has XFS and loop devices");
        XfsMount { directory: mount }
    }

    pub fn path(&self) -> &Path {
        &self.directory
    }
}

fn run(command: &mut Command, wanted: &str) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} ({error}): is it so that {wanted}?"));
    assert!(
        output.status.success(),
        "{command:?}: {}; is it so that {wanted}?",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Drop for XfsMount {
    fn drop(&mut self) {
        for _ in 0..UNMOUNT_ATTEMPTS_MAX {
            kill_workers(&self.directory);
            let unmounted = Command::new("umount").arg(&self.directory).output();
            if unmounted.is_ok_and(|output| output.status.success()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        eprintln!("{} is left mounted", self.directory.display());
    }
}

fn kill_workers(directory: &Path) {
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    for entry in entries.filter_map(Result::ok) {
        let works_here = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(directory));
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (true, Some(process)) = (works_here, number.and_then(Pid::from_raw)) {
            let _ = kill_process(process, Signal::KILL);
        }
    }
}
