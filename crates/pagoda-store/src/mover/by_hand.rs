//! A mover without threads: reads from disk wait until the caller carries them out, in any order and at any time. For simulations,
//! in which a seed decides when.

use super::{LayerOfPages, Mover, Part, Work, read_layer};
use crate::disk::{Error, Lane, Store};
use crate::{Ring, lock};
use pagoda_core::ids::{BlockId, Epoch, GroupId};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// Reads that wait.
pub struct ByHand {
    mover: Mover,
    inbox: Receiver<Part>,
    waiting: Vec<Waiting>,
}

/// A part of a read. Dropping it is what the end of a process does to it.
pub struct Waiting(Part);

impl ByHand {
    /// Over a store; `part_bytes` of a layer at most are read at once.
    pub fn new(store: &Arc<Store>, part_bytes: u64) -> Self {
        let mut mover = Mover::without_threads(Vec::new(), Some(store), part_bytes);
        let (disk, inbox) = channel();
        mover.disk = Some(disk);
        Self { mover, inbox, waiting: Vec::new() }
    }

    /// As [`Ring::read_ahead`]; blocks that are written to before their reads are carried out come with other bytes.
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

    /// Parts that wait.
    pub fn count(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a part that waits is of this block.
    pub fn reads(&self, group: GroupId, block: BlockId) -> bool {
        self.waiting.iter().any(|Waiting(part)| {
            let Work::Layer(what, ..) = &part.work else { unreachable!("only reads are sent") };
            what.group == group && what.blocks.contains(&block)
        })
    }

    /// One of the parts that wait, to be carried out now.
    pub fn take(&mut self, at: usize) -> Waiting {
        self.waiting.swap_remove(at)
    }

    /// Says of all reads that they have ended, which they have not: for a negative control.
    pub fn pretend(&self) {
        for Waiting(part) in &self.waiting {
            let state = lock(&part.job.state);
            part.job.completion.finish(state.copied as u32);
        }
    }
}

impl Waiting {
    /// Reads it.
    pub fn read(&mut self, lane: &mut Lane) -> Result<(), Error> {
        let Work::Layer(what, slab, offset) = &self.0.work else { unreachable!("only reads are sent") };
        read_layer(lane, what, slab, *offset)
    }

    /// Says how that went.
    pub fn end(self, result: Result<(), Error>) {
        self.0.end(result);
    }
}
