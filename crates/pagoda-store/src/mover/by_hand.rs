//! A mover without threads: reads from disk wait until the caller carries them out, in any order and at any time. For
//! simulations in which a seed decides when.

use super::{LayerOfPages, Mover, Part, Work, read_layer};
use crate::disk::{Error, Lane, Store};
use crate::{Ring, lock};
use pagoda_core::ids::{BlockId, Epoch, GroupId};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// Reads that wait to be carried out.
pub struct ByHand {
    mover: Mover,
    inbox: Receiver<Part>,
    waiting: Vec<Waiting>,
}

/// A part of a read. If it is dropped, it ends as if its process had ended.
pub struct Waiting(Part);

impl ByHand {
    /// A mover over a store; at most `part_bytes` of a layer are read at once.
    pub fn new(store: &Arc<Store>, part_bytes: u64) -> Self {
        let mut mover = Mover::without_threads(Vec::new(), Some(store), part_bytes);
        let (disk, inbox) = channel();
        mover.disk = Some(disk);
        Self { mover, inbox, waiting: Vec::new() }
    }

    /// Like [`Ring::read_ahead`]. If a block is written to before its read is carried out, the read gets other bytes.
    pub fn read_ahead<'a>(
        &mut self,
        ring: &mut Ring,
        what: impl Iterator<Item = &'a LayerOfPages>,
        since: Epoch,
    ) {
        // SAFETY: nothing is read but when `Waiting::read` is called, and where that finds other pages it hands out none.
        unsafe { ring.read_ahead(&self.mover, what, since) };
        self.waiting.extend(self.inbox.try_iter().map(Waiting));
    }

    /// How many parts wait.
    pub fn count(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a waiting part reads this block.
    pub fn reads(&self, group: GroupId, block: BlockId) -> bool {
        self.waiting.iter().any(|Waiting(part)| {
            let Work::Layer(what, ..) = &part.work else { unreachable!("only reads are sent") };
            what.group == group && what.blocks.contains(&block)
        })
    }

    /// Takes one of the waiting parts, to be carried out now.
    pub fn take(&mut self, at: usize) -> Waiting {
        self.waiting.swap_remove(at)
    }

    /// Reports all reads as ended although they have not: a negative control.
    pub fn pretend(&self) {
        for Waiting(part) in &self.waiting {
            let state = lock(&part.job.state);
            part.job.completion.finish(state.copied as u32);
        }
    }
}

impl Waiting {
    /// Carries it out.
    pub fn read(&mut self, lane: &mut Lane) -> Result<(), Error> {
        let Work::Layer(what, slab, offset) = &self.0.work else { unreachable!("only reads are sent") };
        read_layer(lane, what, slab, *offset)
    }

    /// Reports how that went.
    pub fn end(self, result: Result<(), Error>) {
        self.0.end(result);
    }
}
