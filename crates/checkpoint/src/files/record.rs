//! Records what is done to a folder's files, kills who does it at any step, and makes again what a power cut leaves.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::Folder;
use crate::CheckpointError;

/// One thing that was done.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Create { name: String },
    Write { name: String, offset: u64, bytes: Vec<u8> },
    Synchronize { name: String },
    Rename { from: String, to: String },
    Remove { name: String },
    SynchronizeFolder,
}

#[derive(Debug, Default)]
struct Recorded {
    events: Vec<Event>,
    /// So many more, and nothing after them.
    left: Option<usize>,
    is_killed: bool,
}

/// All that is done through one folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder(Arc<Mutex<Recorded>>);

impl Recorder {
    /// Whoever works with it is killed behind this many steps.
    pub(crate) fn killed_behind(steps: usize) -> Recorder {
        Recorder(Arc::new(Mutex::new(Recorded { left: Some(steps), ..Recorded::default() })))
    }

    /// Whoever works with it has not died: a step had failed.
    pub(crate) fn spare(&self) {
        let mut recorded = self.0.lock().unwrap();
        (recorded.left, recorded.is_killed) = (None, false);
    }

    pub(crate) fn folder(&self, path: &Path) -> Folder {
        Folder { recorder: Some(self.clone()), ..Folder::open(path).unwrap() }
    }

    pub(super) fn push(&self, event: Event) -> Result<(), CheckpointError> {
        let mut recorded = self.0.lock().unwrap();
        recorded.events.push(event);
        match &mut recorded.left {
            Some(0) => {
                recorded.is_killed = true;
                Err(killed())
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Refuses what a killed process would do while it leaves.
    pub(super) fn check_alive(&self) -> Result<(), CheckpointError> {
        if self.0.lock().unwrap().is_killed { Err(killed()) } else { Ok(()) }
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().events.clone()
    }
}

fn killed() -> CheckpointError {
    CheckpointError::io("go on with", Path::new("killed"))(std::io::Error::other("killed"))
}

/// Does to a copy of a folder what a power cut after `events` leaves: of files what was synchronized, and of names what
/// the folder's last synchronization saw; `lucky`: names that came later are there, too.
pub(crate) fn power_cut(events: &[Event], into: &Path, lucky: bool) {
    let folder_synchronized = events.iter().rposition(|event| matches!(event, Event::SynchronizeFolder));
    let names_until = if lucky { events.len() } else { folder_synchronized.unwrap_or(0) };
    // What each file holds, and where under which name its content went.
    let mut contents: Vec<Vec<u8>> = Vec::new();
    let (mut writing, mut named): (BTreeMap<String, usize>, BTreeMap<String, Option<usize>>) = Default::default();
    for (at, event) in events.iter().enumerate() {
        let is_kept = at <= names_until;
        match event {
            Event::Create { name } => {
                contents.push(Vec::new());
                writing.insert(name.clone(), contents.len() - 1);
                if is_kept {
                    named.insert(name.clone(), Some(contents.len() - 1));
                }
            }
            Event::Write { name, offset, bytes } => {
                let mut later = events[at..].iter();
                let is_durable =
                    later.any(|event| matches!(event, Event::Synchronize { name: other } if other == name));
                if is_durable {
                    let content = &mut contents[writing[name]];
                    let begin = usize::try_from(*offset).unwrap();
                    content.resize(content.len().max(begin + bytes.len()), 0);
                    content[begin..begin + bytes.len()].copy_from_slice(bytes);
                }
            }
            Event::Rename { from, to } => {
                if let Some(file) = writing.remove(from) {
                    writing.insert(to.clone(), file);
                }
                if is_kept {
                    let file = named.insert(from.clone(), None).flatten();
                    named.insert(to.clone(), file);
                }
            }
            Event::Remove { name } if is_kept => drop(named.insert(name.clone(), None)),
            _ => {}
        }
    }
    for (name, file) in named {
        let path = into.join(name);
        match file {
            Some(file) => std::fs::write(path, &contents[file]).unwrap(),
            None => drop(std::fs::remove_file(path)),
        }
    }
}
