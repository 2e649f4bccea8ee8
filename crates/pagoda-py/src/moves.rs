//! Copies between tiers, zeroing of freed blocks, memory that is given back to the system, and which steps have retired.

use crate::cache::{Engine, Inner, MEMORY_TIERS};
use crate::device::STAGE;
use crate::disk::Disk;
use crate::errors::{self, core};
use crate::kernels::Cpu;
use crate::patience;
use numpy::PyArray1;
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{BlockId, Epoch, GroupId, KeptId, SequenceId, Tier};
use pagoda_core::plan::BlockCopy;
use pagoda_store::{Place, Slab, Transfer};
use pyo3::prelude::*;
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

/// A function that copies between a device and host memory, and waits. It gets `[from, to, bytes]` of each copy, and must not
/// call the cache. None on the CPU.
pub(crate) type Link<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// What copies need until they have ended.
#[derive(Clone, Copy, Default)]
pub(crate) struct Held {
    pub(crate) sequence: Option<SequenceId>,
    pub(crate) kept: Option<KeptId>,
    /// What they read from. Its key keeps it or, if it is forgotten meanwhile, `kept`.
    pub(crate) source: Option<KeptId>,
}

/// Copies whose call has given up waiting.
pub(crate) struct Late {
    completion: Completion,
    /// For copies of a step: the last step that had been closed when they began. No later step retires before they have
    /// ended, so that blocks meant for their step drain until then.
    since: Option<Epoch>,
    pub(crate) held: Held,
}

/// Why copies have not arrived.
pub(crate) enum Unmade {
    /// The copy of a page failed: why, its layer group, and the block that was to be read.
    Failed(Failure, GroupId, (Tier, BlockId)),
    /// The wait was given up; the copies go on.
    Late(Completion, PyErr),
    /// Another error came first.
    Stopped(PyErr),
}

impl Unmade {
    pub(crate) fn raise(self, py: Python<'_>, core: &pagoda_core::Cache) -> PyErr {
        match self {
            Self::Failed(failure, group, from) => errors::failure(py, &failure, &core.holders(group, from)),
            Self::Late(_, error) | Self::Stopped(error) => error,
        }
    }
}

impl From<PyErr> for Unmade {
    fn from(error: PyErr) -> Self {
        Self::Stopped(error)
    }
}

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

    /// Makes copies, some of them to or from disk, and waits for them. If they do not arrive, `held` is let go of once they
    /// have ended.
    pub(crate) fn copy_now(
        &mut self,
        py: Python<'_>,
        copies: &[BlockCopy],
        held: Held,
        link: Link<'_, '_>,
    ) -> Result<(), Unmade> {
        let made = self.try_copies(py, copies, link);
        if let Err(Unmade::Late(completion, _)) = &made {
            let since = held.sequence.is_none().then_some(self.closed);
            self.late.push(Late { completion: completion.clone(), since, held });
            return made;
        }
        self.zero_stage();
        if made.is_err() {
            self.let_go(held).map_err(|error| core(py, &error))?;
        }
        made
    }

    fn try_copies(&self, py: Python<'_>, copies: &[BlockCopy], link: Link<'_, '_>) -> Result<(), Unmade> {
        let (Engine::Device(device), Some(link)) = (&self.engine, link) else {
            return self.move_now(py, copies, copies.iter().map(|copy| self.transfer(copy)).collect());
        };
        // Late copies go through the same part of the stage.
        for Late { completion, .. } in &self.late {
            self.wait_for_disk(py, completion)?;
        }
        for alike in copies.chunk_by(|a, b| a.bytes == b.bytes) {
            let fitting = (device.stage_part / alike[0].bytes).max(1) as usize;
            for part in alike.chunks(fitting) {
                let (mut down, mut up, mut transfers) = (Vec::new(), Vec::new(), Vec::new());
                for (copy, at) in part.iter().zip((0..).map(|number| number * alike[0].bytes)) {
                    let &BlockCopy { group, from, to, bytes } = copy;
                    if from.0 == Tier::Device {
                        down.extend([self.address(group, from), device.stage + at, bytes]);
                    }
                    if to.0 == Tier::Device {
                        up.extend([device.stage + at, self.address(group, to), bytes]);
                    }
                    transfers.push(self.staged(copy, at));
                }
                if !down.is_empty() {
                    link.call1((PyArray1::from_vec(py, down),))?;
                }
                self.move_now(py, part, transfers)?;
                if !up.is_empty() {
                    link.call1((PyArray1::from_vec(py, up),))?;
                }
            }
        }
        Ok(())
    }

    /// The transfer of a copy, with the stage at offset `at` in place of the side that is on a device.
    pub(crate) fn staged(&self, copy: &BlockCopy, at: u64) -> Transfer {
        let Transfer { from, to, bytes } = self.transfer(copy);
        let staged = |place, tier| match tier {
            Tier::Device => Place::Slab { slab: STAGE, offset: at },
            _ => place,
        };
        Transfer { from: staged(from, copy.from.0), to: staged(to, copy.to.0), bytes }
    }

    /// Makes the transfers of some copies, in memory, to disk and from disk, and waits.
    fn move_now(&self, py: Python<'_>, copies: &[BlockCopy], transfers: Vec<Transfer>) -> Result<(), Unmade> {
        let completion = Completion::new();
        // SAFETY: the core has given the targets to whoever asked for these copies, and they are held until these have ended;
        // sources are Ready, or open pages that are held, so that they are copied before anybody appends to them.
        unsafe { self.mover.send(transfers, completion.clone()) };
        if let Err(error) = self.wait_for_disk(py, &completion) {
            return Err(Unmade::Late(completion, error));
        }
        let copied = completion.copied().expect("what is waited for has ended");
        let Some(failed) = copies.get(copied as usize) else { return Ok(()) };
        let why = completion.failure().expect("what is waited for fails with a reason");
        Err(Unmade::Failed(why.clone(), failed.group, failed.from))
    }

    /// Sleeps until copies have ended; gives up when the disk has done nothing for `disk_timeout`.
    fn wait_for_disk(&self, py: Python<'_>, completion: &Completion) -> PyResult<()> {
        let store = self.store().expect("nothing is on disk without one");
        let (waiter, limit) = (self.mover.waiter(), self.disk_timeout());
        py.detach(|| patience::wait(&waiter, completion, store, limit)).map_err(|stop| stop.raise(py))
    }

    /// How long calls wait for the disk.
    pub(crate) fn disk_timeout(&self) -> Duration {
        self.disk.as_ref().map_or(Duration::ZERO, |disk| disk.reads.timeout())
    }

    pub(crate) fn let_go(&mut self, Held { sequence, kept, .. }: Held) -> pagoda_core::Result<()> {
        if let Some(kept) = kept {
            self.forget_kept(kept);
        }
        sequence.map_or(Ok(()), |sequence| self.core.release(sequence))
    }

    /// Lets go of a kept sequence, once no late copies read from its blocks.
    pub(crate) fn forget_kept(&mut self, kept: KeptId) {
        match self.late.iter_mut().find(|late| late.held.source == Some(kept)) {
            Some(reader) => reader.held.kept = Some(kept),
            None => self.core.forget(kept),
        }
    }

    /// Lets go of what late copies needed, once they have ended.
    fn end_late(&mut self) -> pagoda_core::Result<()> {
        let ended = self.late.extract_if(.., |late| late.completion.copied().is_some());
        for Late { held, .. } in ended.collect::<Vec<_>>() {
            self.zero_stage();
            self.let_go(held)?;
        }
        self.end_changes();
        Ok(())
    }

    /// Makes the copies of shared open pages that come before the open step's first append; on a device only those from disk.
    pub(crate) fn copy_shared(&mut self, py: Python<'_>, link: Link<'_, '_>) -> Result<(), Unmade> {
        // A truncated page may be on disk: it went there when it was full.
        let copies = self.core.step_copies().iter().copied();
        let (from_disk, others): (Vec<_>, Vec<_>) = copies.partition(|copy| copy.from.0 == Tier::Disk);
        if !from_disk.is_empty() {
            self.copy_now(py, &from_disk, Held::default(), link)?;
        }
        if let Engine::Device(_) = self.engine {
            return Ok(());
        }
        for copy in &others {
            // SAFETY: the source is Ready, so nobody writes it, and the target is this step's alone.
            unsafe { self.mover.copy_now(&self.transfer(copy)) };
        }
        Ok(())
    }

    /// With `zero_on_free`, zeroes the part of the stage that copies pass through when a call waits for them.
    fn zero_stage(&self) {
        if let (Engine::Device(device), Some(store)) = (&self.engine, self.store())
            && store.zeroes()
            && self.late.iter().all(|late| late.completion.copied().is_some())
        {
            // SAFETY: this part of the stage is for copies that are waited for, all of which have ended.
            unsafe {
                Slab::lent(device.stage as usize, device.stage_part as usize).zero(0..device.stage_part)
            };
        }
    }

    /// With `zero_on_free`, zeroes freed blocks, which are not handed out before that.
    pub(crate) fn zero(&mut self, py: Python<'_>) -> PyResult<()> {
        let Self { core, disk, block_bytes, engine, .. } = self;
        let Engine::Cpu(Cpu { slabs, .. }) = engine else { return Ok(()) };
        let clear = |tier: Tier, range| {
            // SAFETY: the core says that nobody can touch these blocks any more.
            unsafe { slabs[tier.index()].zero(range) };
            true
        };
        zero_by(py, core, disk, block_bytes, clear).map(drop)
    }

    /// Zeroes freed blocks, and gives memory without blocks back to the system.
    pub(crate) fn trim(&mut self, py: Python<'_>) -> PyResult<()> {
        self.zero(py)?;
        // If the system refuses, memory or space is not given back, which is no error.
        if let Engine::Cpu(Cpu { slabs, .. }) = &self.engine {
            for tier in MEMORY_TIERS {
                for range in self.core.reclaim(tier) {
                    // SAFETY: the core says that no block lies here, so nobody reads or writes it.
                    let _ = unsafe { slabs[tier.index()].give_back(range) };
                }
            }
        }
        if self.disk.is_some() {
            self.core.reclaim(Tier::Disk).for_each(|range| self.mover.discard(range));
        }
        Ok(())
    }

    /// Notes that a step was closed. The CPU's kernels have ended when their calls return; those of a device go on.
    pub(crate) fn end_step(&mut self, py: Python<'_>, closed: Epoch) -> PyResult<()> {
        self.closed = closed;
        if let Engine::Cpu(_) = self.engine {
            self.retire(closed).map_err(|error| core(py, &error))?;
        }
        self.trim(py)
    }

    /// The kernels of a step and of all before it have ended. The step retires once the reads that began in it have too.
    pub(crate) fn retire(&mut self, ended: Epoch) -> pagoda_core::Result<()> {
        let read = self.disk.as_ref().and_then(|disk| disk.reads.since());
        let since = self.late.iter().filter_map(|late| late.since).chain(read).min();
        let retired = since.map_or(ended, |since| since.min(ended));
        self.core.retire(retired)?;
        (self.ended, self.retired) = (ended, retired);
        Ok(())
    }

    /// Retires steps whose reads have ended since, and finishes late copies.
    pub(crate) fn settle(&mut self) -> pagoda_core::Result<()> {
        self.end_late()?;
        if self.retired < self.ended { self.retire(self.ended) } else { Ok(()) }
    }

    /// Waits for reads that blocks may be draining for.
    pub(crate) fn finish_reads(&mut self, py: Python<'_>) -> PyResult<()> {
        let Self { disk: Some(disk), mover, .. } = self else { return Ok(()) };
        py.detach(|| disk.reads.finish(mover)).map_err(|stop| stop.raise(py))?;
        self.settle().map_err(|error| core(py, &error))?;
        self.zero(py)
    }

    /// Addresses and bytes of copies: `[from, to, bytes]` of each.
    pub(crate) fn addresses(&self, copies: &[BlockCopy]) -> Vec<u64> {
        let address = |copy: &BlockCopy, side| self.address(copy.group, side);
        copies
            .iter()
            .flat_map(|copy| [address(copy, copy.from), address(copy, copy.to), copy.bytes])
            .collect()
    }

    /// The address of a block; 0 for one on disk.
    fn address(&self, group: GroupId, (tier, block): (Tier, BlockId)) -> u64 {
        if tier == Tier::Disk {
            return 0;
        }
        self.arenas.base[tier.index()] as u64 + u64::from(block.index()) * self.block_bytes[group.index()]
    }
}

/// Zeroes freed blocks. `clear` gets those in memory, as byte ranges of a tier, and returns whether they are zeroed by now.
/// Those on disk are zeroed here, with what was read ahead of them; returns whether there were any.
pub(crate) fn zero_by(
    py: Python<'_>,
    core: &mut pagoda_core::Cache,
    disk: &mut Option<Box<Disk>>,
    block_bytes: &[u64],
    mut clear: impl FnMut(Tier, Range<u64>) -> bool,
) -> PyResult<bool> {
    let mut on_disk = Vec::new();
    core.zero(|tier, group, blocks| {
        if tier == Tier::Disk {
            on_disk.push((group, blocks));
            return false;
        }
        clear(tier, bytes_of(block_bytes, group, &blocks))
    });
    let Some(disk) = disk else { return Ok(false) };
    let zeroed = if on_disk.is_empty() { HashSet::new() } else { disk.zero(py, on_disk)? };
    if !zeroed.is_empty() {
        core.zero(|tier, group, blocks| tier == Tier::Disk && zeroed.contains(&(group, blocks)));
    }
    disk.reads.forget_gone();
    Ok(!zeroed.is_empty())
}

/// Where blocks of a group lie in the arena of a tier.
pub(crate) fn bytes_of(block_bytes: &[u64], group: GroupId, blocks: &Range<u32>) -> Range<u64> {
    let at = |block| u64::from(block) * block_bytes[group.index()];
    at(blocks.start)..at(blocks.end)
}
