//! Answers kept back: what the guest is told of may have to be safe elsewhere first.
//!
//! A protected machine must not see a write confirmed that its backup could lose. The back end then keeps answers until
//! the epoch they belong to is released. At most a ring's requests are kept: the driver has no more.

use std::collections::VecDeque;

use crate::Epoch;

/// Which answers are kept back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CompletionHold {
    /// None.
    #[default]
    Nothing,
    /// Those of flushes: what was not flushed may be lost by any disk.
    Flushes,
    /// Those of flushes, writes, discards and write-zeroes.
    Changes,
}

/// What a finished request was, as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It changed nothing.
    Other,
    Change,
    Flush,
}

impl CompletionHold {
    pub(super) fn holds(self, kind: Kind) -> bool {
        match self {
            CompletionHold::Nothing => false,
            CompletionHold::Flushes => kind == Kind::Flush,
            CompletionHold::Changes => kind != Kind::Other,
        }
    }
}

/// A ring's answers that are kept back, oldest first.
#[derive(Debug, Default)]
pub(super) struct PendingCompletions(VecDeque<(Epoch, u16, u32)>);

impl PendingCompletions {
    pub(super) fn keep(&mut self, epoch: Epoch, head: u16, length: u32) {
        self.0.push_back((epoch, head, length));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Those of epochs up to this one, or all.
    pub(super) fn let_go(&mut self, upto: Option<Epoch>) -> Vec<(u16, u32)> {
        let free = |epoch: Epoch| upto.is_none_or(|upto| epoch <= upto);
        let count = self.0.iter().take_while(|(epoch, _, _)| free(*epoch)).count();
        self.0.drain(..count).map(|(_, head, length)| (head, length)).collect()
    }
}
