//! Servers die in the middle, and others go on.

use std::io::Read;
use std::os::unix::fs::FileExt;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_testing::{TestDirectory, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::processes::{Memory, PAGES};

/// How often the server is killed in the midst of its work.
const DEATHS: u32 = 100;

/// A server of memory that is killed in the midst of write-back is not noticed by who has the memory mapped; what it
/// had read and not answered, the next one answers.
///
/// Spec: D6
#[test]
fn t5_a_killed_server_is_not_noticed_by_who_has_the_memory_mapped() {
    let name = "t5_a_killed_server_is_not_noticed_by_who_has_the_memory_mapped";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect("storm", "done");
    let mut kept = None;
    for death in 0..DEATHS {
        // In the midst of what it does: it has written some since it began.
        until("pages are written back", || memory.server().ask("statistics written").parse::<u64>().unwrap() > 300);
        if death == 2 {
            let epoch = memory.server().ask("cut");
            // A page may be half written by the mapper in that moment: told as it is.
            kept = Some((memory.server().ask(&format!("stamps {epoch}")), epoch));
        }
        memory.kill_server();
        memory.serve();
    }
    // An epoch is the same for whoever serves.
    let (stamps, epoch) = kept.unwrap();
    assert!(memory.server().ask(&format!("stamps {epoch}")) == stamps);
    memory.mapper.expect("calm", "done");
    let epoch = memory.take();
    let expected = memory.mapper.ask("stamps");
    let stamps: Vec<String> = memory.stamps(&epoch).iter().map(u64::to_string).collect();
    assert_eq!(stamps.join(" "), expected);
    memory.mapper.expect("evict", "done");
    memory.mapper.expect("verify", "done");
}

/// Whether the kernel asks for something more, or will soon.
fn has_more(device: &std::fs::File) -> bool {
    let mut asked = [PollFd::new(device, PollFlags::IN)];
    poll(&mut asked, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap() > 0
}

/// Spec: D6
#[test]
fn t5_what_a_server_had_read_and_not_answered_is_asked_of_the_next_one() {
    let name = "t5_what_a_server_had_read_and_not_answered_is_asked_of_the_next_one";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect(&format!("write 0 {PAGES} 2"), "done");
    memory.mapper.expect("write back", "done");
    memory.kill_server();
    // Who changes a page that the kernel writes back, as for somebody's sync(2), waits for the next server.
    memory.mapper.tell(&format!("write 0 {PAGES} 3"));
    memory.mapper.tell("write back");
    // The keeper is a server that reads requests, and dies.
    let mut device = std::fs::File::from(memory.device());
    let mut written = 0;
    let mut buffer = vec![0; (1 << 20) + 4096];
    while written == 0 || (written < 3 && has_more(&device)) {
        let length = device.read(&mut buffer).unwrap();
        // WRITE.
        written += usize::from(length > 8 && buffer[4..8] == 16u32.to_ne_bytes());
    }
    drop(device);
    memory.serve();
    assert_eq!([memory.mapper.heard(), memory.mapper.heard()], ["done", "done"]);
    let epoch = memory.server().ask("cut");
    assert!(memory.stamps(&epoch) == vec![3; PAGES]);
}

/// Spec: D6
#[test]
fn t5_a_server_that_dies_with_its_own_file_open_ends_when_the_next_one_serves() {
    let name = "t5_a_server_that_dies_with_its_own_file_open_ends_when_the_next_one_serves";
    let Some(mut memory) = Memory::new(name, false) else { return };
    let place = memory.place();
    memory.server().expect(&format!("hold {}", place.display()), "done");
    memory.mapper.expect("write 0 500 4", "done");
    // The kernel closes its files, and writes back for that.
    let mut dying = memory.server.take().unwrap();
    dying.begin_to_kill();
    memory.serve();
    dying.kill();
    let epoch = memory.take();
    assert!(memory.stamps(&epoch)[..500] == [4; 500]);
    memory.mapper.expect("verify", "done");
}

/// When its state is lost, too, all epochs are void and every resident page counts as changed; what no page cache has
/// is an error.
///
/// Spec: D6
#[test]
fn t5_a_server_that_was_given_up_answers_nothing_when_another_one_serves() {
    let name = "t5_a_server_that_was_given_up_answers_nothing_when_another_one_serves";
    let Some(mut memory) = Memory::new(name, false) else { return };
    for stamp in 1..5 {
        memory.mapper.expect(&format!("write {} 600 {stamp}", stamp * 300), "done");
        memory.server().expect("again", "done");
        let epoch = memory.take();
        let expected = memory.mapper.ask("stamps");
        let stamps: Vec<String> = memory.stamps(&epoch).iter().map(u64::to_string).collect();
        assert_eq!(stamps.join(" "), expected);
        memory.mapper.expect("evict", "done");
        memory.mapper.expect("verify", "done");
    }
}

/// Spec: D6
#[test]
fn t5_a_server_whose_thread_panics_ends_so_that_its_keeper_hears_of_it() {
    let name = "t5_a_server_whose_thread_panics_ends_so_that_its_keeper_hears_of_it";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect("write 0 100 5", "done");
    memory.mapper.expect("evict", "done");
    // Somebody writes into the state, which nobody else may: no slot says anything any more.
    let slots_at = 3 * PAGE_BYTES as u64;
    std::fs::File::from(memory.descriptors().state.try_clone().unwrap()).write_all_at(&[0; 4096], slots_at).unwrap();
    memory.mapper.tell("read 50");
    memory.server().wait_ended();
}

/// Spec: D6
#[test]
fn t6_without_its_state_a_locked_memory_counts_as_changed_and_its_epochs_are_void() {
    let name = "t6_without_its_state_a_locked_memory_counts_as_changed_and_its_epochs_are_void";
    let Some(mut memory) = Memory::new(name, true) else { return };
    memory.mapper.expect("write 0 600 5", "done");
    memory.server().expect("keep", "missing 0");
    let void = memory.take();
    memory.mapper.expect("write 100 100 6", "done");
    memory.mapper.expect("synchronize", "done");
    memory.kill_server();
    memory.serve_without_state(true);
    assert!(memory.server().ask(&format!("changed {void}")).contains("is not kept"));
    assert!(memory.server().ask("cut").contains("are not kept"));
    memory.server().expect("keep", "missing 0");
    memory.mapper.expect("verify", "done");
    let epoch = memory.take();
    let changed = memory.server().ask(&format!("changed {epoch}"));
    // Those and what the kernel has read ahead.
    assert!((600..PAGES).contains(&changed.split(' ').count()));
    let mut expected = vec![5; 600];
    expected[100..200].fill(6);
    expected.resize(PAGES, 0);
    assert!(memory.stamps(&epoch) == expected);
    // The one after it finds the new state.
    memory.kill_server();
    memory.serve();
    assert!(memory.stamps(&epoch) == expected);
}

/// Spec: D6
#[test]
fn t6_without_its_state_what_no_page_cache_has_is_an_error_and_not_something_older() {
    let name = "t6_without_its_state_what_no_page_cache_has_is_an_error_and_not_something_older";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.mapper.expect("write 0 600 5", "done");
    memory.mapper.expect("evict", "done");
    memory.mapper.expect("write 0 100 6", "done");
    memory.kill_server();
    memory.serve_without_state(false);
    memory.mapper.expect("read 50", "done");
    memory.mapper.expect("read 300", &libc::EIO.to_string());
    // Resident ones are written back and copied out; the others stay unknown, and nothing is cut.
    memory.mapper.expect("synchronize", "done");
    let missing = memory.server().ask("keep");
    let missing: usize = missing.strip_prefix("missing ").unwrap().parse().unwrap();
    assert!((PAGES - 600..=PAGES - 100).contains(&missing), "{missing} are missing");
    assert!(memory.server().ask("cut").contains("are not kept"));
    memory.mapper.expect("read 300", &libc::EIO.to_string());
    memory.mapper.expect("read 50", "done");
}

/// Spec: D6
#[test]
fn t6_without_its_state_who_waits_for_a_page_gets_it_and_what_was_given_back_is_zeros() {
    let name = "t6_without_its_state_who_waits_for_a_page_gets_it_and_what_was_given_back_is_zeros";
    let directory = TestDirectory::new().unwrap();
    std::fs::write(directory.join("shadow"), 9u64.to_ne_bytes().repeat(PAGES * PAGE_BYTES / 8)).unwrap();
    let Some(mut memory) = Memory::of(name, directory, true) else { return };
    memory.mapper.expect("holds 9", "done");
    memory.mapper.expect("write 0 100 5", "done");
    memory.mapper.expect("zero 200 50", "done");
    memory.mapper.expect("synchronize", "done");
    memory.kill_server();
    // No server is there: these wait in the kernel.
    memory.mapper.tell("read 1500");
    memory.wait_asked();
    memory.serve_without_state(true);
    assert_eq!(memory.mapper.heard(), "done");
    memory.mapper.expect("verify", "done");
    memory.server().expect("statistics lost", "0");
    memory.server().expect("keep", "missing 0");
    let epoch = memory.take();
    let mut expected = vec![9; PAGES];
    expected[..100].fill(5);
    expected[200..250].fill(0);
    assert!(memory.stamps(&epoch) == expected);
}

/// Spec: D6
#[test]
fn t6_without_its_state_what_is_written_back_before_it_is_told_to_keep_is_kept() {
    let name = "t6_without_its_state_what_is_written_back_before_it_is_told_to_keep_is_kept";
    let Some(mut memory) = Memory::new(name, false) else { return };
    memory.kill_server();
    memory.serve_without_state(false);
    memory.mapper.expect(&format!("put 0 {PAGES} 3"), "done");
    memory.mapper.expect("evict", "done");
    memory.mapper.expect("verify", "done");
    memory.server().expect("statistics dropped", "0");
}
