//! What somebody with rights on the file could ask for, beside what QEMU does.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

use crate::processes::{Memory, PAGES, SIZE};

/// The file keeps its size, and answers whatever is asked of it.
///
/// Spec: C5
#[test]
fn t7_the_file_keeps_its_size_and_takes_whatever_may_come() {
    let name = "t7_the_file_keeps_its_size_and_takes_whatever_may_come";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect("write 0 16 9", "done");
    // Another process than the keeper, which must not touch the file.
    memory.mapper.expect("hostile", "done");
    memory.mapper.expect("verify", "done");
    let epoch = memory.take();
    let stamps = memory.stamps(&epoch);
    assert!(stamps[..16] == [9; 16] && stamps[16..PAGES - 1] == vec![0; PAGES - 17]);
    assert_eq!(memory.mapper.ask("limits"), "0 100");
}

/// In the mapper's process.
pub fn hostile(place: &std::path::Path) {
    let file = OpenOptions::new().read(true).write(true).open(place).unwrap();
    assert_eq!(file.set_len(SIZE / 2).unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(file.set_len(SIZE * 2).unwrap_err().raw_os_error(), Some(libc::EPERM));
    // The page cache takes it, and cannot write it back.
    assert!(file.write_at(b"behind the end", SIZE).and_then(|_| file.sync_data()).is_err());
    file.set_len(SIZE).unwrap();
    let table = [(libc::FALLOC_FL_COLLAPSE_RANGE, 0, 4096), (0, SIZE, 4096), (libc::FALLOC_FL_PUNCH_HOLE | 1, 100, 50)];
    for (mode, offset, length) in table {
        let mode = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
        assert!(rustix::fs::fallocate(&file, mode, offset, length).is_err(), "{mode:?} {offset} {length}");
    }
    assert_eq!(std::fs::metadata(place).unwrap().len(), SIZE);
    // Past the page cache, and not whole pages.
    let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(place).unwrap();
    let last = SIZE - 4096;
    direct.write_all_at(&[1; 512], last + 512).unwrap();
    let mut found = [9; 4096];
    file.read_exact_at(&mut found, last).unwrap();
    assert!(found[..512] == [0; 512] && found[512..1024] == [1; 512] && found[1024..] == [0; 3072]);
    let zeros = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, zeros, last, 4096).unwrap();
}

/// What the kernel lets the file have of dirty pages: strict limit and largest share.
pub fn limits(place: &std::path::Path) -> String {
    let device = std::fs::metadata(place).unwrap().dev();
    let directory = format!("/sys/class/bdi/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let read = |name: &str| std::fs::read_to_string(format!("{directory}/{name}")).unwrap().trim().to_owned();
    format!("{} {}", read("strict_limit"), read("max_ratio"))
}
