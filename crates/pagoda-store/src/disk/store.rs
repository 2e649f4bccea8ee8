//! The disk tier: blocks of pages in one file, written and read layer by layer, each with a checksum.

use super::budget::Budget;
use super::format::{self, Fingerprint, Record};
use super::index::{Entry, Index, Recovered};
use super::io::{self, Access, Directory, File, IO_BYTES_MAX, Kind, Op};
use super::segment::{Geometry, Slot};
use super::{Error, Result};
use crate::Slab;
use pagoda_core::ids::{BlockId, GroupId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const PAGES: &str = "pages";

/// Bytes that one lane gathers before it writes, or reads before it verifies: several I/Os deep.
const STAGE_BYTES: u64 = 8 << 20;

/// Page generations of one opening of a store lie below this.
const EPOCH_SHIFT: u32 = 40;

/// A store of pages in one directory. Any number of lanes write and read at once, each block one of them at a time.
#[derive(Debug)]
pub struct Store {
    geometry: Geometry,
    fingerprint: Fingerprint,
    file: Arc<dyn File>,
    access: Access,
    index: Option<Mutex<Index>>,
    pages: Mutex<Pages>,
    budget: Option<Mutex<Budget>>,
    generation: AtomicU64,
    zeroes: AtomicBool,
    bytes_written: AtomicU64,
    bytes_read: AtomicU64,
    corrupt: AtomicU64,
}

/// What went through a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes written to the drive, headers and padding included.
    pub bytes_written: u64,
    /// Bytes read from it.
    pub bytes_read: u64,
    /// Reads that did not verify.
    pub corrupt: u64,
}

/// What can be read, by where it lies.
type Pages = HashMap<(GroupId, BlockId), Page>;

/// A page that can be read.
#[derive(Clone, Debug)]
struct Page {
    generation: u64,
    sum: u64,
    /// Checksums of its layers, once its header has been written or read.
    layers: Option<Arc<[u64]>>,
    /// How many entries of the index have it.
    kept: u32,
}

impl Store {
    /// A store that goes when it is closed.
    pub fn scratch(
        directory: &dyn Directory,
        geometry: Geometry,
        fingerprint: Fingerprint,
        budget: Option<Budget>,
    ) -> Result<Self> {
        let file = directory.scratch().map_err(Error::io("making a file"))?;
        Ok(Self::new(directory, geometry, fingerprint, budget, file, None))
    }

    /// A store that survives: what `put` has kept is there when it is opened again, by one process at a time.
    pub fn open(
        directory: &dyn Directory,
        geometry: Geometry,
        fingerprint: Fingerprint,
        budget: Option<Budget>,
    ) -> Result<(Self, Recovered)> {
        let file = directory.lock(PAGES).map_err(|source| match source.kind() {
            std::io::ErrorKind::WouldBlock => Error::Locked,
            _ => Error::Io { operation: "opening the pages", source },
        })?;
        let (index, recovered) = Index::open(directory, &fingerprint, &geometry)?;
        let mut store = Self::new(directory, geometry, fingerprint, budget, file, Some(index));
        store.access.refused.extend(recovered.unwritten.iter().map(|why| format!("a new index: {why}")));
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
            geometry,
            fingerprint,
            file,
            access: directory.access(),
            index: index.map(Mutex::new),
            pages: Mutex::new(pages),
            budget: budget.map(Mutex::new),
            generation: AtomicU64::new(epoch << EPOCH_SHIFT),
            zeroes: AtomicBool::new(false),
            bytes_written: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            corrupt: AtomicU64::new(0),
        }
    }

    /// Where everything lies.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How page I/O is done.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// What went through since it was opened.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            bytes_written: self.bytes_written.load(Ordering::Relaxed),
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            corrupt: self.corrupt.load(Ordering::Relaxed),
        }
    }

    /// How many lanes keep the drive busy, each in a thread of its own.
    pub fn lanes(&self) -> usize {
        self.file.lanes()
    }

    /// A thread's way to write and to read.
    pub fn lane(self: &Arc<Self>) -> Result<Lane> {
        let io = self.file.lane().map_err(Error::io("opening a queue"))?;
        let stage = Slab::new(STAGE_BYTES.max(self.geometry.piece_bytes_max()) as usize);
        Ok(Lane { store: self.clone(), io, stage: stage.map_err(Error::io("taking memory"))? })
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

    /// Keeps pages that were written, with `meta`, under `key`: they are safe from a loss of power when this returns, and
    /// their blocks must not be written to until `delete`. Returns what was under the key before.
    pub fn put(&self, key: &[u8], pages: &[(GroupId, BlockId)], meta: &[u8]) -> Result<Option<Entry>> {
        self.put_if(key, pages, meta, || true)
    }

    /// As `put`, if it is still `wanted` when the pages are safe and before the key changes; else an error.
    pub fn put_if(
        &self,
        key: &[u8],
        pages: &[(GroupId, BlockId)],
        meta: &[u8],
        wanted: impl FnOnce() -> bool,
    ) -> Result<Option<Entry>> {
        let index = self.named()?;
        let mut records = Vec::with_capacity(pages.len());
        for &(group, block) in pages {
            let known = lock(&self.pages);
            let Some(page) = known.get(&(group, block)) else {
                return Err(corrupt(group, block, "nothing was written to it"));
            };
            let (generation, sum) = (page.generation, page.sum);
            records.push(Record { group: group.0, block: block.index(), generation, sum });
        }
        self.file.sync().map_err(Error::io("syncing the pages"))?;
        let entry = Entry { pages: records, meta: meta.to_vec() };
        let before = unless_given_up(index, wanted)?.put(key, entry.clone())?;
        let mut known = lock(&self.pages);
        keep(&mut known, &entry);
        before.iter().for_each(|before| unkeep(&mut known, before));
        Ok(before)
    }

    /// Whether the next process finds what `entries` says. If not, it may find what a `put` or `delete` that failed has left, so
    /// that blocks of such a `put` must not be written to until this is so again: the next change that succeeds sees to it.
    pub fn is_sure(&self) -> bool {
        self.index.as_ref().is_none_or(|index| lock(index).is_sure())
    }

    /// Forgets a key; returns what was under it, whose blocks may be written to again.
    pub fn delete(&self, key: &[u8]) -> Result<Option<Entry>> {
        self.delete_if(key, || true)
    }

    /// As `delete`, if it is still `wanted` before the key changes; else an error.
    pub fn delete_if(&self, key: &[u8], wanted: impl FnOnce() -> bool) -> Result<Option<Entry>> {
        let gone = unless_given_up(self.named()?, wanted)?.delete(key)?;
        gone.iter().for_each(|entry| unkeep(&mut lock(&self.pages), entry));
        Ok(gone)
    }

    /// Gives back the space of a range of the arena that has no block any more.
    pub fn discard(&self, arena: Range<u64>) -> Result<()> {
        let segments = self.geometry.segments_of(arena);
        lock(&self.pages)
            .retain(|&(group, block), _| !segments.contains(&self.geometry.slot(group, block).segment));
        let bytes = self.geometry.segments().0;
        let range = segments.start * bytes..segments.end * bytes;
        self.file.discard(range).map_err(Error::io("giving space back"))
    }

    /// What tells the pages that lie in some blocks now from all that ever did or will; none where nothing can be read.
    pub fn generations(&self, group: GroupId, blocks: &[BlockId]) -> Vec<Option<u64>> {
        let pages = lock(&self.pages);
        blocks.iter().map(|&block| pages.get(&(group, block)).map(|page| page.generation)).collect()
    }

    /// Zeroes blocks that no page has any more, with their headers and padding. Not synced: a loss of power may bring bytes back.
    pub fn zero(&self, group: GroupId, blocks: Range<u32>) -> Result<()> {
        let blocks: Vec<_> = blocks.map(BlockId::new).collect();
        self.clear(group, &blocks, "zeroing", |range| self.file.zero(range))
    }

    /// Gives back the space of blocks that no page has, for whoever was to write to them and failed.
    pub fn give_back(&self, group: GroupId, blocks: &[BlockId]) -> Result<()> {
        self.clear(group, blocks, "giving space back", |range| self.file.discard(range))
    }

    /// Does something about everything in the file that belongs to blocks that no page has any more.
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
        ranges.try_for_each(clear).map_err(Error::io(operation))
    }

    /// From now on no bytes of pages stay in memory that they went through. Zeroes all of the file that no entry of the index
    /// has: what processes before this one have left.
    pub fn zero_on_free(&self) -> Result<()> {
        self.zeroes.store(true, Ordering::Relaxed);
        let pages = lock(&self.pages);
        let kept = pages.iter().filter(|(_, page)| page.kept > 0);
        let places = |(group, block): (GroupId, BlockId)| {
            self.geometry.places(group, self.geometry.slot(group, block), 1)
        };
        let mut kept: Vec<_> = kept.flat_map(|(&at, _)| places(at)).collect();
        kept.sort_unstable_by_key(|range| range.start);
        let (bytes, count) = self.geometry.segments();
        let mut start = 0;
        for range in kept.into_iter().chain(std::iter::once(bytes * count..bytes * count)) {
            if start < range.start {
                self.file.zero(start..range.start).map_err(Error::io("zeroing"))?;
            }
            start = range.end;
        }
        Ok(())
    }

    /// Whether bytes have to go with their pages.
    pub fn zeroes(&self) -> bool {
        self.zeroes.load(Ordering::Relaxed)
    }

    /// In a forked child: leaves the directory's lock to the parent alone.
    ///
    /// # Safety
    /// Nothing of this process may use the store from now on, nor drop it.
    pub unsafe fn abandon(&self) {
        // SAFETY: as the caller promises.
        unsafe { self.file.abandon() };
    }

    fn named(&self) -> Result<&Mutex<Index>> {
        let missing = || Error::invalid("key", "on a scratch file", "a store with an index");
        self.index.as_ref().ok_or_else(missing)
    }

    fn page(&self, group: GroupId, block: BlockId) -> Result<Page> {
        let page = lock(&self.pages).get(&(group, block)).cloned();
        page.ok_or_else(|| self.corrupt(group, block, "nothing was written to it"))
    }

    /// Counts a page that does not verify.
    fn corrupt(&self, group: GroupId, block: BlockId, reason: impl Into<String>) -> Error {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
        corrupt(group, block, reason)
    }

    /// Lets blocks be written to: until that is done nothing can be read from them.
    fn begin(&self, group: GroupId, blocks: &[BlockId]) -> Result<()> {
        let mut pages = lock(&self.pages);
        self.require_spare(&pages, group, blocks)?;
        if let Some(budget) = &self.budget {
            lock(budget).spend(self.geometry.written_bytes(group) * blocks.len() as u64, Instant::now())?;
        }
        blocks.iter().for_each(|&block| drop(pages.remove(&(group, block))));
        Ok(())
    }

    /// Refuses blocks that are kept, or not there.
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

/// One thread's way to write and to read pages.
#[derive(Debug)]
pub struct Lane {
    store: Arc<Store>,
    io: Box<dyn io::Lane>,
    stage: Slab,
}

/// Consecutive slots of one segment: pages `first..first + count` of a call.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    slot: Slot,
    first: usize,
    count: usize,
}

/// A part of the stage, and where in the file it belongs. `unit` bytes for each of some pages.
#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: u64,
    layer: usize,
    first: usize,
    count: usize,
    unit: usize,
}

impl Lane {
    /// The layers of a group.
    pub fn layers(&self, group: GroupId) -> usize {
        self.store.geometry.layers(group)
    }

    /// Bytes that a layer of a page has in the file.
    pub fn stored_run(&self, group: GroupId, layer: usize) -> u64 {
        self.store.geometry.stored_run(group, layer)
    }

    /// Writes one page of `group` to each of `blocks`. `gather(page, bytes, target)` has to fill `target` with that range of
    /// the `page`-th block.
    ///
    /// On an error none of the blocks can be read.
    pub fn write(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        mut gather: impl FnMut(usize, Range<u64>, &mut [u8]),
    ) -> Result<()> {
        let store = self.store.clone();
        let geometry = &store.geometry;
        store.begin(group, blocks)?;
        let layers = geometry.layers(group);
        let mut sums = vec![0u64; blocks.len() * layers];
        let stretches = stretches(geometry, group, blocks);
        let data = pieces(geometry, group, &stretches, 0..layers, self.stage.bytes());
        self.run(Kind::Write, &data, None, "writing pages", |piece, page, bytes| {
            let run = geometry.run(group, piece.layer);
            let (data, padding) = bytes.split_at_mut((run.end - run.start) as usize);
            gather(page, run, data);
            padding.fill(0);
            sums[page * layers + piece.layer] = format::sum(bytes);
            Ok(())
        })?;
        let generation = store.generation.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        let mut headers = vec![0; blocks.len()];
        let pieces = header_pieces(geometry, group, &stretches, self.stage.bytes());
        let payload = (0..layers).map(|layer| geometry.run(group, layer).end).max().unwrap_or(0);
        self.run(Kind::Write, &pieces, None, "writing headers", |_, page, bytes| {
            let identity = (group.0, blocks[page].index(), generation + page as u64);
            let sums = &sums[page * layers..(page + 1) * layers];
            headers[page] = format::write_header(bytes, &store.fingerprint, identity, payload, sums);
            Ok(())
        })?;
        let mut pages = lock(&store.pages);
        for (page, &block) in blocks.iter().enumerate() {
            let layers = Some(sums[page * layers..(page + 1) * layers].into());
            let generation = generation + page as u64;
            pages.insert((group, block), Page { generation, sum: headers[page], layers, kept: 0 });
        }
        Ok(())
    }

    /// Reads some layers of the pages in `blocks`. `scatter(page, bytes, source)` gets that range of the `page`-th block, once
    /// it has been verified.
    ///
    /// On an error some of the bytes may have been handed out, all of them right.
    pub fn read(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        layers: Range<usize>,
        mut scatter: impl FnMut(usize, Range<u64>, &[u8]),
    ) -> Result<()> {
        self.verified(group, blocks, layers, None, |page, run, bytes| scatter(page, run, bytes))
    }

    /// Reads one layer of the pages in `blocks` into `target`, [`stored_run`](Self::stored_run) bytes each, without a copy in between.
    ///
    /// On an error `target` holds anything.
    ///
    /// # Panics
    /// When `target` has not exactly these bytes, or does not begin on a multiple of [`io::ALIGN`].
    pub fn fetch(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        layer: usize,
        target: &mut [u8],
    ) -> Result<()> {
        let bytes = blocks.len() as u64 * self.stored_run(group, layer);
        assert_eq!(target.len() as u64, bytes, "memory for a layer of {} pages", blocks.len());
        assert_eq!(target.as_ptr().addr() % io::ALIGN as usize, 0, "aligned memory");
        self.verified(group, blocks, layer..layer + 1, Some(target), |_, _, _| ())
    }

    /// Reads layers of pages, into memory of the lane's own or into `target`, and hands out what has been verified.
    fn verified(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        layers: Range<usize>,
        target: Option<&mut [u8]>,
        mut seen: impl FnMut(usize, Range<u64>, &[u8]),
    ) -> Result<()> {
        let store = self.store.clone();
        let geometry = &store.geometry;
        let known = blocks.iter().map(|&block| store.page(group, block)).collect::<Result<Vec<_>>>()?;
        let sums = self.layer_sums(group, blocks, &known)?;
        let stretches = stretches(geometry, group, blocks);
        let room = target.as_ref().map_or(self.stage.bytes(), |target| target.len());
        let pieces = pieces(geometry, group, &stretches, layers, room);
        self.run(Kind::Read, &pieces, target, "reading pages", |piece, page, bytes| {
            if format::sum(bytes) != sums[page][piece.layer] {
                let reason = format!("layer {} of the group does not verify", piece.layer);
                return Err(store.corrupt(group, blocks[page], reason));
            }
            let run = geometry.run(group, piece.layer);
            let len = (run.end - run.start) as usize;
            seen(page, run, &bytes[..len]);
            Ok(())
        })
    }

    /// The checksums of the layers of pages; headers that nobody has seen since the store was opened are read.
    fn layer_sums(&mut self, group: GroupId, blocks: &[BlockId], pages: &[Page]) -> Result<Vec<Arc<[u64]>>> {
        let store = self.store.clone();
        let geometry = &store.geometry;
        let mut sums: Vec<Option<Arc<[u64]>>> = pages.iter().map(|page| page.layers.clone()).collect();
        if sums.iter().any(Option::is_none) {
            let stretches = stretches(geometry, group, blocks);
            let pieces = header_pieces(geometry, group, &stretches, self.stage.bytes());
            self.run(Kind::Read, &pieces, None, "reading headers", |_, page, bytes| {
                let (block, &Page { generation, sum, .. }) = (blocks[page], &pages[page]);
                let expected = Record { group: group.0, block: block.index(), generation, sum };
                let layers = geometry.layers(group);
                let found = format::read_header(bytes, &store.fingerprint, &expected, layers)
                    .map_err(|reason| store.corrupt(group, block, reason))?;
                sums[page] = Some(found.into());
                Ok(())
            })?;
            let mut known = lock(&store.pages);
            for ((&block, page), sums) in blocks.iter().zip(pages).zip(&sums) {
                if let Some(now) = known.get_mut(&(group, block)).filter(|now| now.sum == page.sum) {
                    now.layers.clone_from(sums);
                }
            }
        }
        Ok(sums.into_iter().map(|sums| sums.expect("read above")).collect())
    }

    /// Moves pieces through `memory`, by default the lane's own, as many at once as fit. `visit(piece, page, bytes)` fills what
    /// is to be written, or looks at what was read.
    fn run(
        &mut self,
        kind: Kind,
        pieces: &[Piece],
        memory: Option<&mut [u8]>,
        operation: &'static str,
        visit: impl FnMut(&Piece, usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let own = memory.is_none();
        let result = self.pass_through(kind, pieces, memory, operation, visit);
        if own && self.store.zeroes() {
            let used = pieces.iter().map(Piece::bytes).sum::<usize>().min(self.stage.bytes());
            // SAFETY: the stage is this lane's alone, and nothing is under way in it.
            unsafe { self.stage.zero(0..used as u64) };
        }
        result
    }

    fn pass_through(
        &mut self,
        kind: Kind,
        pieces: &[Piece],
        memory: Option<&mut [u8]>,
        operation: &'static str,
        mut visit: impl FnMut(&Piece, usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let stage = memory.unwrap_or_else(|| {
            // SAFETY: the stage is this lane's alone, `run` is the only one that touches it, and its bytes are any.
            unsafe { std::slice::from_raw_parts_mut(self.stage.base(), self.stage.bytes()) }
        });
        let mut rest = pieces;
        while !rest.is_empty() {
            let mut used = 0;
            let fits = rest.iter().take_while(|piece| {
                used += piece.bytes();
                used <= stage.len()
            });
            let (batch, later) = rest.split_at(fits.count());
            rest = later;
            if kind == Kind::Write {
                each(batch, stage, &mut visit)?;
            }
            let mut ops = Vec::new();
            let (mut tail, mut moved) = (&mut *stage, 0);
            for (offset, bytes) in joined(batch) {
                let (bytes, after) = std::mem::take(&mut tail).split_at_mut(bytes);
                tail = after;
                moved += bytes.len() as u64;
                let cuts = bytes.chunks_mut(IO_BYTES_MAX).enumerate();
                ops.extend(cuts.map(|(n, cut)| Op::new(kind, offset + (n * IO_BYTES_MAX) as u64, cut)));
            }
            self.io.run(&mut ops);
            ops.into_iter().try_for_each(Op::outcome).map_err(Error::io(operation))?;
            match kind {
                Kind::Read => &self.store.bytes_read,
                Kind::Write => &self.store.bytes_written,
            }
            .fetch_add(moved, Ordering::Relaxed);
            if kind == Kind::Read {
                each(batch, stage, &mut visit)?;
            }
        }
        Ok(())
    }
}

impl Piece {
    fn bytes(&self) -> usize {
        self.count * self.unit
    }
}

/// Calls `visit` with each page of each piece, and its part of the stage.
fn each(
    pieces: &[Piece],
    stage: &mut [u8],
    visit: &mut impl FnMut(&Piece, usize, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut rest = stage;
    for piece in pieces {
        let (bytes, tail) = std::mem::take(&mut rest).split_at_mut(piece.bytes());
        rest = tail;
        for (index, unit) in bytes.chunks_mut(piece.unit).enumerate() {
            visit(piece, piece.first + index, unit)?;
        }
    }
    Ok(())
}

/// Cuts a list of blocks into consecutive slots.
fn stretches(geometry: &Geometry, group: GroupId, blocks: &[BlockId]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (index, &block) in blocks.iter().enumerate() {
        let slot = geometry.slot(group, block);
        match stretches.last_mut() {
            Some(last)
                if slot.segment == last.slot.segment && slot.slot == last.slot.slot + last.count as u64 =>
            {
                last.count += 1;
            }
            _ => stretches.push(Stretch { slot, first: index, count: 1 }),
        }
    }
    stretches
}

/// The pieces of `layers`, in the order of the file, none larger than the stage.
fn pieces(
    geometry: &Geometry,
    group: GroupId,
    stretches: &[Stretch],
    layers: Range<usize>,
    stage: usize,
) -> Vec<Piece> {
    let whole = stretches.iter().flat_map(|stretch| {
        layers.clone().map(|layer| Piece {
            offset: geometry.run_at(group, stretch.slot, layer),
            layer,
            first: stretch.first,
            count: stretch.count,
            unit: geometry.stored_run(group, layer) as usize,
        })
    });
    whole.flat_map(|piece| cut(piece, stage)).collect()
}

fn header_pieces(geometry: &Geometry, group: GroupId, stretches: &[Stretch], stage: usize) -> Vec<Piece> {
    let unit = geometry.header_bytes(group) as usize;
    let whole = stretches.iter().map(|stretch| {
        let offset = geometry.header_at(group, stretch.slot);
        Piece { offset, layer: 0, first: stretch.first, count: stretch.count, unit }
    });
    whole.flat_map(|piece| cut(piece, stage)).collect()
}

/// Cuts a piece into such that fit into the stage.
fn cut(piece: Piece, stage: usize) -> impl Iterator<Item = Piece> {
    let most = stage / piece.unit;
    (0..piece.count).step_by(most).map(move |at| Piece {
        offset: piece.offset + (at * piece.unit) as u64,
        first: piece.first + at,
        count: most.min(piece.count - at),
        ..piece
    })
}

/// Offsets and bytes of the pieces, with those joined that follow each other in the file.
fn joined(pieces: &[Piece]) -> Vec<(u64, usize)> {
    let mut ranges: Vec<(u64, usize)> = Vec::new();
    for piece in pieces {
        match ranges.last_mut() {
            Some((offset, bytes)) if *offset + *bytes as u64 == piece.offset => *bytes += piece.bytes(),
            _ => ranges.push((piece.offset, piece.bytes())),
        }
    }
    ranges
}

/// The index, when its turn has come and a change of it is still `wanted`.
fn unless_given_up(index: &Mutex<Index>, wanted: impl FnOnce() -> bool) -> Result<MutexGuard<'_, Index>> {
    let index = lock(index);
    if wanted() {
        return Ok(index);
    }
    Err(Error::Io { operation: "changing the index", source: std::io::ErrorKind::TimedOut.into() })
}

/// Notes that an entry has pages.
fn keep(pages: &mut Pages, entry: &Entry) {
    for &Record { group, block, generation, sum } in &entry.pages {
        let fresh = Page { generation, sum, layers: None, kept: 0 };
        pages.entry((GroupId(group), BlockId::new(block))).or_insert(fresh).kept += 1;
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
