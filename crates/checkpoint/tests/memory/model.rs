//! Random work on a mapped memory against plain vectors.

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_testing::seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::processes::{Memory, PAGES};

/// What a process writes into its mapping of the memory, or gives back, is in the epoch, and comes back when the page
/// cache has let go of it.
///
/// Spec: D6
#[test]
fn t3_what_is_written_through_a_mapping_is_in_its_epoch() {
    let name = "t3_what_is_written_through_a_mapping_is_in_its_epoch";
    let Some(mut memory) = Memory::new(name, false) else { return };
    let mut random = StdRng::seed_from_u64(seed());
    let mut now = vec![0; PAGES];
    let mut ended: Vec<(String, Vec<u64>)> = Vec::new();
    let mut before: Vec<u64> = now.clone();
    for stamp in 1..250 {
        let first = random.random_range(0..PAGES);
        let count = random.random_range(1..200).min(PAGES - first);
        match random.random_range(0..100) {
            0..70 => {
                memory.mapper.expect(&format!("write {first} {count} {stamp}"), "done");
                now[first..first + count].fill(stamp);
            }
            70..80 => {
                memory.mapper.expect(&format!("zero {first} {count}"), "done");
                now[first..first + count].fill(0);
            }
            80..92 => {
                let epoch = memory.take();
                let changed = memory.server().ask(&format!("changed {epoch}"));
                let changed: Vec<usize> = changed.split_terminator(' ').map(|page| page.parse().unwrap()).collect();
                for page in (0..PAGES).filter(|page| now[*page] != before[*page]) {
                    assert!(changed.binary_search(&page).is_ok(), "page {page} is not told as changed");
                }
                before.clone_from(&now);
                ended.push((epoch, now.clone()));
            }
            92..96 => {
                memory.mapper.expect("evict", "done");
                memory.mapper.expect("verify", "done");
            }
            _ if ended.len() > 2 => {
                let (epoch, _) = &ended[0];
                memory.server().expect(&format!("release {epoch}"), "done");
                ended.remove(0);
            }
            _ => {}
        }
    }
    assert!(ended.len() > 2);
    for (epoch, expected) in &ended {
        assert!(memory.stamps(epoch) == *expected, "epoch {epoch}");
    }
    // As if the takes between the first and the last had been void.
    let ((first, before), (last, after)) = (&ended[0], ended.last().unwrap());
    let changed = memory.server().ask(&format!("since {first} {last}"));
    let changed: Vec<usize> = changed.split_terminator(' ').map(|page| page.parse().unwrap()).collect();
    assert!(changed.is_sorted_by(|one, other| one < other));
    assert!((0..PAGES).all(|page| before[page] == after[page] || changed.binary_search(&page).is_ok()));
    assert!(memory.server().ask(&format!("since 1 {last}")).contains("is not kept"));
    memory.mapper.expect("evict", "done");
    memory.mapper.expect("verify", "done");
    let read: u64 = memory.server().ask("statistics read").parse().unwrap();
    assert!(read >= PAGES as u64, "only {read} pages came from the server");
}

/// A memory that keeps nothing begins to keep while it is written, and its first epoch has all.
///
/// Spec: D6
#[test]
fn t4_a_memory_that_drops_keeps_from_when_it_shall_while_it_is_written() {
    let name = "t4_a_memory_that_drops_keeps_from_when_it_shall_while_it_is_written";
    let Some(mut memory) = Memory::new(name, true) else { return };
    memory.mapper.expect("write 0 1000 7", "done");
    memory.mapper.expect("zero 10 5", "done");
    memory.mapper.expect("synchronize", "done");
    memory.server().expect("statistics dropped", "995");
    assert!(memory.server().ask("cut").contains("pages of the memory are not kept"));
    memory.mapper.expect("storm", "done");
    memory.server().expect("keep", "missing 0");
    memory.mapper.expect("calm", "done");
    let epoch = memory.take();
    let expected = memory.mapper.ask("stamps");
    let stamps: Vec<String> = memory.stamps(&epoch).iter().map(u64::to_string).collect();
    assert_eq!(stamps.join(" "), expected);
    memory.mapper.expect("evict", "done");
    memory.mapper.expect("verify", "done");
    memory.server().expect("statistics lost", "0");
}

/// What somebody has written into the shadow is what the memory shows once its server has looked again, also where the
/// kernel had read zeros before, and is in the next epoch. What was written through the memory stays.
///
/// Spec: D6
#[test]
fn t57_what_was_written_into_the_shadow_is_seen_once_its_server_has_looked_again() {
    let name = "t57_what_was_written_into_the_shadow_is_seen_once_its_server_has_looked_again";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect("verify", "done");
    memory.mapper.expect("write 0 4 7", "done");
    let place = memory.place();
    let shadow = std::fs::OpenOptions::new().write(true).open(place.with_file_name("shadow")).unwrap();
    let content = 9u64.to_ne_bytes().repeat(60 * PAGE_BYTES / 8);
    std::os::unix::fs::FileExt::write_all_at(&shadow, &content, 4 * PAGE_BYTES as u64).unwrap();
    memory.server().expect("reread", "done");
    memory.mapper.expect("shows 4 60 9", "done");
    memory.mapper.expect("verify", "done");
    let epoch = memory.take();
    let mut expected = vec![0; PAGES];
    expected[..4].fill(7);
    expected[4..64].fill(9);
    assert_eq!(memory.stamps(&epoch), expected);
}
