//! What a block waits for before it may be used again: the copies that touch it, and the steps that may read it.

use crate::cache::Cache;
use crate::ids::{BlockId, Epoch, GroupId, Tier};
use crate::sync::{Arc, AtomicU64, Ordering};
use std::collections::VecDeque;
use std::sync::OnceLock;

const PENDING: u64 = u64::MAX;

/// The one word through which a copying thread tells the core that it is done.
///
/// The thread writes the bytes, then finishes the completion; the core checks the completion, then hands the bytes out. The
/// store is a release and the load an acquire: whoever sees the flag also sees the bytes, or the reason for a failure.
#[derive(Clone, Debug)]
pub struct Completion(Arc<Outcome>);

#[derive(Debug)]
struct Outcome {
    copied: AtomicU64,
    failure: OnceLock<Failure>,
}

/// Why a copy did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The link or the drive refused; a later attempt may succeed.
    Io(String),
    /// The bytes differ from what was stored.
    Corrupt(String),
}

impl Completion {
    /// A completion that has not finished.
    pub fn new() -> Self {
        Self(Arc::new(Outcome { copied: AtomicU64::new(PENDING), failure: OnceLock::new() }))
    }

    /// Says that the first `copied` copies of the plan arrived and no other will.
    pub fn finish(&self, copied: u32) {
        self.0.copied.store(u64::from(copied), Ordering::Release);
    }

    /// As `finish`, with the reason why not all arrived.
    pub fn fail(&self, copied: u32, failure: Failure) {
        // There is only one call; of several the first would win.
        let _ = self.0.failure.set(failure);
        self.finish(copied);
    }

    /// Whether somebody else holds it too.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// What the copying thread said about a failure; call `copied` first.
    pub fn failure(&self) -> Option<&Failure> {
        self.0.failure.get()
    }

    /// How many copies arrived, once no other will.
    pub fn copied(&self) -> Option<u32> {
        match self.0.copied.load(Ordering::Acquire) {
            PENDING => None,
            copied => Some(copied as u32),
        }
    }
}

impl Default for Completion {
    fn default() -> Self {
        Self::new()
    }
}

/// The order of steps, and the blocks that wait for one to retire.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    minted: Epoch,
    retired: Epoch,
    draining: VecDeque<Draining>,
    drained: u64,
}

/// A block that belongs to no page any more but may still be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draining {
    pub(crate) epoch: Epoch,
    pub(crate) tier: Tier,
    pub(crate) group: GroupId,
    pub(crate) block: BlockId,
}

impl Epochs {
    /// A new epoch, to be retired once the work of all steps so far has ended.
    pub(crate) fn mint(&mut self) -> Epoch {
        self.minted.0 += 1;
        self.minted
    }

    pub(crate) fn minted(&self) -> Epoch {
        self.minted
    }

    /// Whether issued work may still touch memory.
    pub(crate) fn pending(&self) -> bool {
        self.retired < self.minted
    }

    /// Keeps a block until every epoch minted so far has retired.
    pub(crate) fn drain(&mut self, tier: Tier, group: GroupId, block: BlockId) {
        self.draining.push_back(Draining { epoch: self.minted, tier, group, block });
    }

    /// Marks `epoch` and all before it as retired.
    pub(crate) fn retire(&mut self, epoch: Epoch) {
        self.retired = self.retired.max(epoch);
    }

    /// The next block whose epoch has retired.
    pub(crate) fn pop_retired(&mut self) -> Option<Draining> {
        let block = self.draining.pop_front_if(|d| d.epoch <= self.retired)?;
        self.drained += 1;
        Some(block)
    }

    /// How many blocks have waited until their epoch retired, so far.
    pub(crate) fn drained(&self) -> u64 {
        self.drained
    }

    /// Blocks still waiting.
    pub(crate) fn draining(&self) -> impl Iterator<Item = &Draining> {
        self.draining.iter()
    }
}

/// The fences that keep a block from being reused too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// A freed block waits for the steps that may read it.
    Epochs,
    /// A released page waits for the copies that touch it.
    Copies,
    /// Pages do not move while a step uses its tables.
    Step,
    /// A page is not read from a block that a copy is still writing.
    Completion,
    /// A page stays while it is in the window of a future query.
    Window,
    /// A freed block waits until it has been zeroed, in caches that ask for it.
    Zeros,
}

impl Cache {
    #[cfg(not(feature = "broken-fences"))]
    pub(crate) fn keeps(&self, _: Fence) -> bool {
        true
    }

    #[cfg(feature = "broken-fences")]
    pub(crate) fn keeps(&self, fence: Fence) -> bool {
        self.broken != Some(fence)
    }

    /// Removes a fence, to show that a test notices.
    #[cfg(feature = "broken-fences")]
    pub fn break_fence(&mut self, fence: Fence) {
        self.broken = Some(fence);
    }
}
