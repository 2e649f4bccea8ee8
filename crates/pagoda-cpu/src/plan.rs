//! Cutting a batch into work items.
//!
//! A group is a block of queries of one sequence with a range of K/V heads; an item is a group with a run of tiles. A group
//! of several items gets a partial result from each; the thread that finishes last merges them in page order. In
//! deterministic mode partial results belong to fixed runs of stored rows, no matter which thread computes them.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use pagoda_core::work::{RUN_TILES, pieces};

use crate::common::Shared;
use crate::kernel::ALIGN;
use crate::layer::{Layer, PagedKv, SequenceTable};

/// Query rows of a group: those of one K/V head, which are computed together for a tile, or of several heads if each has few.
const ROWS: usize = 128;
/// Fewer tiles than this are not worth a merge.
const ITEM_TILES: usize = 8;
/// Items per thread, so that a slow thread does not delay the others.
const ITEMS_PER_THREAD: usize = 4;
/// Work for which it pays to wake a thread, in tiles of [`UNIT_ROWS`] rows of one head.
const WAKE_COST: usize = 16;
/// Query rows that cost as much as one: below this, reading the tile takes most of the time.
const UNIT_ROWS: usize = 4;

/// What a pass attends to.
#[derive(Clone, Copy)]
pub(crate) enum Scope<'a> {
    /// All that queries see.
    All,
    /// Of that, the tokens of each sequence before these.
    Before(&'a [usize]),
    /// Of that, the tokens of each sequence from these on.
    From(&'a [usize]),
    /// Common pages, of the nodes of a level.
    Common(&'a Shared, usize),
}

/// Queries of a sequence, or of those that share common pages, with a range of K/V heads.
pub(crate) struct Group {
    /// The sequence, or one of them.
    pub(crate) sequence: usize,
    /// The axis index of the first query.
    pub(crate) position: usize,
    /// The row of the first query in the batch; for common pages, in the list of their queries.
    pub(crate) token: usize,
    pub(crate) queries: usize,
    /// Whether these queries have a result over common pages from an earlier pass.
    pub(crate) continues: bool,
    pub(crate) heads: Range<usize>,
    /// The part of the token axis that some query sees.
    pub(crate) visible: Range<usize>,
    /// How many items there are.
    pub(crate) parts: usize,
    /// Where their partial results begin, in floats, if there are several.
    pub(crate) offset: usize,
    /// Items that are not finished.
    pub(crate) pending: AtomicU32,
    /// Where the result of all parts of a batch is carried, in floats.
    pub(crate) carried: usize,
}

/// A run of tiles of a group.
pub(crate) struct Item {
    pub(crate) group: usize,
    /// Which part of the group's result this is.
    pub(crate) part: usize,
    /// Tiles, counted over all pieces of the group.
    pub(crate) tiles: Range<usize>,
}

/// The items of a call. Reused, so that planning does not allocate.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) groups: Vec<Group>,
    pub(crate) items: Vec<Item>,
    /// Floats of all partial results.
    pub(crate) floats: usize,
    /// Floats of one result of every group.
    pub(crate) carried: usize,
    /// How many threads the work is worth.
    pub(crate) workers: usize,
}

/// A block of queries as of a [`Group`], for all heads.
struct Block {
    sequence: usize,
    position: usize,
    token: usize,
    queries: usize,
    continues: bool,
    /// Whether it has all queries of its sequence or node.
    alone: bool,
    visible: Range<usize>,
    tiles: usize,
}

/// The query blocks of a pass over a batch.
fn blocks<'a>(
    &PagedKv { layer, sequences, .. }: &PagedKv<'a>,
    scope: Scope<'a>,
) -> impl Iterator<Item = Block> + 'a {
    let size = (ROWS / layer.group()).max(1);
    let tiles = |sequence: usize, visible: &Range<usize>| {
        pieces(sequences[sequence].spans, visible.clone()).map(|piece| piece.tiles.len()).sum()
    };
    let (nodes, level, own) = match scope {
        Scope::Common(shared, level) => (&shared.nodes[..], level, &[][..]),
        _ => (&[][..], 0, sequences),
    };
    let common = nodes.iter().filter(move |node| node.level == level).flat_map(move |node| {
        node.queries.clone().step_by(size).map(move |token| Block {
            sequence: node.sequence,
            // After everything that they see.
            position: node.tokens.end,
            token,
            queries: size.min(node.queries.end - token),
            continues: level > 0,
            alone: node.queries.len() <= size,
            visible: node.tokens.clone(),
            tiles: tiles(node.sequence, &node.tokens),
        })
    });
    let mut first_token = 0;
    let own = own.iter().enumerate().flat_map(move |(sequence, table)| {
        let new = table.new_tokens as usize;
        let start = table.len() - new;
        let token = first_token;
        first_token += new;
        let (from, end) = match scope {
            Scope::Before(ends) => (0, ends[sequence]),
            Scope::From(starts) => (starts[sequence], usize::MAX),
            Scope::All | Scope::Common(..) => (0, usize::MAX),
        };
        (0..new).step_by(size).map(move |first| {
            let queries = size.min(new - first);
            let position = start + first;
            let Range { start, end: seen } = layer.visible(position..position + queries);
            let visible = start.max(from)..end.min(seen);
            let tiles = tiles(sequence, &visible);
            let (continues, alone) = (from > 0, new <= size);
            Block { sequence, position, token: token + first, queries, continues, alone, visible, tiles }
        })
    });
    common.chain(own)
}

impl Plan {
    /// Plans a pass over a batch for `threads` threads; with `part` only these runs, each an item of every group.
    pub(crate) fn make(
        &mut self,
        kv: &PagedKv<'_>,
        scope: Scope<'_>,
        threads: usize,
        deterministic: bool,
        part: Option<&Range<usize>>,
    ) {
        self.groups.clear();
        self.items.clear();
        (self.floats, self.carried) = (0, 0);
        let layer = kv.layer;
        let kv_heads = layer.geometry.num_kv_heads as usize;
        let cost =
            |block: &Block| block.tiles * kv_heads * (block.queries * layer.group()).div_ceil(UNIT_ROWS);
        let total: usize = blocks(kv, scope).map(|block| cost(&block)).sum();
        self.workers = threads.min(total.div_ceil(WAKE_COST)).max(1);
        let target = if self.workers == 1 { total } else { total.div_ceil(self.workers * ITEMS_PER_THREAD) };
        for block in blocks(kv, scope) {
            let wanted = cost(&block).div_ceil(target.max(1));
            self.push(kv, &block, wanted, deterministic, part);
        }
    }

    /// Adds the groups and items of a block, about `wanted` of them.
    fn push(
        &mut self,
        kv: &PagedKv<'_>,
        block: &Block,
        wanted: usize,
        deterministic: bool,
        part: Option<&Range<usize>>,
    ) {
        let layer = kv.layer;
        let kv_heads = layer.geometry.num_kv_heads as usize;
        let rows = block.queries * layer.group();
        // If reading takes most of the time, all heads of a page are read together: they are one stream.
        let most = if block.alone { (ROWS / rows).clamp(1, kv_heads) } else { 1 };
        let cuts = wanted.div_ceil(kv_heads.div_ceil(most));
        let parts = match (cuts, deterministic) {
            _ if part.is_some() => runs(kv.sequences, block, part).count(),
            (0 | 1, _) => 1,
            (_, true) => runs(kv.sequences, block, None).count().max(1),
            (_, false) => cuts.min(block.tiles / ITEM_TILES).max(1),
        };
        // All parts of a batch have the same groups.
        let heads =
            if part.is_some() { most } else { (kv_heads / wanted.div_ceil(parts).max(1)).clamp(1, most) };
        for first in (0..kv_heads).step_by(heads) {
            let heads = first..kv_heads.min(first + heads);
            let floats = state_floats(rows * heads.len(), layer);
            let group = self.groups.len();
            self.groups.push(Group {
                sequence: block.sequence,
                position: block.position,
                token: block.token,
                queries: block.queries,
                continues: block.continues,
                heads,
                visible: block.visible.clone(),
                parts,
                offset: self.floats,
                pending: AtomicU32::new(parts as u32),
                carried: self.carried,
            });
            self.carried += floats;
            if parts == 1 && part.is_none() {
                self.items.push(Item { group, part: 0, tiles: 0..block.tiles });
                continue;
            }
            self.floats += parts * floats;
            if deterministic || part.is_some() {
                let items = runs(kv.sequences, block, part).enumerate();
                self.items.extend(items.map(|(part, tiles)| Item { group, part, tiles }));
            } else {
                let cut = |part: usize| block.tiles * part / parts;
                self.items.extend((0..parts).map(|part| Item {
                    group,
                    part,
                    tiles: cut(part)..cut(part + 1),
                }));
            }
        }
    }
}

/// The fixed runs of a block, or those of them in `part`, as tiles counted over all its pieces.
fn runs<'a>(
    sequences: &'a [SequenceTable<'_>],
    block: &Block,
    part: Option<&'a Range<usize>>,
) -> impl Iterator<Item = Range<usize>> + 'a {
    let mut counted = 0;
    pieces(sequences[block.sequence].spans, block.visible.clone()).flat_map(move |piece| {
        let (seen, Range { start, end }) = (piece.runs(), piece.tiles.clone());
        let base = counted;
        counted += end - start;
        seen.filter(move |&run| part.is_none_or(|part| part.contains(&piece.place(run)))).map(move |run| {
            let (low, high) = ((run * RUN_TILES).max(start), ((run + 1) * RUN_TILES).min(end));
            base + low - start..base + high - start
        })
    })
}

/// Floats of the state of `rows` query rows: values, maxima and sums.
pub(crate) fn state_floats(rows: usize, layer: &Layer) -> usize {
    rows * value_stride(layer) + 2 * rows.next_multiple_of(ALIGN)
}

/// Floats from one row of values to the next.
pub(crate) fn value_stride(layer: &Layer) -> usize {
    (layer.geometry.v_head_dim as usize).next_multiple_of(ALIGN)
}
