//! One thread's way to the file: pages are written and read layer by layer, each with a checksum, in few and large I/Os.

use super::format::{self, Record};
use super::io::{self, IO_BYTES_MAX, Kind, Op};
use super::segment::{Geometry, Slot};
use super::store::{Page, Store};
use super::{Error, Result};
use crate::{Slab, lock};
use pagoda_core::ids::{BlockId, GroupId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that one lane gathers before it writes, or reads before it verifies: several I/Os deep.
const STAGE_BYTES: u64 = 8 << 20;

/// One thread's way to write and to read pages.
#[derive(Debug)]
pub struct Lane {
    store: Arc<Store>,
    io: Box<dyn io::Lane>,
    stage: Slab,
}

/// Consecutive slots of one segment: pages `first..first + count` of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) slot: Slot,
    first: usize,
    pub(super) count: usize,
}

/// A part of the stage, and its place in the file: `unit` bytes for each of some pages.
#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: u64,
    layer: usize,
    first: usize,
    count: usize,
    unit: usize,
}

impl Lane {
    pub(super) fn new(store: Arc<Store>, io: Box<dyn io::Lane>) -> Result<Self> {
        let stage = Slab::new(STAGE_BYTES.max(store.geometry.piece_bytes_max()) as usize);
        Ok(Self { store, io, stage: stage.map_err(Error::io("taking memory"))? })
    }

    /// How many layers a group has.
    pub fn layers(&self, group: GroupId) -> usize {
        self.store.geometry.layers(group)
    }

    /// Bytes of a layer of a page in the file.
    pub fn stored_run(&self, group: GroupId, layer: usize) -> u64 {
        self.store.geometry.stored_run(group, layer)
    }

    /// Writes one page of `group` to each of `blocks`. `gather(page, bytes, target)` has to fill `target` with the range
    /// `bytes` of the `page`-th block.
    ///
    /// After an error none of the blocks can be read.
    pub fn write(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        mut gather: impl FnMut(usize, Range<u64>, &mut [u8]),
    ) -> Result<()> {
        let store = self.store.clone();
        let geometry = &store.geometry;
        let unsynced = Some(store.begin(group, blocks)?);
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
        let payload = geometry.run(group, layers - 1).end;
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
            let page = Page { generation, sum: headers[page], layers, kept: 0, unsynced };
            pages.insert((group, block), page);
        }
        Ok(())
    }

    /// Reads some layers of the pages in `blocks`. `scatter(page, bytes, source)` gets the range `bytes` of the `page`-th
    /// block, once it has been verified.
    ///
    /// On an error some of the bytes may have been handed out, all of them correct.
    pub fn read(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        layers: Range<usize>,
        mut scatter: impl FnMut(usize, Range<u64>, &[u8]),
    ) -> Result<()> {
        self.verified(group, blocks, layers, None, |page, run, bytes| scatter(page, run, bytes))
    }

    /// Reads one layer of the pages in `blocks` directly into `target`, [`stored_run`](Self::stored_run) bytes each.
    ///
    /// On an error `target` may hold anything.
    ///
    /// # Panics
    /// When `target` does not have exactly this size, or does not begin at a multiple of [`io::ALIGN`].
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

    /// Reads layers of pages into the lane's own memory or into `target`, and hands out what has been verified.
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

    /// The checksums of the layers of pages. Reads the headers that have not been seen since the store was opened.
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

    /// Moves pieces through `memory` (by default the lane's own), as many at once as fit. `visit(piece, page, bytes)` fills
    /// what will be written, or looks at what was read.
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

/// Splits a list of blocks into stretches of consecutive slots.
pub(super) fn stretches(geometry: &Geometry, group: GroupId, blocks: &[BlockId]) -> Vec<Stretch> {
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

/// The pieces of `layers`, none larger than the stage: stretch by stretch, and within one in the order of the file.
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

/// Cuts a piece into pieces that fit the stage.
fn cut(piece: Piece, stage: usize) -> impl Iterator<Item = Piece> {
    let most = stage / piece.unit;
    (0..piece.count).step_by(most).map(move |at| Piece {
        offset: piece.offset + (at * piece.unit) as u64,
        first: piece.first + at,
        count: most.min(piece.count - at),
        ..piece
    })
}

/// Offsets and bytes of the pieces. Pieces that follow each other in the file are joined.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::io::fault::{Fault, FaultyDisk};

    const GROUP: GroupId = GroupId(0);

    /// If bytes must be erased with their pages: also when there are more than the lane gathers at once, and when I/O fails.
    #[test]
    fn memory_that_pages_went_through_is_zeroed_where_that_is_asked_for() {
        let blocks = [0, 1, 2].map(BlockId::new);
        for zeroes in [true, false] {
            let disk = FaultyDisk::default();
            let opened = || {
                let geometry = Geometry::new(&[vec![3_000_001]], 64 << 20).unwrap();
                let store = Arc::new(Store::open(&disk, geometry, [1; 16], None).unwrap().0);
                if zeroes {
                    store.zero_on_free().unwrap();
                }
                store
            };
            let is_dirty = |lane: &Lane| {
                // SAFETY: the lane does nothing meanwhile.
                let bytes = unsafe { std::slice::from_raw_parts(lane.stage.base(), lane.stage.bytes()) };
                bytes.iter().any(|&byte| byte != 0)
            };
            let store = opened();
            let mut lane = store.lane().unwrap();
            let write = |lane: &mut Lane| lane.write(GROUP, &blocks, |_, _, target| target.fill(7));
            disk.fail(0, Fault::Errno(5));
            write(&mut lane).unwrap_err();
            assert_eq!(is_dirty(&lane), !zeroes);
            write(&mut lane).unwrap();
            assert_eq!(is_dirty(&lane), !zeroes);
            store.put(b"it", &blocks.map(|block| (GROUP, block)), b"").unwrap();
            drop((lane, store));
            // This one reads headers first.
            let mut lane = opened().lane().unwrap();
            let read = |lane: &mut Lane| lane.read(GROUP, &blocks, 0..1, |_, _, _| ());
            disk.fail(1, Fault::Flip);
            read(&mut lane).unwrap_err();
            assert_eq!(is_dirty(&lane), !zeroes);
            read(&mut lane).unwrap();
            assert_eq!(is_dirty(&lane), !zeroes);
        }
    }
}
