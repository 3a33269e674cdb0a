//! The servers in the agent's care.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::arbiter::Policy;
use crate::engine::Engine;
use crate::{Bytes, InstanceName, MemoryError, Observation};

/// Who says how much a server gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "mode")]
pub enum Mode {
    /// The arbiter.
    Automatic,
    /// Nobody: it is watched and counted, and keeps what it has.
    Watched,
    /// Somebody who set it by hand.
    Pinned {
        /// To this size.
        target_bytes: Bytes,
    },
}

/// One server.
pub(super) struct Member {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) mode: Mode,
    /// The last answer; its `answered` is false when newer questions got none.
    pub(super) observation: Option<Observation>,
    /// Why the last question got no answer.
    pub(super) failure: Option<String>,
    /// Questions without an answer since the last one.
    pub(super) unanswered: u64,
    /// It is there, and has never said what it has.
    pub(super) is_unknown: bool,
    /// A question is under way that no round waits for.
    pub(super) is_asked: bool,
}

/// All servers, and what is the mode of one that comes.
pub(super) struct Members {
    by_name: BTreeMap<InstanceName, Member>,
    mode_of_new: Mode,
}

impl Members {
    pub(super) fn new() -> Members {
        Members { by_name: BTreeMap::new(), mode_of_new: Mode::Automatic }
    }

    pub(super) fn add(&mut self, engine: Arc<dyn Engine>) {
        let name = engine.instance().clone();
        let member = Member {
            engine,
            mode: self.mode_of_new,
            observation: None,
            failure: None,
            unanswered: 0,
            is_unknown: false,
            is_asked: false,
        };
        self.by_name.insert(name, member);
    }

    pub(super) fn remove(&mut self, instance: &InstanceName) -> bool {
        self.by_name.remove(instance).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&InstanceName, &Member)> {
        self.by_name.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Member> {
        self.by_name.values_mut()
    }

    pub(super) fn get(&self, instance: &InstanceName) -> Result<&Member, MemoryError> {
        self.by_name.get(instance).ok_or_else(|| self.no_such(instance))
    }

    pub(super) fn get_mut(&mut self, instance: &InstanceName) -> Result<&mut Member, MemoryError> {
        if !self.by_name.contains_key(instance) {
            return Err(self.no_such(instance));
        }
        Ok(self.by_name.get_mut(instance).expect("looked for above"))
    }

    /// True while a server that comes will be automatic.
    pub(super) fn automatic(&self) -> bool {
        self.mode_of_new == Mode::Automatic
    }

    pub(super) fn set_auto(&mut self, instance: Option<&InstanceName>, on: bool) -> Result<(), MemoryError> {
        if let Some(name) = instance
            && !self.by_name.contains_key(name)
        {
            return Err(self.no_such(name));
        }
        if instance.is_none() {
            self.mode_of_new = if on { Mode::Automatic } else { Mode::Watched };
        }
        for (name, member) in &mut self.by_name {
            if instance.is_none_or(|wanted| wanted == name) {
                member.mode = match (on, member.mode) {
                    (true, _) => Mode::Automatic,
                    (false, Mode::Automatic) => Mode::Watched,
                    (false, held) => held,
                };
            }
        }
        Ok(())
    }

    /// What the servers answered last, in the order of their names; those that never did are not in it.
    pub(super) fn observations(&self) -> Vec<Observation> {
        self.by_name.values().filter_map(|member| member.observation.clone()).collect()
    }

    /// What all of them use or may use until they are asked again.
    pub(super) fn committed_bytes(&self) -> Bytes {
        let known = self.by_name.values().filter_map(|member| member.observation.as_ref());
        known.map(Observation::committed_bytes).fold(0, Bytes::saturating_add)
    }

    /// One of which nobody knows what part of the budget it has.
    pub(super) fn unknown(&self) -> Option<&InstanceName> {
        self.by_name.iter().find(|(_, member)| member.is_unknown).map(|(name, _)| name)
    }

    /// The pool of a server that does not answer is smaller by so much.
    pub(super) fn note_taken(&mut self, instance: &InstanceName, size_bytes: Bytes) {
        let member = self.by_name.get_mut(instance);
        if let Some(seen) = member.and_then(|member| member.observation.as_mut()) {
            seen.pool_bytes = seen.pool_bytes.saturating_sub(size_bytes);
        }
    }

    /// The policy as the arbiter shall see it: who is not automatic is pinned, to what was set or to what it has.
    pub(super) fn pinned_in(&self, policy: &Policy) -> Policy {
        let mut policy = policy.clone();
        for (name, member) in &self.by_name {
            let entry = policy.instances.entry(name.clone()).or_default();
            entry.pinned_bytes = match member.mode {
                Mode::Automatic => None,
                Mode::Watched => member.observation.as_ref().map(|observation| observation.target_bytes),
                Mode::Pinned { target_bytes } => Some(target_bytes),
            };
        }
        policy
    }

    fn no_such(&self, instance: &InstanceName) -> MemoryError {
        let names: Vec<&str> = self.by_name.keys().map(InstanceName::as_str).collect();
        let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        MemoryError::UnknownInstance { name: instance.to_string(), known }
    }
}
