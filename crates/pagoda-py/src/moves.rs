//! What moves between tiers, what is zeroed and given back, and which steps have retired.

use crate::cache::{Engine, Inner, MEMORY_TIERS};
use crate::errors::{self, core};
use crate::kernels::Cpu;
use pagoda_core::fence::Completion;
use pagoda_core::ids::{BlockId, Epoch, GroupId, Tier};
use pagoda_core::plan::BlockCopy;
use pagoda_store::{Place, Transfer};
use pyo3::prelude::*;
use std::time::Duration;

impl Inner {
    fn place(&self, group: GroupId, (tier, block): (Tier, BlockId)) -> Place {
        if tier == Tier::Disk {
            return Place::Disk { group, block };
        }
        Place::Slab { slab: tier.index(), offset: u64::from(block.index()) * self.block_bytes[group.index()] }
    }

    pub(crate) fn transfer(&self, copy: &BlockCopy) -> Transfer {
        let (from, to) = (self.place(copy.group, copy.from), self.place(copy.group, copy.to));
        Transfer { from, to, bytes: copy.bytes }
    }

    /// Makes copies, some of which may be of the disk, and waits for them.
    pub(crate) fn copy_now(&self, py: Python<'_>, copies: &[BlockCopy]) -> PyResult<()> {
        let transfers: Vec<_> = copies.iter().map(|copy| self.transfer(copy)).collect();
        let (completion, waiter) = (Completion::new(), self.mover.waiter());
        // SAFETY: the core has given the targets to whoever asked for these copies, who holds the lock until they are made;
        // sources are Ready or open pages of no step.
        unsafe { self.mover.send(transfers, completion.clone()) };
        py.detach(|| while !waiter.wait(&completion, Duration::from_secs(60)) {});
        if completion.copied() == Some(copies.len() as u32) {
            return Ok(());
        }
        Err(errors::failure(py, completion.failure()))
    }

    /// Makes the copies of shared open pages that come before the open step's first append.
    pub(crate) fn copy_shared(&self, py: Python<'_>) -> PyResult<()> {
        let Engine::Cpu(_) = &self.engine else { return Ok(()) };
        let copies = self.core.step_copies();
        // A part of a page that was full went to disk with it.
        if copies.iter().any(|copy| copy.from.0 == Tier::Disk) {
            return self.copy_now(py, copies);
        }
        for copy in copies {
            // SAFETY: the source is Ready, so nobody writes it, and the target is this step's alone.
            unsafe { self.mover.copy_now(&self.transfer(copy)) };
        }
        Ok(())
    }

    /// Zeroes freed blocks, where that is asked for: until then they are not handed out.
    pub(crate) fn zero(&mut self) {
        let Self { core, disk, block_bytes, engine, .. } = self;
        let Engine::Cpu(Cpu { slabs, .. }) = engine else { return };
        core.zero(|tier, group, blocks| {
            if tier == Tier::Disk {
                return disk.as_ref().is_some_and(|disk| disk.store.zero(group, blocks).is_ok());
            }
            let at = |block| u64::from(block) * block_bytes[group.index()];
            // SAFETY: the core says that nobody can touch these blocks any more.
            unsafe { slabs[tier.index()].zero(at(blocks.start)..at(blocks.end)) };
            true
        });
    }

    /// Zeroes what is to be, and gives memory without blocks back to the system.
    pub(crate) fn trim(&mut self) {
        self.zero();
        // A refusal leaves the memory, or the space, where it is, which is no error.
        if let Engine::Cpu(Cpu { slabs, .. }) = &self.engine {
            for tier in MEMORY_TIERS {
                for range in self.core.reclaim(tier) {
                    // SAFETY: the core says that no block lies here, so nobody reads or writes it.
                    let _ = unsafe { slabs[tier.index()].give_back(range) };
                }
            }
        }
        if let Some(disk) = &self.disk {
            self.core.reclaim(Tier::Disk).for_each(|range| drop(disk.store.discard(range)));
        }
    }

    /// A step was closed. The CPU's kernels have ended when their calls return; those of a device go on.
    pub(crate) fn end_step(&mut self, closed: Epoch) -> pagoda_core::Result<()> {
        self.closed = closed;
        match &mut self.engine {
            Engine::Cpu(_) => self.retire(closed)?,
            Engine::Device(device) => device.epoch = Some(closed),
        }
        self.trim();
        Ok(())
    }

    /// The kernels of a step, and of all before it, have ended. The step retires when the reads have too that began in it.
    pub(crate) fn retire(&mut self, ended: Epoch) -> pagoda_core::Result<()> {
        let since = self.disk.as_ref().and_then(|disk| disk.reads.since());
        let retired = since.map_or(ended, |since| since.min(ended));
        self.core.retire(retired)?;
        (self.ended, self.retired) = (ended, retired);
        Ok(())
    }

    /// Retires steps whose reads have ended since.
    pub(crate) fn settle(&mut self) -> pagoda_core::Result<()> {
        if self.retired < self.ended { self.retire(self.ended) } else { Ok(()) }
    }

    /// Waits for reads that blocks may drain for; says whether there were any.
    pub(crate) fn finish_reads(&mut self, py: Python<'_>) -> PyResult<bool> {
        let Self { disk: Some(disk), mover, .. } = self else { return Ok(false) };
        let waited = py.detach(|| disk.reads.finish(mover)).map_err(|stop| stop.raise(py))?;
        self.settle().map_err(|error| core(py, &error))?;
        self.zero();
        Ok(waited)
    }

    /// Addresses and bytes of copies: `[from, to, bytes]` of each.
    pub(crate) fn addresses(&self, copies: &[BlockCopy]) -> Vec<u64> {
        copies
            .iter()
            .flat_map(|copy| {
                let at = |(tier, block): (Tier, BlockId)| {
                    self.arenas.base[tier.index()] as u64
                        + u64::from(block.index()) * self.block_bytes[copy.group.index()]
                };
                [at(copy.from), at(copy.to), copy.bytes]
            })
            .collect()
    }
}
