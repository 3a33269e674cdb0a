//! The process that serves a memory.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::memory::{Descriptors, Epoch, GuestMemory, become_memory_server};
use onecopy_checkpoint::{CheckpointError, PAGE_BYTES};

use crate::processes::{PAGES, answer, options};

pub fn run(directory: &Path, state: &str, stream: UnixStream) {
    match become_memory_server() {
        // Roots of containers often may not change that role. It matters where memory is scarce, which it is not here.
        Err(CheckpointError::Io { action: "change the role of", source, .. })
            if source.kind() == ErrorKind::PermissionDenied => {}
        other => other.unwrap(),
    }
    let (place, shadow) = (directory.join("ram"), directory.join("shadow"));
    let device = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let memory = match state {
        "lost" | "lost, drops" => {
            GuestMemory::adopt_without_state(&place, &shadow, device, &options(state == "lost, drops"))
        }
        kept => {
            let state = std::fs::OpenOptions::new().read(true).write(true).open(kept).unwrap().into();
            GuestMemory::adopt(&place, &shadow, Descriptors { device, state }, (0, 0))
        }
    };
    let descriptors = memory.as_ref().unwrap().descriptors().unwrap();
    let mut memory = memory.ok();
    answer(stream, |words| {
        if words[0] == "again" {
            // Nobody else serves it then.
            drop(memory.take());
            let (device, state) = (descriptors.device.try_clone().unwrap(), descriptors.state.try_clone().unwrap());
            memory = Some(GuestMemory::adopt(&place, &shadow, Descriptors { device, state }, (0, 0)).unwrap());
        }
        let memory = memory.as_ref().unwrap();
        asked(memory, &descriptors, words).unwrap_or_else(|error| format!("error: {error}"))
    });
}

fn asked(memory: &GuestMemory, descriptors: &Descriptors, words: &[&str]) -> Result<String, CheckpointError> {
    let epoch = || Epoch(words[1].parse().unwrap());
    Ok(match words[0] {
        "hello" => "hello".to_owned(),
        "again" => "done".to_owned(),
        "hold" => {
            // As while it copies out of the page cache.
            std::mem::forget(std::fs::File::open(words[1]).unwrap());
            "done".to_owned()
        }
        "descriptor" => descriptors.state.as_raw_fd().to_string(),
        "cut" => memory.cut()?.epoch.0.to_string(),
        "release" => memory.release(epoch()).map(|()| "done".to_owned())?,
        "reread" => memory.reread_shadow().map(|()| "done".to_owned())?,
        "keep" => {
            let kept = memory.keep()?;
            format!("missing {}", kept.missing)
        }
        "changed" => {
            let changed: Vec<String> = memory.changed(epoch())?.iter().map(u32::to_string).collect();
            changed.join(" ")
        }
        "keep-image" => {
            // A checkpoint of this epoch: which directory, since which epoch, devices, disk.
            let [directory, since, devices, disk] = words[2..] else { panic!("{words:?}") };
            let mut image = Image::open_to_write(Path::new(directory))?;
            let is_whole = since == "whole";
            let pages = match is_whole {
                true => memory.present(epoch())?,
                false => memory.changed_since(Epoch(since.parse().unwrap()), epoch())?,
            };
            let parent = image.last().filter(|_| !is_whole).map(|last| last.number);
            let (mut writer, mut content) = (image.begin(parent)?, [0; PAGE_BYTES]);
            for page in pages {
                memory.read(epoch(), page, &mut content)?;
                writer.page(page, &content)?;
            }
            writer.commit(0, &std::fs::read(devices).unwrap(), disk)?;
            "done".to_owned()
        }
        "since" => {
            let changed = memory.changed_since(epoch(), Epoch(words[2].parse().unwrap()))?;
            changed.iter().map(u32::to_string).collect::<Vec<String>>().join(" ")
        }
        "stamps" => {
            let mut content = [0; PAGE_BYTES];
            let mut stamps = Vec::with_capacity(PAGES);
            for page in 0..u32::try_from(PAGES).unwrap() {
                memory.read(epoch(), page, &mut content)?;
                let words = content.as_chunks::<8>().0;
                // Torn: other words in it; then what tells it apart.
                let is_whole = words.iter().all(|word| *word == words[0]);
                stamps.push(if is_whole {
                    u64::from_ne_bytes(words[0]).to_string()
                } else {
                    format!("torn:{:x}", digest(&content))
                });
            }
            stamps.join(" ")
        }
        "statistics" => {
            let statistics = memory.statistics();
            match words[1] {
                "written" => statistics.written_pages,
                "read" => statistics.read_pages,
                "zeroed" => statistics.zeroed_pages,
                "lost" => statistics.lost_pages,
                "pending" => statistics.pending_pages,
                _ => statistics.dropped_pages,
            }
            .to_string()
        }
        unknown => panic!("{unknown}"),
    })
}

fn digest(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}
