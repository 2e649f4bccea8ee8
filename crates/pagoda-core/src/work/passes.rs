//! How a device attends to pages that are not on it: which are copied to it pass by pass, which are read in place, and which
//! the CPU attends to.

use super::pieces;
use crate::ids::{BlockRef, Tier};
use crate::table::SpanView;
use std::collections::HashSet;
use std::iter;
use std::ops::Range;

/// A sequence for which passes are planned.
#[derive(Clone, Copy, Debug)]
pub struct Scanned<'a> {
    /// Its spans.
    pub spans: &'a [SpanView],
    /// Where its pages are read from.
    pub row: &'a [BlockRef],
    /// No query sees a token before this one, except those that all queries see.
    pub low: u32,
    /// The axis index of its first query.
    pub queries: u32,
    /// Whether the tokens that its queries see may be divided between the device and the CPU.
    pub divisible: bool,
}

impl Scanned<'_> {
    /// Stretches of `rows` stored rows of each span that queries see: the entries of their pages in the row, and the token
    /// after them.
    fn stretches(&self, page_size: usize, rows: usize) -> impl Iterator<Item = (Range<usize>, u32)> {
        stretches(self.spans, self.low as usize, page_size, rows)
    }

    /// How many of these entries of the row are on a tier.
    fn pages_on(&self, tier: Tier, entries: &Range<usize>) -> usize {
        self.row[entries.clone()].iter().filter(|at| at.tier() == tier).count()
    }
}

/// How the pages of the host tier are divided among the ways to reach them, as fractions. The rest are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Of the first pages of divisible sequences, up to one on another tier: the fraction that the CPU attends to where they
    /// lie.
    pub on_cpu: f64,
    /// Of all others: the fraction that kernels read in place.
    pub in_place: f64,
}

/// How a batch is processed when pages that are not on the device are copied a few at a time: in passes, each over a stretch
/// of every sequence, such that the copied pages fit into a given space. For one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passes {
    /// The blocks that each pass copies, in ascending order, those of the host tier first.
    pub blocks: Vec<Vec<BlockRef>>,
    /// For each entry of a sequence's row that is copied: the sequence, the entry, and the index of its block in its pass.
    pub entries: Vec<(u32, u32, u32)>,
    /// For each sequence, how many pages of the host tier are read in place.
    pub in_place: Vec<u32>,
    /// `[sequence]`: the CPU attends to all tokens before this one.
    begins: Vec<u32>,
    /// `[pass][sequence]`: the token before which the pass ends; in the last pass `u32::MAX`, as it goes to the end.
    ends: Vec<u32>,
}

impl Passes {
    /// Plans passes that copy at most `capacity` blocks each. Sequences take turns and advance by stretches of `stretch`
    /// stored rows, which have to fit. Pages that several sequences hold at the same place are thus copied together, and of
    /// the sequences with common pages the first in the batch is never behind.
    ///
    /// The CPU attends to the first stretches of a sequence, which all end before its first query. One more pass, the last,
    /// then goes over the stretches with queries of these sequences. It copies nothing, and no other pass has to wait for the
    /// CPU.
    pub fn plan(
        sequences: &[Scanned<'_>],
        page_size: usize,
        stretch: usize,
        capacity: usize,
        shares: Shares,
    ) -> Self {
        let begins = begins(sequences, page_size, stretch, shares.on_cpu);
        let rest = sequences.iter().zip(&begins).map(|(scanned, &begin)| {
            scanned.stretches(page_size, stretch).skip_while(move |(_, end)| *end <= begin).peekable()
        });
        let mut rest: Vec<_> = rest.collect();
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
                let pages = scanned.pages_on(Tier::Host, &places);
                due += shares.in_place * pages as f64;
                if pages > 0 && due >= pages as f64 && scanned.pages_on(Tier::Disk, &places) == 0 {
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
                stretches.map(|(entries, _)| sequences[index].pages_on(Tier::Host, &entries)).sum();
            passes.in_place[index] += pages as u32;
        }
        ends.fill(u32::MAX);
        passes.close(&mut blocks, &mut entries, sequences, &ends);
        passes
    }

    /// The tokens of a sequence that a pass processes.
    pub fn tokens(&self, pass: usize, sequence: usize) -> Range<u32> {
        let end = |pass: usize| self.ends[pass * self.begins.len() + sequence];
        (if pass == 0 { self.begin(sequence) } else { end(pass - 1) })..end(pass)
    }

    /// The token of a sequence before which the CPU attends to all tokens.
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

/// For each sequence, the token before which the CPU attends to all tokens: about the fraction `share` of those that it
/// could.
fn begins(sequences: &[Scanned<'_>], page_size: usize, stretch: usize, share: f64) -> Vec<u32> {
    let mut begins = vec![0; sequences.len()];
    let mut due = 0.0;
    for (scanned, begin) in sequences.iter().zip(&mut begins) {
        let all = || scanned.stretches(page_size, stretch);
        // The last pass copies nothing, so its pages must not be on disk.
        let there = |(entries, end)| end <= scanned.queries || scanned.pages_on(Tier::Disk, &entries) == 0;
        if !scanned.divisible || !all().all(there) {
            continue;
        }
        let first = all().take_while(|(entries, end)| {
            scanned.pages_on(Tier::Host, entries) == entries.len() && *end <= scanned.queries
        });
        let first: Vec<_> = first.collect();
        due += share * first.iter().map(|(entries, _)| entries.len()).sum::<usize>() as f64;
        for (entries, end) in first {
            if due < entries.len() as f64 {
                break;
            }
            due -= entries.len() as f64;
            *begin = end;
        }
    }
    begins
}

/// Stretches of `rows` stored rows of each span: the entries of their pages in the sequence's row, and the token after them.
/// Leaves out what lies before token `low`, unless every query sees it. Sinks and a window may meet inside a page, which has
/// one entry for both: the last stretch of the sinks and the first of the window are then one, as a pass brings whole entries.
pub(super) fn stretches(
    spans: &[SpanView],
    low: usize,
    page_size: usize,
    rows: usize,
) -> impl Iterator<Item = (Range<usize>, u32)> {
    let length = spans.iter().map(|span| span.count as usize).sum();
    let of_spans = pieces(spans, low..length).flat_map(move |piece| {
        let all = piece.rows.start / rows..piece.rows.end.div_ceil(rows);
        all.map(move |index| {
            let (pages, end) = piece.pages(index * rows..(index + 1) * rows, page_size);
            (pages, (end as isize + piece.origin) as u32)
        })
    });
    let mut of_spans = of_spans.peekable();
    iter::from_fn(move || {
        let (mut pages, mut end) = of_spans.next()?;
        while let Some((more, behind)) = of_spans.next_if(|(next, _)| next.start < pages.end) {
            (pages.end, end) = (more.end, behind);
        }
        Some((pages, end))
    })
}
