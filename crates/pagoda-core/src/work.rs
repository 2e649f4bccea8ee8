//! What attention goes over, as arithmetic: tiles of stored rows, pieces of spans, blocks of queries.
//!
//! Every backend cuts its work along these lines, so that a tile, and in deterministic mode a run, is the same rows of a
//! page whoever computes it.

use std::collections::HashSet;
use std::ops::Range;

use crate::ids::{BlockRef, Tier};
use crate::table::{Sight, SpanView};

/// Stored rows that are worked on together.
pub const TILE: usize = 64;
/// Tiles of a fixed run: 4096 stored rows.
pub const RUN_TILES: usize = RUN_ROWS / TILE;
/// Stored rows of a fixed run.
pub const RUN_ROWS: usize = 4096;

/// The tiles of one span that a range of the token axis touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The span.
    pub span: &'a SpanView,
    /// The axis index of stored row 0 of the span's first page; below 0 where the span skips rows.
    pub origin: isize,
    /// Stored rows of the span that are in the range.
    pub rows: Range<usize>,
    /// Tiles of [`TILE`] stored rows.
    pub tiles: Range<usize>,
    /// Runs of the spans before.
    runs_before: usize,
}

impl Piece<'_> {
    /// Fixed runs of [`RUN_TILES`] tiles that the piece touches.
    pub fn runs(&self) -> Range<usize> {
        self.tiles.start / RUN_TILES..self.tiles.end.div_ceil(RUN_TILES)
    }

    /// Of those rows of the piece that are in `rows`: the places in the sequence's row of their pages, and the row behind.
    fn pages(&self, rows: Range<usize>, page_size: usize) -> (Range<usize>, usize) {
        let first = self.span.first_page as usize;
        let (low, high) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        (first + low / page_size..first + high.div_ceil(page_size), high)
    }

    /// The place of a run of the span among those of the sequence, as [`runs`] counts them.
    pub fn place(&self, run: usize) -> usize {
        self.runs_before + run - span_runs(self.span).start
    }
}

/// Fixed runs that a span has rows in.
fn span_runs(span: &SpanView) -> Range<usize> {
    let (low, high) = (span.skip as usize, (span.skip + span.count) as usize);
    if low == high { 0..0 } else { low / RUN_ROWS..high.div_ceil(RUN_ROWS) }
}

/// The pieces of a sequence that hold a part of `range` of its token axis, and of what every query sees up to the range's end.
pub fn pieces<'a>(spans: &'a [SpanView], range: Range<usize>) -> impl Iterator<Item = Piece<'a>> {
    pieces_from(spans, 0, range)
}

/// The same, but of what every query sees not what lies before `from`.
fn pieces_from<'a>(
    spans: &'a [SpanView],
    from: usize,
    range: Range<usize>,
) -> impl Iterator<Item = Piece<'a>> {
    let (mut start, mut runs) = (0, 0);
    spans.iter().filter_map(move |span| {
        let (first, skip, runs_before) = (start, span.skip as usize, runs);
        start += span.count as usize;
        runs += span_runs(span).len();
        let low = first.max(if span.sight == Sight::Window { range.start } else { from });
        let high = start.min(range.end);
        (low < high).then(|| {
            let rows = low - first + skip..high - first + skip;
            let tiles = rows.start / TILE..rows.end.div_ceil(TILE);
            Piece { span, origin: first as isize - skip as isize, rows, tiles, runs_before }
        })
    })
}

/// The fixed runs with a part of what [`pieces`] gives for `range`: the place of each among those of the sequence, and the
/// places in the sequence's row of the pages that hold that part.
pub fn runs(
    spans: &[SpanView],
    range: Range<usize>,
    page_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    pieces(spans, range).flat_map(move |piece| {
        let rows = |run: usize| run * RUN_ROWS..(run + 1) * RUN_ROWS;
        piece.runs().map(move |run| (piece.place(run), piece.pages(rows(run), page_size).0))
    })
}

/// Stretches of `rows` stored rows of each span: the places of their pages in the sequence's row, and the token behind. Without
/// what lies before token `low`, unless every query sees it.
fn stretches(
    spans: &[SpanView],
    low: usize,
    page_size: usize,
    rows: usize,
) -> impl Iterator<Item = (Range<usize>, u32)> {
    let length = spans.iter().map(|span| span.count as usize).sum();
    pieces(spans, low..length).flat_map(move |piece| {
        let all = piece.rows.start / rows..piece.rows.end.div_ceil(rows);
        all.map(move |index| {
            let (pages, end) = piece.pages(index * rows..(index + 1) * rows, page_size);
            (pages, (end as isize + piece.origin) as u32)
        })
    })
}

/// How many fixed runs a sequence has, over all spans, whoever sees them.
pub fn run_count(spans: &[SpanView]) -> usize {
    spans.iter().map(|span| span_runs(span).len()).sum()
}

/// Consecutive queries of one sequence, or queries of several that hold pages in common, in the layout that device kernels
/// read (cuda/pagoda/unit.cuh).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryBlock {
    /// The sequence's place in the batch.
    pub sequence: i32,
    /// The row of the first query in the batch, or in the list of those who hold common pages.
    pub token: i32,
    /// How many there are.
    pub queries: i32,
    /// The axis index of the first query; for common pages of the last token that they hold.
    pub position: i32,
    /// What of the axis is gone over, from here on of what is seen whatever the window,
    pub from: i32,
    /// of the rest from here on,
    pub low: i32,
    /// up to here.
    pub high: i32,
    /// Where [`WorkList::part_rows`] names the parts that the first query's results begin with,
    pub first_part: i32,
    /// and how many there are.
    pub parts: i32,
    /// The part that the first query's results are to be; below 0 they are results.
    pub target: i32,
}

impl QueryBlock {
    /// Tiles or runs that are gone over.
    fn work(&self, by_runs: bool, spans: &[SpanView]) -> usize {
        pieces_from(spans, self.from as usize, self.low as usize..self.high as usize)
            .map(|piece| if by_runs { piece.runs().len() } else { piece.tiles.len() })
            .sum()
    }
}

/// What of a sequence is gone over together with others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held<'a> {
    /// The tokens below this.
    pub end: u32,
    /// The places of its first new token in the lists of those who hold common pages, in token order.
    pub rows: &'a [i32],
}

/// How a batch is cut into query blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Queries of a block at most.
    pub queries: u32,
    /// Tokens that a query sees at most, itself included.
    pub window: Option<u32>,
    /// Whether work is counted in fixed runs, and not in tiles.
    pub by_runs: bool,
}

/// The query blocks of a batch, and before each the work of those before it, for one K/V head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkList {
    /// The blocks.
    pub blocks: Vec<QueryBlock>,
    /// One entry more than blocks.
    pub prefix: Vec<i32>,
    /// Parts that results begin with, block after block: where the first query's are. Of common pages, its place in the list
    /// of those who hold them.
    pub part_rows: Vec<i32>,
}

impl WorkList {
    /// Starts over, keeping the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.prefix.clear();
        self.prefix.push(0);
        self.part_rows.clear();
    }

    /// Adds the blocks of the sequence at place `sequence` of the batch, whose `new_tokens` last tokens are the queries and
    /// begin at row `token`; not what it holds in common with others.
    pub fn push(
        &mut self,
        cut: Cut,
        sequence: u32,
        token: u32,
        spans: &[SpanView],
        new_tokens: u32,
        held: Held<'_>,
    ) {
        let length: u32 = spans.iter().map(|span| span.count).sum();
        for first in (0..new_tokens).step_by(cut.queries as usize) {
            let queries = cut.queries.min(new_tokens - first);
            let position = length - new_tokens + first;
            let low = cut.window.map_or(0, |window| (position + 1).saturating_sub(window)).max(held.end);
            let block = QueryBlock {
                sequence: sequence as i32,
                token: (token + first) as i32,
                queries: queries as i32,
                position: position as i32,
                from: 0,
                low: low as i32,
                high: (position + queries) as i32,
                first_part: self.part_rows.len() as i32,
                parts: held.rows.len() as i32,
                target: -1,
            };
            self.part_rows.extend(held.rows.iter().map(|row| row + first as i32));
            self.add(block, block.work(cut.by_runs, spans));
        }
    }

    /// Adds the blocks that go over `tokens` of the sequence at place `sequence`, for the `queries` queries from `first` on
    /// of those who hold these pages.
    pub fn push_common(
        &mut self,
        cut: Cut,
        sequence: u32,
        spans: &[SpanView],
        tokens: Range<u32>,
        queries: Range<u32>,
    ) {
        for first in queries.clone().step_by(cut.queries as usize) {
            let block = QueryBlock {
                sequence: sequence as i32,
                token: first as i32,
                queries: cut.queries.min(queries.end - first) as i32,
                position: tokens.end as i32 - 1,
                from: 0,
                low: tokens.start as i32,
                high: tokens.end as i32,
                first_part: 0,
                parts: 0,
                target: first as i32,
            };
            self.add(block, block.work(cut.by_runs, spans));
        }
    }

    /// Adds each block of a list to the lists of the passes that go over some of its work. From pass to pass its parts are
    /// carried in two rows a query, by turns, which begin at row `carried`; `queries`: of all blocks together. Behind these rows is
    /// one more for each query, for what is computed elsewhere: where there is some, results begin with it in the last pass.
    pub fn split<'a>(
        &self,
        passes: &Passes,
        by_runs: bool,
        spans: impl Fn(usize) -> &'a [SpanView],
        carried: u32,
        queries: u32,
        lists: &mut [WorkList],
    ) {
        for whole in &self.blocks {
            let sequence = whole.sequence as usize;
            let mut begin = &self.part_rows[whole.first_part as usize..][..whole.parts as usize];
            let rows = [0, 1].map(|turn| [(carried + turn * queries) as i32 + whole.token]);
            let mut turn = 0;
            for (pass, list) in lists.iter_mut().enumerate() {
                let tokens = passes.tokens(pass, sequence);
                let mut block = QueryBlock {
                    from: tokens.start as i32,
                    low: whole.low.max(tokens.start as i32),
                    high: whole.high.min(tokens.end.min(i32::MAX as u32) as i32),
                    first_part: list.part_rows.len() as i32,
                    parts: begin.len() as i32,
                    ..*whole
                };
                let work = block.work(by_runs, spans(sequence));
                if work == 0 {
                    continue;
                }
                let ends = block.high == whole.high;
                list.part_rows.extend_from_slice(begin);
                if !ends {
                    block.target = rows[turn][0];
                } else if passes.begin(sequence) > 0 {
                    list.part_rows.push((carried + 2 * queries) as i32 + whole.token);
                    block.parts += 1;
                }
                list.add(block, work);
                if ends {
                    break;
                }
                begin = &rows[turn];
                turn = 1 - turn;
            }
        }
    }

    fn add(&mut self, block: QueryBlock, work: usize) {
        self.blocks.push(block);
        let before = self.prefix.last().copied().unwrap_or(0);
        self.prefix.push(before + work as i32);
    }
}

/// A sequence as passes are planned for it.
#[derive(Clone, Copy, Debug)]
pub struct Scanned<'a> {
    /// Its spans,
    pub spans: &'a [SpanView],
    /// and where its pages are read from.
    pub row: &'a [BlockRef],
    /// What lies before this is seen by no query, unless all see it.
    pub low: u32,
    /// The axis index of its first query.
    pub queries: u32,
    /// Whether what its queries see may be computed in two places.
    pub divisible: bool,
}

/// How the pages of the slower tier are divided between the ways to them. What is left is brought.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Of the first of divisible sequences, as far as all lie there: computed elsewhere, where they are.
    pub elsewhere: f64,
    /// Of all others: read in place.
    pub in_place: f64,
}

/// How a batch is gone over where pages that are not on the device are brought a few at a time: in passes, each over a stretch of
/// every sequence, so that those of its pages fit a space. Of one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passes {
    /// The blocks that each pass brings, of the host tier first, in ascending order.
    pub blocks: Vec<Vec<BlockRef>>,
    /// For each entry of a sequence's row that is brought: the sequence, the entry, and its block's place in its pass.
    pub entries: Vec<(u32, u32, u32)>,
    /// Of each sequence, entries of that tier that are read in place.
    pub in_place: Vec<u32>,
    /// `[sequence]`: the token before which all is computed elsewhere.
    begins: Vec<u32>,
    /// `[pass][sequence]`: the token that the pass ends before; the last pass has none, it goes to the end.
    ends: Vec<u32>,
}

impl Passes {
    /// Plans passes of at most `capacity` blocks that are brought. Sequences advance by stretches of `stretch` stored rows, which have to
    /// fit, and by turns: pages that several hold at the same place come together, and of those that hold common pages the
    /// first in the batch is never behind.
    ///
    /// What is computed elsewhere are the first stretches of a sequence that all of its queries come behind. One more
    /// pass, the last, then goes over the stretches with queries of these sequences. It brings nothing, and no other has to wait for
    /// what is computed elsewhere.
    pub fn plan(
        sequences: &[Scanned<'_>],
        page_size: usize,
        stretch: usize,
        capacity: usize,
        shares: Shares,
    ) -> Self {
        let all = |index: usize| {
            let Scanned { spans, low, .. } = sequences[index];
            stretches(spans, low as usize, page_size, stretch)
        };
        let on = |tier: Tier, row: &[BlockRef], entries: &Range<usize>| {
            row[entries.clone()].iter().filter(|at| at.tier() == tier).count()
        };
        // What the last pass goes over has to be there.
        let divisible = |index: usize| {
            let Scanned { row, queries, divisible, .. } = sequences[index];
            divisible && all(index).all(|(entries, end)| end <= queries || on(Tier::Disk, row, &entries) == 0)
        };
        let mut rest: Vec<_> = (0..sequences.len()).map(|index| all(index).peekable()).collect();
        let mut begins = vec![0; sequences.len()];
        let mut due = 0.0;
        for (index, scanned) in sequences.iter().enumerate().filter(|(index, _)| divisible(*index)) {
            let could_be = |(entries, end): &(Range<usize>, u32)| {
                on(Tier::Host, scanned.row, entries) == entries.len() && *end <= scanned.queries
            };
            let pages: usize = all(index).take_while(could_be).map(|(entries, _)| entries.len()).sum();
            due += shares.elsewhere * pages as f64;
            while let Some((entries, end)) =
                rest[index].next_if(|stretch| could_be(stretch) && due >= stretch.0.len() as f64)
            {
                due -= entries.len() as f64;
                begins[index] = end;
            }
        }
        let mut passes = Self { in_place: vec![0; sequences.len()], ..Self::default() };
        let mut ends = begins.clone();
        passes.begins = begins;
        let (mut blocks, mut entries) = (HashSet::new(), Vec::new());
        let (mut left, mut open, mut due) = (true, false, 0.0);
        while left {
            left = false;
            for (index, (stretches, scanned)) in rest.iter_mut().zip(sequences).enumerate() {
                let joined = passes.begins[index] > 0;
                let next = stretches.next_if(|(_, end)| !joined || *end <= scanned.queries);
                let Some((places, end)) = next else { continue };
                left = true;
                let row = scanned.row;
                let pages = on(Tier::Host, row, &places);
                due += shares.in_place * pages as f64;
                if pages > 0 && due >= pages as f64 && on(Tier::Disk, row, &places) == 0 {
                    due -= pages as f64;
                    passes.in_place[index] += pages as u32;
                } else {
                    let brought = places.filter(|&entry| row[entry].tier() != Tier::Device);
                    let new = brought.clone().filter(|&entry| !blocks.contains(&row[entry]));
                    let more = new.count();
                    debug_assert!(more <= capacity, "a stretch fits");
                    if blocks.len() + more > capacity {
                        passes.close(&mut blocks, &mut entries, sequences, &ends);
                    }
                    blocks.extend(brought.clone().map(|entry| row[entry]));
                    entries.extend(brought.map(|entry| (index as u32, entry as u32)));
                }
                (ends[index], open) = (end, true);
            }
        }
        if open && passes.begins.iter().any(|&begin| begin > 0) {
            passes.close(&mut blocks, &mut entries, sequences, &ends);
        }
        for (index, stretches) in rest.into_iter().enumerate() {
            let pages: usize =
                stretches.map(|(entries, _)| on(Tier::Host, sequences[index].row, &entries)).sum();
            passes.in_place[index] += pages as u32;
        }
        ends.fill(u32::MAX);
        passes.close(&mut blocks, &mut entries, sequences, &ends);
        passes
    }

    /// The tokens of a sequence that a pass goes over.
    pub fn tokens(&self, pass: usize, sequence: usize) -> Range<u32> {
        let end = |pass: usize| self.ends[pass * self.begins.len() + sequence];
        (if pass == 0 { self.begin(sequence) } else { end(pass - 1) })..end(pass)
    }

    /// The token of a sequence before which all is computed elsewhere.
    pub fn begin(&self, sequence: usize) -> u32 {
        self.begins[sequence]
    }

    /// Ends a pass.
    fn close(
        &mut self,
        blocks: &mut HashSet<BlockRef>,
        entries: &mut Vec<(u32, u32)>,
        sequences: &[Scanned<'_>],
        ends: &[u32],
    ) {
        let order = |block: &BlockRef| (block.tier(), block.block());
        let mut blocks: Vec<_> = blocks.drain().collect();
        blocks.sort_unstable_by_key(order);
        self.entries.extend(entries.drain(..).map(|(sequence, entry)| {
            let block = &sequences[sequence as usize].row[entry as usize];
            let place = blocks.binary_search_by_key(&order(block), order).expect("brought");
            (sequence, entry, place as u32)
        }));
        self.blocks.push(blocks);
        self.ends.extend_from_slice(ends);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockId;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Spans one after the other, each from its own page on.
    fn spans() -> impl Strategy<Value = Vec<SpanView>> {
        let parts = proptest::collection::vec((0u32..200, 1u32..9000), 1..5);
        (parts, 0usize..3).prop_map(|(parts, sinks)| {
            let mut first_page = 0;
            let span = |(index, (skip, count)): (usize, (u32, u32))| {
                let sight = if index < sinks { Sight::Always } else { Sight::Window };
                let position = skip.into();
                let view = SpanView { first_page, skip, count, position, offset: 0, sight };
                first_page += (skip + count).div_ceil(16);
                view
            };
            parts.into_iter().enumerate().map(span).collect()
        })
    }

    proptest! {
        /// Token by token: which tiles and runs of which span the queries of a block see.
        #[test]
        fn blocks_cover_what_their_queries_see(
            spans in spans(),
            new in 1u32..300,
            queries in 1u32..70,
            window in proptest::option::of(1u32..10_000),
            by_runs: bool,
            held in 0u32..100,
        ) {
            let length: u32 = spans.iter().map(|span| span.count).sum();
            let new = new.min(length);
            let mut work = WorkList::default();
            work.clear();
            let end = length - new;
            let held = Held { end: end / 100 * held, rows: &[70, 90][..usize::from(held > 0)] };
            work.push(Cut { queries, window, by_runs }, 3, 1000, &spans, new, held);
            prop_assert_eq!(work.prefix.len(), work.blocks.len() + 1);
            let mut next = length - new;
            for (block, part) in work.blocks.iter().zip(work.prefix.windows(2)) {
                prop_assert_eq!(block.position as u32, next);
                prop_assert_eq!(block.token as u32, 1000 + next - (length - new));
                prop_assert!(block.queries as u32 <= queries && block.sequence == 3);
                let rows = &work.part_rows[block.first_part as usize..][..block.parts as usize];
                let expected: Vec<i32> = held.rows.iter().map(|row| row + block.token - 1000).collect();
                prop_assert_eq!(rows, expected);
                next += block.queries as u32;
                let mut seen = BTreeSet::new();
                let mut start = 0;
                for (index, span) in spans.iter().enumerate() {
                    for row in 0..span.count {
                        let token = start + row;
                        let visible = (block.position as u32..next).any(|query| {
                            let sink = span.sight == Sight::Always;
                            token <= query
                                && (sink || token >= held.end && window.is_none_or(|window| token + window > query))
                        });
                        if visible {
                            let tile = (span.skip + row) as usize / TILE;
                            seen.insert((index, if by_runs { tile / RUN_TILES } else { tile }));
                            prop_assert!(token >= block.low as u32 || span.sight == Sight::Always);
                        }
                    }
                    start += span.count;
                }
                prop_assert_eq!((part[1] - part[0]) as usize, seen.len());
            }
            prop_assert_eq!(next, length);
        }

        /// Two sequences that hold the same first pages and go on alone: each pass brings what its part of every block needs, and
        /// no more than fits; parts cover what the whole block sees, one after the other, each beginning with what the one before
        /// has made.
        #[test]
        fn passes_bring_what_is_gone_over(
            spans in spans(),
            shared in 0usize..700,
            tiers in proptest::collection::vec(0usize..3, 40),
            windows in [proptest::option::of(1u32..10_000), proptest::option::of(1u32..10_000)],
            new in [1u32..200, 1u32..200],
            by_runs: bool,
            room in 0usize..300,
            elsewhere in prop_oneof![Just(0.0), 0.0..1.0, Just(1.0)],
            in_place in prop_oneof![Just(0.0), 0.0..1.0, Just(1.0)],
            divisible: [bool; 2],
        ) {
            const PAGE: usize = 16;
            let stretch = if by_runs { RUN_ROWS } else { TILE };
            let capacity = stretch / PAGE + room;
            let length: u32 = spans.iter().map(|span| span.count).sum();
            let new = new.map(|new| new.min(length));
            let pages = spans.iter().map(|span| span.first_page as usize + ((span.skip + span.count) as usize).div_ceil(PAGE));
            let pages = pages.max().expect("a span");
            let page = |sequence: usize, entry: usize| {
                let tier = Tier::ALL[tiers[entry / 11 % 40]];
                BlockRef::new(tier, BlockId::new((entry + if entry < shared { 0 } else { sequence * 10_000 }) as u32))
            };
            let rows = [0, 1].map(|sequence| (0..pages).map(|entry| page(sequence, entry)).collect::<Vec<_>>());
            let low = |i: usize| windows[i].map_or(0, |window| (length - new[i] + 1).saturating_sub(window));
            let scanned = [0, 1].map(|i| {
                let (low, queries, divisible) = (low(i), length - new[i], divisible[i]);
                Scanned { spans: &spans, row: &rows[i], low, queries, divisible }
            });
            let shares = Shares { elsewhere, in_place };
            let passes = Passes::plan(&scanned, PAGE, stretch, capacity, shares);
            let begins = [0, 1].map(|i| passes.begin(i));
            for pass in 0..passes.blocks.len() {
                let ahead = passes.tokens(pass, 0).end >= passes.tokens(pass, 1).end;
                prop_assert!(ahead || low(0) != low(1) || begins != [0, 0], "who comes first is never behind");
            }
            let pages = |i: usize, low: usize, end: u32| {
                let seen = pieces(&spans, low..end as usize);
                let entries: Vec<_> = seen
                    .flat_map(|piece| piece.rows.clone().map(move |row| piece.span.first_page as usize + row / PAGE))
                    .collect();
                let on_host = entries.iter().filter(|&&entry| rows[i][entry].tier() == Tier::Host).count();
                (entries.len(), on_host)
            };
            for i in [0, 1] {
                let (all, on_host) = pages(i, low(i) as usize, begins[i]);
                prop_assert!(begins[i] == 0 || divisible[i] && elsewhere > 0.0);
                prop_assert!(all == on_host && begins[i] <= length - new[i], "what is computed elsewhere is there");
            }
            if elsewhere == 1.0 {
                for i in (0..2).filter(|&i| divisible[i]) {
                    // Nothing that could be is left.
                    let (_, next) = stretches(&spans, low(i) as usize, PAGE, stretch)
                        .find(|(_, end)| *end > begins[i])
                        .expect("what has queries");
                    let (all, on_host) = pages(i, low(i) as usize, next);
                    let mut behind = stretches(&spans, low(i) as usize, PAGE, stretch).filter(|(_, end)| *end > length - new[i]);
                    let late = behind.any(|(mut entries, _)| entries.any(|entry| rows[i][entry].tier() == Tier::Disk));
                    prop_assert!(next > length - new[i] || all > on_host || late);
                }
            }
            for blocks in &passes.blocks {
                let ascending = blocks.is_sorted_by(|a, b| (a.tier(), a.block()) < (b.tier(), b.block()));
                prop_assert!(blocks.len() <= capacity && ascending);
            }
            let mut whole = WorkList::default();
            whole.clear();
            let mut token = 0;
            for i in [0, 1] {
                let cut = Cut { queries: 60, window: windows[i], by_runs };
                let held = Held { end: 0, rows: &[70][..i] };
                whole.push(cut, i as u32, token, &spans, new[i], held);
                token += new[i];
            }
            let mut lists = vec![WorkList::default(); passes.blocks.len()];
            lists.iter_mut().for_each(WorkList::clear);
            whole.split(&passes, by_runs, |_| &spans, 100, token, &mut lists);
            let mut unbrought = BTreeSet::new();
            for (number, block) in whole.blocks.iter().enumerate() {
                let mut carried = whole.part_rows[block.first_part as usize..][..block.parts as usize].to_vec();
                let (mut seen, mut target) = (Vec::new(), 0);
                for (pass, list) in lists.iter().enumerate() {
                    prop_assert_eq!(list.prefix.len(), list.blocks.len() + 1);
                    let Some(at) = list.blocks.iter().position(|part| part.token == block.token) else { continue };
                    let part = list.blocks[at];
                    prop_assert_eq!((part.sequence, part.queries, part.position), (block.sequence, block.queries, block.position));
                    let begin = begins[block.sequence as usize];
                    if begin > 0 && part.target < 0 {
                        prop_assert_eq!(pass + 1, lists.len(), "others do not wait for it");
                        carried.push((100 + 2 * token) as i32 + block.token);
                    }
                    prop_assert_eq!(&list.part_rows[part.first_part as usize..][..part.parts as usize], &carried);
                    prop_assert!(!carried.contains(&part.target), "a part is not read while it is written");
                    prop_assert!(target >= 0, "nothing comes behind the end");
                    target = part.target;
                    carried = vec![target];
                    let mut work = 0;
                    for piece in pieces_from(&spans, part.from as usize, part.low as usize..part.high as usize) {
                        let first = piece.span.first_page as usize;
                        work += if by_runs { piece.runs().len() } else { piece.tiles.len() };
                        seen.extend(piece.rows.clone().map(|row| (first, row)));
                        for row in piece.rows.step_by(4) {
                            let entry = first + row / PAGE;
                            let at = rows[block.sequence as usize][entry];
                            if at.tier() != Tier::Device {
                                let one = (block.sequence as u32, entry as u32);
                                let mut entries = passes.entries.iter().filter(|entry| (entry.0, entry.1) == one);
                                let place = passes.blocks[pass].iter().position(|block| *block == at);
                                let brought = entries.any(|entry| place == Some(entry.2 as usize));
                                prop_assert!(brought || at.tier() == Tier::Host, "what is on disk cannot be read there");
                                if !brought {
                                    unbrought.insert(one);
                                }
                            }
                        }
                    }
                    prop_assert_eq!((list.prefix[at + 1] - list.prefix[at]) as usize, work);
                }
                prop_assert_eq!(target, -1);
                let (low, high) = (block.low as usize, block.high as usize);
                let from = begins[block.sequence as usize] as usize;
                let all: Vec<_> = pieces_from(&spans, from, low.max(from)..high)
                    .flat_map(|piece| piece.rows.clone().map(move |row| (piece.span.first_page as usize, row)))
                    .collect();
                prop_assert_eq!(seen, all);
                // Runs are whole, or bits would depend on where pages lie.
                let works = lists.iter().flat_map(|list| list.blocks.iter().zip(list.prefix.windows(2)));
                let parts = works.filter(|(part, _)| part.token == block.token).map(|(_, work)| work[1] - work[0]);
                if from == 0 {
                    prop_assert_eq!(parts.sum::<i32>(), whole.prefix[number + 1] - whole.prefix[number]);
                }
            }
            let in_place: u32 = passes.in_place.iter().sum();
            prop_assert!(unbrought.len() <= in_place as usize);
            let on_disk = passes.blocks.iter().flatten().any(|at| at.tier() == Tier::Disk);
            prop_assert!(shares.in_place < 1.0 || passes.entries.is_empty() || on_disk);
            prop_assert!(shares.in_place > 0.0 || begins != [0, 0] || in_place == 0);
        }
    }
}
