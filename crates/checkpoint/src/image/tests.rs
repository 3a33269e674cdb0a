use std::path::Path;

use onecopy_testing::{TestDirectory, seed};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::format::{DATA_AT, Run};
use super::*;
use crate::files::record::{Event, Recorder, power_cut};

const PAGES: usize = 64;
const SIZE: u64 = (PAGES * PAGE_BYTES) as u64;

/// What each page is full of.
type Model = Vec<u8>;

fn append(image: &mut Image, changed: &[(usize, u8)], is_whole: bool) -> Result<u64, CheckpointError> {
    let parent = image.last().filter(|_| !is_whole).map(|last| last.number);
    let mut writer = image.begin(parent)?;
    for (page, byte) in changed {
        writer.page(u32::try_from(*page).unwrap(), &[*byte; PAGE_BYTES])?;
    }
    let sum: u64 = changed.iter().map(|(_, byte)| u64::from(*byte)).sum();
    writer.commit(1000 + sum, &sum.to_le_bytes(), &format!("epoch {sum}"))
}

fn all(model: &Model) -> Vec<(usize, u8)> {
    model.iter().copied().enumerate().collect()
}

fn read(view: &View) -> Result<Model, CheckpointError> {
    let mut content = [0; PAGE_BYTES];
    let mut model = Model::new();
    for page in 0..u32::try_from(PAGES).unwrap() {
        view.read(page, &mut content)?;
        assert!(content.iter().all(|byte| *byte == content[0]), "page {page} is torn");
        model.push(content[0]);
    }
    let present: Vec<u32> = (0u32..).zip(&model).filter(|(_, byte)| **byte != 0).map(|(page, _)| page).collect();
    assert_eq!(view.present().collect::<Vec<u32>>(), present);
    Ok(model)
}

#[track_caller]
fn check(image: &Image, number: u64, model: &Model) {
    assert_eq!(read(&image.view(number).unwrap()).unwrap(), *model, "checkpoint {number}");
}

/// Each checkpoint in a directory shows its own instant, whole or as changes since the one before, before and after
/// compaction.
///
/// Spec: D6
#[test]
fn t10_each_checkpoint_shows_its_instant_whole_or_as_changes_compacted_or_not() {
    let mut random = StdRng::seed_from_u64(seed());
    for _ in 0..5 {
        let directory = TestDirectory::new().unwrap();
        let mut image = Image::create(directory.path(), SIZE, b"prefix").unwrap();
        let (mut now, mut models): (Model, Vec<(u64, Model)>) = (vec![0; PAGES], Vec::new());
        // What changed since the last one is known.
        let mut is_known = false;
        for _ in 0..30 {
            match random.random_range(0..10) {
                0..7 => {
                    let mut changed = Vec::new();
                    for (page, byte) in now.iter_mut().enumerate() {
                        if random.random_bool(0.3) {
                            *byte = random.random_range(0..4);
                            changed.push((page, *byte));
                        }
                    }
                    let is_whole = !std::mem::replace(&mut is_known, true) || random.random_bool(0.1);
                    let changed = if is_whole { all(&now) } else { changed };
                    models.push((append(&mut image, &changed, is_whole).unwrap(), now.clone()));
                }
                7 if !models.is_empty() => {
                    let kept = random.random_range(0..models.len());
                    image.compact(models[kept].0).unwrap();
                    models.drain(..kept);
                }
                8 if !models.is_empty() => {
                    let (last, chance) = (models.last().map(|(number, _)| *number), random.random_range(0.1..0.9));
                    let removed: Vec<u64> = models.iter().map(|(number, _)| *number).collect();
                    let removed: Vec<u64> = removed.into_iter().filter(|_| random.random_bool(chance)).collect();
                    image.remove(&removed).unwrap();
                    models.retain(|(number, _)| !removed.contains(number));
                    is_known &= models.last().map(|(number, _)| *number) == last;
                }
                _ => {
                    drop(image);
                    image = Image::open_to_write(directory.path()).unwrap();
                }
            }
            let numbers: Vec<u64> = image.checkpoints().iter().map(|checkpoint| checkpoint.number).collect();
            assert_eq!(numbers, models.iter().map(|(number, _)| *number).collect::<Vec<u64>>());
            for (number, model) in &models {
                check(&image, *number, model);
            }
        }
        let Some((last, model)) = models.last() else { continue };
        let file = std::fs::File::create_new(directory.join("ram")).unwrap();
        image.view(*last).unwrap().fill(&file).unwrap();
        let content: Vec<u8> = model.iter().flat_map(|byte| [*byte; PAGE_BYTES]).collect();
        assert!(std::fs::read(directory.join("ram")).unwrap() == content);
        assert_eq!((image.prefix(), image.memory_bytes()), (&b"prefix"[..], SIZE));
    }
}

/// Spec: D6
#[test]
fn t10_how_many_a_checkpoint_stands_on_is_known_and_the_disk_of_each() {
    let (directory, _) = three();
    let mut image = Image::open_to_write(directory.path()).unwrap();
    let told = |image: &Image| image.checkpoints().iter().map(|one| image.depth(one.number)).collect::<Vec<_>>();
    assert_eq!(told(&image), [0, 1, 2]);
    for checkpoint in image.checkpoints() {
        let view = image.view(checkpoint.number).unwrap();
        assert_eq!(image.disk(checkpoint.number).unwrap(), view.disk());
    }
    image.compact(2).unwrap();
    assert_eq!(told(&image), [0, 1]);
    assert!(matches!(image.disk(1), Err(CheckpointError::UnknownCheckpoint { number: 1 })));
    assert_eq!(image.depth(1), 0);
}

fn copy(from: &Path) -> TestDirectory {
    let directory = TestDirectory::new().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), directory.join(entry.file_name())).unwrap();
    }
    directory
}

/// Three checkpoints, and what each shows.
fn three() -> (TestDirectory, [Model; 3]) {
    let directory = TestDirectory::new().unwrap();
    let mut image = Image::create(directory.path(), SIZE, b"prefix").unwrap();
    let mut model: Model = (0..PAGES).map(|page| u8::try_from(page % 5).unwrap()).collect();
    append(&mut image, &all(&model), true).unwrap();
    let first = model.clone();
    model[3..9].copy_from_slice(&[7, 7, 0, 0, 7, 7]);
    append(&mut image, &(3..9).map(|page| (page, model[page])).collect::<Vec<_>>(), false).unwrap();
    let second = model.clone();
    model[8] = 9;
    append(&mut image, &[(8, 9)], false).unwrap();
    (directory, [first, second, model])
}

/// Does `work` once for each step that it has, killed behind it, with what a kill and a power cut leave. It publishes
/// `expected` files.
fn at_every_step(
    before: &TestDirectory,
    expected: usize,
    work: impl Fn(&mut Image) -> Result<(), CheckpointError>,
    check: impl Fn(&Path, bool),
) {
    for steps in 0.. {
        let directory = copy(before.path());
        let recorder = Recorder::killed_behind(steps);
        // Opening for writing may do a step, too.
        let done = Image::open_in(recorder.folder(directory.path()), true).and_then(|mut image| work(&mut image));
        check(directory.path(), done.is_ok());
        for lucky in [false, true] {
            let directory = copy(before.path());
            power_cut(&recorder.events(), directory.path(), lucky);
            check(directory.path(), done.is_ok());
        }
        if done.is_ok() {
            let publishes = recorder.events().iter().filter(|event| matches!(event, Event::Rename { .. })).count();
            assert!(steps > 1 + 3 * publishes && publishes == expected, "{steps} steps, {publishes} renames");
            return;
        }
    }
}

/// Whoever writes checkpoints may be killed, or the power go, at every step: the last one that was acknowledged is
/// there, and the next writer goes on.
///
/// Spec: D6
#[test]
fn t11_killed_at_every_step_of_an_append_the_last_one_that_was_acknowledged_is_there() {
    let (directory, models) = three();
    let mut next = models[2].clone();
    next[60] = 6;
    at_every_step(
        &directory,
        1,
        |image| append(image, &[(60, 6)], false).map(drop),
        |place, is_done| {
            let mut image = Image::open_to_write(place).unwrap();
            (1..).zip(&models).for_each(|(number, model)| check(&image, number, model));
            match image.last().unwrap().number {
                4 => check(&image, 4, &next),
                last => assert!(last == 3 && !is_done, "the last one is {last}"),
            }
            // And it goes on.
            append(&mut image, &[(61, 1)], false).unwrap();
            assert!(image.folder.names().unwrap().iter().all(|name| !name.ends_with(NEW)));
        },
    );
}

/// Spec: D6
#[test]
fn t11_killed_at_every_step_of_a_compaction_all_later_ones_are_there() {
    let (directory, models) = three();
    at_every_step(
        &directory,
        1,
        |image| image.compact(2),
        |place, is_done| {
            let mut image = Image::open_to_write(place).unwrap();
            check(&image, 2, &models[1]);
            check(&image, 3, &models[2]);
            assert!(!is_done || image.checkpoints().len() == 2);
            image.compact(2).unwrap();
            assert_eq!(image.checkpoints()[0], Checkpoint { parent: None, ..image.checkpoints()[0] });
            check(&image, 2, &models[1]);
            check(&image, 3, &models[2]);
        },
    );
}

/// Also of one that others followed upon: what a broken-off one has left is none the worse for them.
///
/// Spec: D6
#[test]
fn t11_killed_at_every_step_of_a_removal_all_others_are_there() {
    let (directory, models) = three();
    for removed in [&[1][..], &[2], &[1, 2], &[2, 3], &[3]] {
        let shown = |image: &Image, gone: &[u64]| {
            let stay = (1..).zip(&models).filter(|(number, _)| !removed.contains(number) && !gone.contains(number));
            stay.for_each(|(number, model)| check(image, number, model));
        };
        at_every_step(
            &directory,
            usize::from(!removed.contains(&3)),
            |image| image.remove(removed),
            |place, is_done| {
                let image = Image::open(place).unwrap();
                shown(&image, &[]);
                let left: Vec<u64> = image.checkpoints().iter().map(|checkpoint| checkpoint.number).collect();
                assert!(!is_done || left.len() == 3 - removed.len(), "{left:?}");
                for number in &left {
                    check(&image, *number, &models[usize::try_from(*number).unwrap() - 1]);
                    for compacts in [false, true] {
                        let place = copy(place);
                        let mut image = Image::open_to_write(place.path()).unwrap();
                        let older: Vec<u64> = left.iter().copied().filter(|older| older < number).collect();
                        let gone = if compacts { &older[..] } else { std::slice::from_ref(number) };
                        match compacts {
                            true => image.compact(*number).unwrap(),
                            false => image.remove(gone).unwrap(),
                        }
                        shown(&image, gone);
                        shown(&Image::open(place.path()).unwrap(), gone);
                    }
                }
                let mut image = Image::open_to_write(place).unwrap();
                let again: Vec<u64> = removed.iter().copied().filter(|number| left.contains(number)).collect();
                image.remove(&again).unwrap();
                shown(&image, &[]);
                let again = image.remove(removed);
                assert!(matches!(again, Err(CheckpointError::UnknownCheckpoint { .. })));
            },
        );
    }
}

/// A checkpoint that is damaged, cut short or another machine's is refused with its file, and one writes at a time.
///
/// Spec: C6
#[test]
fn t10_who_reads_sees_a_checkpoint_as_it_was_whatever_a_removal_does_meanwhile() {
    for removed in [&[2][..], &[1, 2]] {
        for steps in 0.. {
            let (directory, models) = three();
            let reader = Image::open(directory.path()).unwrap();
            let recorder = Recorder::killed_behind(steps);
            let mut writer = Image::open_in(recorder.folder(directory.path()), true).unwrap();
            let done = writer.remove(removed);
            for image in [&reader, &Image::open(directory.path()).unwrap()] {
                if !removed.contains(&1) {
                    check(image, 1, &models[0]);
                }
                check(image, 3, &models[2]);
            }
            if done.is_ok() {
                assert!(matches!(reader.view(2), Err(CheckpointError::UnknownCheckpoint { number: 2 })));
                break;
            }
            // The same writer again: it did not die.
            recorder.spare();
            writer.remove(removed).unwrap();
            check(&writer, 3, &models[2]);
        }
    }
}

/// Spec: C6
#[test]
fn t10_who_reads_sees_a_checkpoint_as_it_was_whatever_a_compaction_does_meanwhile() {
    // A compaction that ends behind each of its steps, and what was opened before it.
    for steps in 0.. {
        let (directory, models) = three();
        let reader = Image::open(directory.path()).unwrap();
        let top = reader.layer(3).unwrap().unwrap();
        let names = reader.folder.names().unwrap();
        let recorder = Recorder::killed_behind(steps);
        let mut writer = Image::open_in(recorder.folder(directory.path()), true).unwrap();
        let done = writer.compact(3);
        check(&reader, 3, &models[2]);
        check(&Image::open(directory.path()).unwrap(), 3, &models[2]);
        if done.is_ok() {
            assert!(reader.layers(top).unwrap().is_none(), "what it stood on is there");
            assert!(reader.heads_of(&names).unwrap().is_none(), "all that was listed is there");
            assert!(matches!(reader.view(2), Err(CheckpointError::UnknownCheckpoint { number: 2 })));
            return;
        }
        // The same writer again: it did not die.
        recorder.spare();
        writer.compact(3).unwrap();
        check(&writer, 3, &models[2]);
        check(&reader, 3, &models[2]);
    }
}

/// Spec: D6
#[test]
fn t11_a_writer_removes_what_a_killed_one_has_left_and_nothing_else() {
    let (directory, _) = three();
    let (left, others) = (["checkpoint.4.new", "machine.new"], ["taking.new", "checkpoint.x.new", "checkpoint.04.new"]);
    left.iter().chain(&others).for_each(|name| std::fs::write(directory.join(name), b"").unwrap());
    Image::open_to_write(directory.path()).unwrap();
    assert!(left.iter().all(|name| !directory.join(name).exists()));
    assert!(others.iter().all(|name| directory.join(name).exists()));
}

/// Spec: C6
#[test]
fn t12_a_flipped_bit_is_never_shown() {
    let (directory, models) = three();
    for name in ["machine", "checkpoint.1", "checkpoint.2", "checkpoint.3"] {
        let path = directory.join(name);
        let sound = std::fs::read(&path).unwrap();
        let image = Image::open(directory.path()).unwrap();
        let head = number_of(name).map(|number| image.heads[&number]);
        let data = head.map_or(0..0, |head| HEAD_BYTES..usize::try_from(head.tables_at()).unwrap());
        let mut refused_data = 0;
        for at in (0..sound.len()).filter(|at| !data.contains(at) || at % 1021 == 0) {
            let mut damaged = sound.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(&path, damaged).unwrap();
            let shown = Image::open(directory.path()).and_then(|image| {
                let view = image.view(3)?;
                Ok((read(&view)?, view.devices().to_vec(), view.disk().to_owned()))
            });
            match shown {
                // Between head and data nothing is told, and older data may be written over.
                Ok((shown, devices, disk)) if data.contains(&at) => {
                    assert!(
                        shown == models[2] && devices == 9u64.to_le_bytes() && disk == "epoch 9",
                        "{name}, byte {at}"
                    );
                }
                Err(CheckpointError::Damaged { path: told, .. }) => {
                    assert_eq!(told, path);
                    refused_data += usize::from(data.contains(&at));
                }
                other => panic!("{name}, byte {at}: {:?}", other.map(|(shown, ..)| shown)),
            }
        }
        std::fs::write(&path, &sound).unwrap();
        assert!(head.is_none() || refused_data > 0, "{name}: no damage in its data was seen");
    }
}

/// Spec: C6
#[test]
fn t12_files_that_are_cut_short_longer_or_anothers_are_refused() {
    let (directory, _) = three();
    let path = directory.join("checkpoint.3");
    let sound = std::fs::read(&path).unwrap();
    let refused = |what: &str| {
        let opened = Image::open(directory.path());
        assert!(matches!(opened, Err(CheckpointError::Damaged { .. })), "{what} is taken");
    };
    for length in (0..sound.len()).filter(|length| *length < 140 || length % 97 == 0) {
        std::fs::write(&path, &sound[..length]).unwrap();
        refused(&format!("a file of {length} bytes"));
    }
    std::fs::write(&path, [sound.as_slice(), b"x"].concat()).unwrap();
    refused("a longer file");
    std::fs::copy(directory.join("checkpoint.2"), &path).unwrap();
    refused("another number");
    let (other, _) = three();
    std::fs::copy(other.join("checkpoint.3"), &path).unwrap();
    refused("another machine's");
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(directory.join("checkpoint.1")).unwrap();
    assert_eq!(Image::open(directory.path()).unwrap().checkpoints(), [], "the parent is gone");
}

/// Spec: C6
#[test]
fn t12_one_writes_and_what_cannot_be_written_is_refused() {
    let (directory, models) = three();
    let mut image = Image::open_to_write(directory.path()).unwrap();
    assert!(matches!(Image::open_to_write(directory.path()), Err(CheckpointError::Held { .. })));
    assert!(matches!(Image::create(directory.path(), SIZE, b""), Err(CheckpointError::Exists { .. })));
    let mut reader = Image::open(directory.path()).unwrap();
    assert!(matches!(reader.begin(None), Err(CheckpointError::ReadOnly { .. })));
    assert!(matches!(reader.view(4), Err(CheckpointError::UnknownCheckpoint { number: 4 })));
    for pages in [&[(5, 1), (5, 2)][..], &[(6, 1), (5, 1)], &[(PAGES, 1)]] {
        assert!(matches!(append(&mut image, pages, false), Err(CheckpointError::PageOrder { .. })));
    }
    let writer = image.begin(Some(3)).unwrap();
    let long = "x".repeat(5000);
    assert!(matches!(writer.commit(0, b"", &long), Err(CheckpointError::TooLong { disk_bytes: 5000, .. })));
    // What changed since another one is not what changed since the last.
    for other in [0, 2, 4] {
        assert!(matches!(image.begin(Some(other)), Err(CheckpointError::NotLast { last: Some(3), .. })), "{other}");
    }
    // Who reads is not disturbed by a compaction.
    let view = reader.view(1).unwrap();
    image.compact(3).unwrap();
    assert_eq!(read(&view).unwrap(), models[0]);
    let empty = TestDirectory::new().unwrap();
    for size_bytes in [0, 4095, 1 << 41] {
        assert!(matches!(Image::create(empty.path(), size_bytes, b""), Err(CheckpointError::Size { .. })));
    }
    let other = Folder::open(empty.path()).unwrap();
    assert!(other.lock().unwrap());
    assert!(matches!(Image::create(empty.path(), SIZE, b""), Err(CheckpointError::Held { .. })));
    drop(other);
    let mut image = Image::create(empty.path(), SIZE, b"").unwrap();
    assert!(matches!(image.begin(Some(1)), Err(CheckpointError::NotLast { number: 1, last: None })));
}

/// Spec: C6
#[test]
fn t12_a_checkpoint_that_is_given_up_leaves_nothing_and_one_without_room_is_refused() {
    let (directory, models) = three();
    let mut image = Image::open_to_write(directory.path()).unwrap();
    let new = directory.join("checkpoint.4.new");
    let mut writer = image.begin(Some(3)).unwrap();
    writer.page(0, &[1; PAGE_BYTES]).unwrap();
    assert!(new.exists());
    drop(writer);
    assert!(!new.exists());
    let long = "x".repeat(5000);
    image.begin(None).unwrap().commit(0, b"", &long).unwrap_err();
    assert!(!new.exists());
    image.check_space(1).unwrap();
    let error = image.check_space(u64::MAX).unwrap_err().to_string();
    assert!(error.contains("make room in its file system"), "{error}");
    append(&mut image, &all(&models[0]), true).unwrap();
    check(&image, 4, &models[0]);
}

fn head() -> Head {
    Head {
        number: 2,
        parent: 1,
        memory_bytes: SIZE,
        taken_unix_ms: 3,
        data_pages: 2,
        runs: 2,
        devices_bytes: 3,
        disk_bytes: 2,
        tables_sum: 0,
    }
}

/// Spec: C6
#[test]
fn t12_a_head_and_tables_have_these_bytes() {
    let machine = Machine { identity: 5, memory_bytes: SIZE, prefix: vec![1, 2] };
    assert_eq!(Machine::parse(&machine.to_bytes()), Ok(machine.clone()));
    let bytes = head().to_bytes(5);
    assert_eq!(&bytes[..32], b"ONECOPYK\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
    assert_eq!(Head::parse(&bytes, &machine, 2), Ok(head()));
    assert_eq!(head().tables_at(), DATA_AT + 2 * 4096);
    let run = |first, pages, is_data| Run { first, pages, is_data };
    let (runs, sums) = (vec![run(1, 2, true), run(3, 4, false)], vec![6, 7]);
    let tables = Tables { runs, sums, devices: vec![1, 2, 3], disk: "ab".to_owned() };
    let bytes = tables.to_bytes();
    assert_eq!(bytes[..24], [1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(bytes[24..], [&[6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3][..], b"ab"].concat());
    let head = Head { tables_sum: format::tables_sum(5, &bytes), ..head() };
    assert_eq!(Tables::parse(&bytes, &head, 5), Ok(tables));
}

/// Spec: C6
#[test]
fn t12_what_is_no_file_is_refused_and_not_waited_for() {
    let (directory, _) = three();
    for name in ["checkpoint.3", "machine"] {
        std::fs::remove_file(directory.join(name)).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, directory.join(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(Image::open(directory.path()), Err(CheckpointError::Damaged { .. })), "{name}");
    }
}

/// Spec: C6
#[test]
fn t12_a_directory_that_is_moved_away_is_still_the_one_that_is_written() {
    let (directory, models) = three();
    let mut image = Image::open_to_write(directory.path()).unwrap();
    let moved = directory.path().with_extension("moved");
    std::fs::rename(directory.path(), &moved).unwrap();
    std::fs::create_dir(directory.path()).unwrap();
    image.compact(3).unwrap();
    check(&Image::open(&moved).unwrap(), 3, &models[2]);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    std::fs::remove_dir_all(moved).unwrap();
}

fn resum(bytes: &mut [u8], seed: u64) {
    let at = bytes.len() - 8;
    let sum = format::tables_sum(seed, &bytes[..at]);
    bytes[at..].copy_from_slice(&sum.to_le_bytes());
}

proptest! {
    /// A sound file of which some bytes are others, and whose checksums are sound again.
    /// Spec: C6
    #[test]
    fn t12_any_bytes_are_a_file_or_an_error(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let changed = |mut bytes: Vec<u8>| {
            for (at, byte) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            bytes
        };
        let machine = Machine { identity: 5, memory_bytes: SIZE, prefix: vec![1; 9] };
        let mut bytes = changed(machine.to_bytes());
        let identity = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
        resum(&mut bytes, identity);
        if let Ok(parsed) = Machine::parse(&bytes) {
            prop_assert_eq!(parsed.to_bytes(), bytes);
        }
        let mut bytes = changed(head().to_bytes(5).to_vec());
        resum(&mut bytes, 5);
        if let Ok(parsed) = Head::parse(bytes.as_slice().try_into().unwrap(), &machine, 2) {
            prop_assert!(parsed.parent < 2 && parsed.tables_bytes() < 1 << 30);
            prop_assert_eq!(&parsed.to_bytes(5)[..HEAD_BYTES - 32], &bytes[..HEAD_BYTES - 32]);
        }
        let run = |first, pages, is_data| Run { first, pages, is_data };
        let runs = vec![run(1, 2, true), run(3, 4, false)];
        let tables = Tables { runs, sums: vec![6, 7], devices: vec![1, 2, 3], disk: "ab".to_owned() };
        let bytes = changed(tables.to_bytes());
        let head = Head { tables_sum: format::tables_sum(5, &bytes), ..head() };
        if let Ok(parsed) = Tables::parse(&bytes, &head, 5) {
            let mut ends = parsed.runs.iter().map(|run| u64::from(run.first) + u64::from(run.pages));
            prop_assert!(ends.clone().is_sorted() && ends.next_back().unwrap() <= PAGES as u64);
            prop_assert_eq!(parsed.to_bytes(), bytes);
        }
    }
}
