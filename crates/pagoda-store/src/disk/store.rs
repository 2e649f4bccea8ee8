//! The disk tier: which blocks have a page, what is kept under which key, and counts of traffic. lane.rs writes and reads.

use super::budget::Budget;
use super::format::{Fingerprint, Record, first_generation};
use super::hole::{Hole, Holes};
use super::index::{Entry, Index, Recovered};
use super::io::{ALIGN, Access, Directory, File, Pulse};
use super::lane::{Lane, stretches};
use super::segment::{Geometry, Slot};
use super::{Error, Result};
use crate::lock;
use pagoda_core::fence::Failure;
use pagoda_core::ids::{BlockId, GroupId};
use std::collections::HashMap;
use std::iter::once;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

const PAGES: &str = "pages";

/// A store of pages in one directory. Any number of lanes may write and read at once, but only one at a time in each block.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    pub(super) geometry: Geometry,
    pub(super) fingerprint: Fingerprint,
    pub(super) file: Arc<dyn File>,
    access: Access,
    pulse: Arc<Pulse>,
    index: Option<Mutex<Index>>,
    pub(super) pages: Mutex<Pages>,
    pub(super) holes: Holes,
    budget: Option<Mutex<Budget>>,
    /// The generation of the next page that is written.
    pub(super) generation: AtomicU64,
    /// Allows one sync of the pages at a time, so that each knows which earlier ones have failed.
    syncing: Mutex<()>,
    syncs_failed: AtomicU64,
    zeroes: AtomicBool,
    pub(super) bytes_written: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    bytes_cleared: AtomicU64,
    corrupt: AtomicU64,
}

/// Traffic of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes written to the drive, headers and padding included.
    pub bytes_written: u64,
    /// Bytes read from it.
    pub bytes_read: u64,
    /// Bytes of blocks that were zeroed, or whose space was given back, after their pages had gone.
    pub bytes_cleared: u64,
    /// Reads that did not verify.
    pub corrupt: u64,
}

/// The pages that can be read, by where they lie.
pub(super) type Pages = HashMap<(GroupId, BlockId), Page>;

/// A page that can be read.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) generation: u64,
    /// The checksum of its header.
    pub(super) sum: u64,
    /// Checksums of its layers, once its header has been written or read.
    pub(super) layers: Option<Arc<[u64]>>,
    /// How many entries of the index have it.
    pub(super) kept: u32,
    /// How many syncs had failed when its writing began; none once it is safe from a loss of power.
    pub(super) unsynced: Option<u64>,
}

impl Store {
    /// A store that is gone when it is closed.
    pub fn scratch(
        directory: &dyn Directory,
        geometry: Geometry,
        fingerprint: Fingerprint,
        budget: Option<Budget>,
    ) -> Result<Self> {
        let file = directory.scratch().map_err(Error::io("making a file"))?;
        Ok(Self::new(directory, geometry, fingerprint, budget, file, None))
    }

    /// A store that persists: what `put` has kept is there when it is opened again, by one process at a time. If the geometry
    /// has another budget, the store has as many of the existing segments as the budget has room for.
    pub fn open(
        directory: &dyn Directory,
        mut geometry: Geometry,
        fingerprint: Fingerprint,
        budget: Option<Budget>,
    ) -> Result<(Self, Recovered)> {
        let (file, directory) = directory.lock(PAGES).map_err(|source| match source.kind() {
            std::io::ErrorKind::WouldBlock => Error::Locked,
            _ => Error::Io { operation: "opening the pages", source },
        })?;
        let directory = &*directory;
        let bytes = file.size().map_err(Error::io("opening the pages"))?;
        let (index, recovered) = Index::open(directory, &fingerprint, &mut geometry, bytes)?;
        let budget = budget.map(|budget| budget.noted_in(directory)).transpose();
        let budget = budget.map_err(Error::io("reading what was written"))?;
        let mut store = Self::new(directory, geometry, fingerprint, budget, file, Some(index));
        store.give_back_what_others_left();
        store.access.refused.extend(recovered.refused());
        Ok((store, recovered))
    }

    fn new(
        directory: &dyn Directory,
        geometry: Geometry,
        fingerprint: Fingerprint,
        budget: Option<Budget>,
        file: Arc<dyn File>,
        index: Option<Index>,
    ) -> Self {
        let epoch = index.as_ref().map_or(0, Index::epoch);
        let mut pages = HashMap::new();
        for entry in index.iter().flat_map(|index| index.entries().values()) {
            keep(&mut pages, entry);
        }
        Self {
            directory: directory.path().to_owned(),
            geometry,
            fingerprint,
            file,
            access: directory.access(),
            pulse: directory.pulse(),
            index: index.map(Mutex::new),
            pages: Mutex::new(pages),
            holes: Holes::default(),
            budget: budget.map(Mutex::new),
            generation: AtomicU64::new(first_generation(epoch)),
            syncing: Mutex::default(),
            syncs_failed: AtomicU64::new(0),
            zeroes: AtomicBool::new(false),
            bytes_written: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            bytes_cleared: AtomicU64::new(0),
            corrupt: AtomicU64::new(0),
        }
    }

    /// Where it is, for messages.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A failed copy to or from here, as the core is told of it.
    pub fn failure(&self, error: &Error) -> Failure {
        let reason = error.told_of(&self.directory);
        if let Error::Corrupt { .. } = error { Failure::Corrupt(reason) } else { Failure::Io(reason) }
    }

    /// Where everything lies.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How page I/O is done.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Traffic since it was opened.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            bytes_written: self.bytes_written.load(Ordering::Relaxed),
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_cleared: self.bytes_cleared.load(Ordering::Relaxed),
            corrupt: self.corrupt.load(Ordering::Relaxed),
        }
    }

    /// A value that changes as long as the drive does anything.
    pub fn progress(&self) -> impl Copy + PartialEq + use<> {
        (self.traffic(), self.pulse.answered())
    }

    /// Whether another process, if this one were killed, would find no more noted than was written.
    pub fn is_settled(&self) -> bool {
        self.budget.as_ref().is_none_or(|budget| lock(budget).is_settled())
    }

    /// How many lanes keep the drive busy, each in a thread of its own.
    pub fn lanes(&self) -> usize {
        self.file.lanes()
    }

    /// One thread's way to write and read pages.
    pub fn lane(self: &Arc<Self>) -> Result<Lane> {
        let io = self.file.lane().map_err(Error::io("opening a queue"))?;
        Lane::new(self.clone(), io)
    }

    /// Whether anything can be kept.
    pub fn is_named(&self) -> bool {
        self.index.is_some()
    }

    /// Everything that is kept, by key.
    pub fn entries(&self) -> Vec<(Vec<u8>, Entry)> {
        let Some(index) = &self.index else { return Vec::new() };
        lock(index).entries().iter().map(|(key, entry)| (key.clone(), entry.clone())).collect()
    }

    /// Refuses a key, a number of pages and a number of bytes of meta for which `put` would have no room in the index. While
    /// a drive that does not answer holds up the index, only `put` can tell.
    pub fn require_room(&self, key: &[u8], pages: usize, meta: usize) -> Result<()> {
        let index = self.named()?.try_lock();
        index.map_or(Ok(()), |index| index.require_room(key, pages, meta))
    }

    /// Keeps pages that were written, with `meta`, under `key`. When this returns, they are safe from a loss of power, and
    /// their blocks must not be written to until `delete`. Returns the previous entry.
    pub fn put(&self, key: &[u8], pages: &[(GroupId, BlockId)], meta: &[u8]) -> Result<Option<Entry>> {
        self.put_if(key, pages, meta, || true)
    }

    /// Like `put`, if it is still `wanted` when the pages are safe and before the key changes; otherwise an error.
    pub fn put_if(
        &self,
        key: &[u8],
        pages: &[(GroupId, BlockId)],
        meta: &[u8],
        wanted: impl FnOnce() -> bool,
    ) -> Result<Option<Entry>> {
        let index = self.named()?;
        // This comes first: it lets go of pages of changes that failed, some of which syncs may have lost. If another change
        // is under way, that one does it.
        if let Ok(mut index) = index.try_lock() {
            index.make_sure()?;
        }
        let mut records = Vec::with_capacity(pages.len());
        for &(group, block) in pages {
            let known = lock(&self.pages);
            let Some(page) = known.get(&(group, block)) else {
                return Err(corrupt(group, block, "nothing was written to it"));
            };
            let (generation, sum) = (page.generation, page.sum);
            records.push(Record { group: group.0, block: block.index(), generation, sum });
        }
        self.sync(pages)?;
        let entry = Entry { pages: records, meta: meta.to_vec() };
        let mut index = unless_given_up(index, wanted)?;
        let before = index.put(key, entry.clone())?;
        let mut known = lock(&self.pages);
        keep(&mut known, &entry);
        before.iter().for_each(|before| unkeep(&mut known, before));
        // Not earlier: the next change of the key takes away what was counted here.
        drop((known, index));
        if let Some(budget) = &self.budget {
            // If this fails, more stays noted than was written, which is no error.
            let _ = lock(budget).settle(SystemTime::now());
        }
        Ok(before)
    }

    /// Makes pages safe from a loss of power. The system may mark as written what a sync could not write. So once a sync has
    /// failed, later ones say nothing about pages written before it.
    fn sync(&self, pages: &[(GroupId, BlockId)]) -> Result<()> {
        let _turn = lock(&self.syncing);
        let lost = pages.iter().filter(|&&(group, block)| self.may_have_lost(group, block)).count();
        if lost > 0 {
            return Err(Error::Unsynced { pages: lost });
        }
        self.file.sync().map_err(|error| {
            self.syncs_failed.fetch_add(1, Ordering::Relaxed);
            Error::io("syncing the pages")(error)
        })
    }

    /// Whether a sync that failed may have lost a page.
    pub fn may_have_lost(&self, group: GroupId, block: BlockId) -> bool {
        let failed = self.syncs_failed.load(Ordering::Relaxed);
        lock(&self.pages)
            .get(&(group, block))
            .is_some_and(|page| page.unsynced.is_some_and(|then| then != failed))
    }

    /// Whether the next process finds what `entries` says. If not, it may find what a failed `put` or `delete` has left, so
    /// blocks of such a `put` must not be written to until this is true again. The next change that succeeds makes it true.
    pub fn is_sure(&self) -> bool {
        self.index.as_ref().is_none_or(|index| lock(index).is_sure())
    }

    /// Forgets a key; returns its entry, whose blocks may be written to again.
    pub fn delete(&self, key: &[u8]) -> Result<Option<Entry>> {
        self.delete_if(key, || true)
    }

    /// Like `delete`, if it is still `wanted` before the key changes; otherwise an error.
    pub fn delete_if(&self, key: &[u8], wanted: impl FnOnce() -> bool) -> Result<Option<Entry>> {
        let gone = unless_given_up(self.named()?, wanted)?.delete(key)?;
        gone.iter().for_each(|entry| unkeep(&mut lock(&self.pages), entry));
        Ok(gone)
    }

    /// Gives back the space of a range of the arena that has no blocks any more.
    pub fn discard(self: &Arc<Self>, arena: Range<u64>) -> Result<()> {
        self.hole(arena).punch()
    }

    /// A range of the arena that has no blocks any more, to give its space back later. It may have blocks again before that.
    pub(crate) fn hole(self: &Arc<Self>, arena: Range<u64>) -> Hole {
        let segments = self.geometry.segments_of(arena);
        let mut pages = lock(&self.pages);
        // Block by block: there may be many times more pages elsewhere.
        for block in segments.clone().flat_map(|segment| self.geometry.blocks_in(segment)) {
            pages.remove(&block);
        }
        drop(pages);
        Hole::new(self, segments)
    }

    /// Tells the pages that are in some blocks now from all past and future ones; none where nothing can be read.
    pub fn generations(&self, group: GroupId, blocks: &[BlockId]) -> Vec<Option<u64>> {
        let pages = lock(&self.pages);
        blocks.iter().map(|&block| pages.get(&(group, block)).map(|page| page.generation)).collect()
    }

    /// Zeroes blocks without a page, with their headers and padding. Not synced: a loss of power may bring bytes back.
    pub fn zero(&self, group: GroupId, blocks: Range<u32>) -> Result<()> {
        let blocks: Vec<_> = blocks.map(BlockId::new).collect();
        self.clear(group, &blocks, "zeroing", |range| self.file.zero(range))
    }

    /// Gives back the space of blocks without a page, after a write to them has failed.
    pub fn give_back(&self, group: GroupId, blocks: &[BlockId]) -> Result<()> {
        self.clear(group, blocks, "giving space back", |range| self.file.discard(range))
    }

    /// Calls `clear` for everything in the file that belongs to some blocks without a page.
    fn clear(
        &self,
        group: GroupId,
        blocks: &[BlockId],
        operation: &'static str,
        clear: impl Fn(Range<u64>) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut pages = lock(&self.pages);
        self.require_spare(&pages, group, blocks)?;
        blocks.iter().for_each(|&block| drop(pages.remove(&(group, block))));
        drop(pages);
        let ranges = stretches(&self.geometry, group, blocks);
        let mut ranges = ranges.iter().flat_map(|s| self.geometry.places(group, s.slot, s.count));
        let cleared = ranges.try_for_each(|range| {
            let bytes = range.end - range.start;
            clear(range)?;
            self.bytes_cleared.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        });
        cleared.map_err(Error::io(operation))
    }

    /// Gives back the space of segments in which the index has no page: earlier processes have left it.
    fn give_back_what_others_left(&self) {
        let bytes = self.geometry.segments().0;
        let beside =
            self.beside_what_is_kept(|slot, _| once(slot.segment * bytes..(slot.segment + 1) * bytes));
        for range in beside.into_iter().flatten() {
            // If the system refuses, the space stays taken, which is no error.
            let _ = self.file.discard(range);
        }
    }

    /// From now on the memory that pages pass through keeps none of their bytes. Zeroes everything in the file that no entry
    /// of the index has: earlier processes have left it.
    pub fn zero_on_free(&self) -> Result<()> {
        self.zeroes.store(true, Ordering::Relaxed);
        let beside = self.beside_what_is_kept(|slot, group| self.geometry.places(group, slot, 1));
        let zeroed = beside.and_then(|ranges| ranges.into_iter().try_for_each(|range| self.file.zero(range)));
        zeroed.map_err(Error::io("zeroing"))
    }

    /// The ranges of the file without what the index keeps. This includes what is past the last segment: an earlier
    /// disk_memory may have been larger.
    fn beside_what_is_kept<I: Iterator<Item = Range<u64>>>(
        &self,
        places: impl Fn(Slot, GroupId) -> I,
    ) -> std::io::Result<Vec<Range<u64>>> {
        let end = self.file.size()?.next_multiple_of(ALIGN);
        let pages = lock(&self.pages);
        let kept = pages.iter().filter(|(_, page)| page.kept > 0);
        let mut kept: Vec<_> =
            kept.flat_map(|(&(group, block), _)| places(self.geometry.slot(group, block), group)).collect();
        kept.sort_unstable_by_key(|range| range.start);
        let starts = once(0).chain(kept.iter().map(|range| range.end));
        let ends = kept.iter().map(|range| range.start).chain(once(end));
        Ok(starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end).collect())
    }

    /// Whether bytes must be erased with their pages.
    pub fn zeroes(&self) -> bool {
        self.zeroes.load(Ordering::Relaxed)
    }

    fn named(&self) -> Result<&Mutex<Index>> {
        let missing = || Error::invalid("key", "on a scratch file", "a store with an index");
        self.index.as_ref().ok_or_else(missing)
    }

    pub(super) fn page(&self, group: GroupId, block: BlockId) -> Result<Page> {
        let page = lock(&self.pages).get(&(group, block)).cloned();
        page.ok_or_else(|| self.corrupt(group, block, "nothing was written to it"))
    }

    /// Counts a page that does not verify.
    pub(super) fn corrupt(&self, group: GroupId, block: BlockId, reason: impl Into<String>) -> Error {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
        corrupt(group, block, reason)
    }

    /// Prepares blocks to be written: until that is done nothing can be read from them. Returns how many syncs have failed.
    pub(super) fn begin(&self, group: GroupId, blocks: &[BlockId]) -> Result<u64> {
        self.wait_for_holes(group, blocks);
        if let Some(budget) = &self.budget {
            let bytes = self.geometry.written_bytes(group) * blocks.len() as u64;
            lock(budget).spend(bytes, SystemTime::now())?;
        }
        let mut pages = lock(&self.pages);
        self.require_spare(&pages, group, blocks)?;
        blocks.iter().for_each(|&block| drop(pages.remove(&(group, block))));
        Ok(self.syncs_failed.load(Ordering::Relaxed))
    }

    /// Refuses blocks that are kept or do not exist.
    fn require_spare(&self, pages: &Pages, group: GroupId, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            let there = self.geometry.has(group.0, block.index());
            if !there || pages.get(&(group, block)).is_some_and(|page| page.kept > 0) {
                let value = format!("{} of layer group {}", block.index(), group.0);
                let limit = "a block of the arena that is not kept under a key";
                return Err(Error::invalid("block", value, limit));
            }
        }
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(budget) = &self.budget {
            // As in `put`.
            let _ = lock(budget).settle(SystemTime::now());
        }
    }
}

/// Waits for the index, and returns it if a change is still `wanted`.
fn unless_given_up(index: &Mutex<Index>, wanted: impl FnOnce() -> bool) -> Result<MutexGuard<'_, Index>> {
    let index = lock(index);
    if wanted() {
        return Ok(index);
    }
    Err(Error::Io { operation: "changing the index", source: std::io::ErrorKind::TimedOut.into() })
}

/// Notes that an entry has pages, which are safe.
fn keep(pages: &mut Pages, entry: &Entry) {
    for &Record { group, block, generation, sum } in &entry.pages {
        let fresh = Page { generation, sum, layers: None, kept: 0, unsynced: None };
        let page = pages.entry((GroupId(group), BlockId::new(block))).or_insert(fresh);
        page.kept += 1;
        page.unsynced = None;
    }
}

/// Notes that an entry is gone.
fn unkeep(pages: &mut Pages, entry: &Entry) {
    for record in &entry.pages {
        if let Some(page) = pages.get_mut(&(GroupId(record.group), BlockId::new(record.block))) {
            page.kept -= 1;
        }
    }
}

fn corrupt(group: GroupId, block: BlockId, reason: impl Into<String>) -> Error {
    Error::Corrupt { group: group.0, block: block.index(), reason: reason.into() }
}
