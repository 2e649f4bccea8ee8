//! Steps that attend to pages on disk, which pass through the ring. Their reads are carried out late, in pieces and in any
//! order, and continue whatever becomes of the step.

use crate::Missing;
use crate::machine::{Machine, Outcome, ensure};
use crate::memory::Place;
use crate::random::Random;
use pagoda_core::Cache;
use pagoda_core::fence::Failure;
use pagoda_core::ids::{BlockId, Epoch, GroupId, SequenceId, Tier};
use pagoda_store::by_hand::ByHand;
use pagoda_store::disk::Store;
use pagoda_store::disk::io::ALIGN;
use pagoda_store::{Filled, LayerOfPages, Ring, Slab, Unread};
use std::sync::Arc;

/// The ring of a cache, and what the open step has to read through it.
pub(crate) struct Streaming {
    ring: Ring,
    pub(crate) reads: ByHand,
    /// Pages that fit a slot.
    pages: usize,
    /// The passes of the open step, in the order in which they are usually processed.
    passes: Vec<Pass>,
    /// The next pass to process.
    next: usize,
    /// Slots that something still reads, as a device may after its step has ended.
    held: Vec<(Filled, Pass)>,
}

/// One layer of some pages of a sequence.
#[derive(Clone)]
struct Pass {
    sequence: SequenceId,
    what: LayerOfPages,
    /// Page, row and token of each row that must be there.
    rows: Vec<(usize, usize, u64)>,
}

/// The result of one pass.
#[derive(PartialEq, Eq)]
enum Passed {
    Over,
    /// What it needs has not been read yet.
    Waits,
    /// There are no more passes, or the step had to be rolled back.
    End,
}

impl Streaming {
    pub(crate) fn new(store: &Arc<Store>, random: &mut Random) -> Self {
        let pages = random.within(1..5);
        let slot_bytes = pages as u64 * store.geometry().stored_run_max();
        let slab = Slab::new(random.within(1..16) * slot_bytes as usize).expect("memory for some pages");
        let ring = Ring::over(store, slab, slot_bytes);
        let reads = ByHand::new(store, ALIGN * random.within(1..4) as u64);
        Self { ring, reads, pages, passes: Vec::new(), next: 0, held: Vec::new() }
    }

    /// Lists what the newly opened step has to read of a sequence in one group: places, rows and tokens in their order.
    pub(crate) fn list(&mut self, sequence: SequenceId, layers: usize, on_disk: &[(Place, usize, u64)]) {
        let pages: Vec<_> = on_disk.chunk_by(|(a, ..), (b, ..)| a == b).collect();
        for layer in 0..layers {
            for run in pages.chunks(self.pages) {
                let (_, group, _) = run[0][0].0;
                let blocks = run.iter().map(|page| page[0].0.2).collect();
                let rows = run.iter().enumerate();
                let rows =
                    rows.flat_map(|(at, page)| page.iter().map(move |&(_, row, token)| (at, row, token)));
                let what = LayerOfPages { group, layer, blocks };
                self.passes.push(Pass { sequence, what, rows: rows.collect() });
            }
        }
    }

    /// Drops what was read ahead of pages that are gone, in a store that zeroes.
    pub(crate) fn forget_gone(&mut self) {
        self.ring.forget_gone();
    }

    /// The step has ended.
    pub(crate) fn leave(&mut self) {
        self.passes.clear();
        self.next = 0;
    }

    /// Begins the reads for the passes from the next one on and, after the last one, for those from the first one on.
    fn read_ahead(&mut self, since: Epoch) {
        let Self { ring, reads, passes, next, .. } = self;
        let (before, after) = passes.split_at(*next);
        reads.read_ahead(ring, after.iter().chain(before).map(|pass| &pass.what), since);
    }
}

impl Machine {
    /// The epoch that can retire once everything up to `epoch` has, except for reads ahead and late copies.
    pub(crate) fn retirable(&self, epoch: u64) -> Epoch {
        let read = self.streaming.ring.since().filter(|_| self.missing != Some(Missing::FenceOfReads));
        let late = self.late.iter().filter_map(|late| late.since);
        let late = late.filter(|_| self.missing != Some(Missing::FenceOfLateCopies));
        read.into_iter().chain(late).fold(Epoch(epoch), Epoch::min)
    }

    /// Processes some of what the open step has to read, as far as it has arrived; now and then out of order.
    pub(crate) fn attend_a_little(&mut self) -> Outcome {
        if self.random.once_in(8) {
            self.streaming.next = self.random.below(self.streaming.passes.len() + 1);
        }
        for _ in 0..self.random.within(1..8) {
            if self.pass()? != Passed::Over {
                break;
            }
        }
        Ok(())
    }

    /// Processes everything that the open step has to read and waits for it, or gives up; returns whether the step is still
    /// open.
    pub(crate) fn attend(&mut self) -> Outcome<bool> {
        let patience = if self.random.once_in(4) { self.random.below(8) } else { usize::MAX };
        let mut waited = 0;
        while self.steps() {
            match self.pass()? {
                Passed::Over => {}
                Passed::End => break,
                Passed::Waits if waited == patience => {
                    self.tally.see("streamed: steps that gave up", 1);
                    self.give_up()?;
                }
                Passed::Waits if self.streaming.reads.count() > 0 => self.read_a_little()?,
                Passed::Waits => {
                    ensure!(!self.streaming.held.is_empty(), "a step waits, and nothing is under way");
                    self.release_slot()?;
                }
            }
            waited += 1;
        }
        Ok(self.steps())
    }

    /// Checks what the next pass needs, if it has arrived: every word of every row.
    fn pass(&mut self) -> Outcome<Passed> {
        let at = self.streaming.next;
        if at == self.streaming.passes.len() {
            return Ok(Passed::End);
        }
        self.read_ahead();
        if self.streaming.ring.next().is_none_or(|read| read.copied().is_none()) {
            return Ok(Passed::Waits);
        }
        match self.streaming.ring.take() {
            Ok(filled) => {
                let pass = self.streaming.passes[at].clone();
                self.check_slot(&filled, &pass)?;
                self.streaming.held.push((filled, pass));
                if !self.random.once_in(4) {
                    self.release_slot()?;
                }
                self.streaming.next += 1;
                self.read_ahead();
                Ok(Passed::Over)
            }
            Err(Unread { group, block, failure }) => {
                self.tally.see("refused: steps whose pages cannot be read", 1);
                let (reading, holders) =
                    (self.streaming.passes[at].sequence, self.cache.holders(group, (Tier::Disk, block)));
                ensure!(
                    holders.contains(&reading),
                    "{reading} is not of {holders:?} with {block:?} of {group:?}"
                );
                if let Failure::Corrupt(_) = failure {
                    self.doomed.extend(holders);
                }
                if self.random.once_in(4) {
                    self.tally.see("streamed: passes that were tried again", 1);
                    return Ok(Passed::Over);
                }
                self.give_up()?;
                Ok(Passed::End)
            }
        }
    }

    /// Gives one of the slots back that were held, which still has what was read into it.
    fn release_slot(&mut self) -> Outcome {
        let at = self.random.below(self.streaming.held.len());
        let (filled, pass) = self.streaming.held.swap_remove(at);
        self.check_slot(&filled, &pass)?;
        self.streaming.ring.release(filled);
        Ok(())
    }

    /// Gives all slots back that were held.
    pub(crate) fn release_slots(&mut self) -> Outcome {
        while !self.streaming.held.is_empty() {
            self.release_slot()?;
        }
        Ok(())
    }

    /// Compares every word of every row of a slot.
    fn check_slot(&mut self, filled: &Filled, Pass { what, rows, .. }: &Pass) -> Outcome {
        let shape = self.shape.group(what.group);
        for &(page, row, token) in rows {
            let right = shape.run_holds(self.streaming.ring.page(filled, page), what.layer, row, token);
            ensure!(right, "row {row} of page {page} of {what:?} in the ring is not that of token {token}");
        }
        self.tally.see("checked: rows in the ring", rows.len() as u64);
        Ok(())
    }

    fn give_up(&mut self) -> Outcome {
        self.forget_step();
        self.end(Cache::rollback)
    }

    fn read_ahead(&mut self) {
        // As long as the step stays the same, nothing checks whether pages have changed.
        let generations = self.missing != Some(Missing::Generations);
        self.streaming.read_ahead(Epoch(if generations { self.minted } else { 0 }));
        if self.missing == Some(Missing::EndOfReads) {
            self.streaming.reads.pretend();
        }
    }

    /// Carries out one of the reads under way.
    pub(crate) fn read_a_little(&mut self) -> Outcome {
        let count = self.streaming.reads.count();
        if count > 0 {
            let mut part = self.streaming.reads.take(self.random.below(count));
            let result = part.read(&mut self.drive.lane);
            part.end(self.judge(result)?);
            self.tally.see("streamed: parts of reads", 1);
        }
        Ok(())
    }

    /// Nothing that is written to may be under a read.
    pub(crate) fn require_unread(&self, group: GroupId, block: BlockId) -> Outcome {
        let mut late = self.late.iter().flat_map(|late| &late.copies);
        ensure!(
            !self.streaming.reads.reads(group, block)
                && !late.any(|copy| (copy.group, copy.from) == (group, (Tier::Disk, block))),
            "{block:?} of {group:?} is written to under a read"
        );
        Ok(())
    }
}
