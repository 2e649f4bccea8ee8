use super::passes::stretches;
use super::*;
use crate::ids::{BlockId, BlockRef, Tier};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Rows of a page.
const PAGE: usize = 16;

/// Spans one after the other, each from its own page on; but sinks and a window may meet inside a page.
fn spans() -> impl Strategy<Value = Vec<SpanView>> {
    let parts = proptest::collection::vec((0u32..200, prop_oneof![1u32..100, 1u32..9000]), 1..5);
    (parts, 0usize..3, any::<bool>()).prop_map(|(parts, sinks, meet)| {
        let (mut first_page, mut behind) = (0, 0);
        let span = |(index, (skip, count)): (usize, (u32, u32))| {
            let sight = if index < sinks { Sight::Always } else { Sight::Window };
            let position = skip.into();
            let mut view = SpanView { first_page, skip, count, position, offset: 0, sight };
            if meet && index > 0 && index == sinks && behind > 0 {
                (view.first_page, view.skip) = (first_page - 1, behind);
            }
            let rows = view.skip + count;
            (first_page, behind) = (view.first_page + rows.div_ceil(PAGE as u32), rows % PAGE as u32);
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

    /// Two sequences share their first pages and continue alone. Each pass copies what its part of every block needs, and no
    /// more than fits. Parts cover what the whole block sees, one after the other, each beginning with the result of the one
    /// before.
    #[test]
    fn passes_bring_what_is_gone_over(
        spans in spans(),
        shared in 0usize..700,
        tiers in prop_oneof![
            3 => proptest::collection::vec(0usize..3, 40),
            // What the CPU is to attend to, or is read in place, is all there is only where nothing else is in between.
            1 => proptest::collection::vec(0usize..2, 40),
            1 => Just(vec![1; 40]),
        ],
        windows in [proptest::option::of(1u32..10_000), proptest::option::of(1u32..10_000)],
        new in [1u32..200, 1u32..200],
        by_runs: bool,
        room in 0usize..300,
        on_cpu in prop_oneof![Just(0.0), 0.0..1.0, Just(1.0)],
        in_place in prop_oneof![Just(0.0), 0.0..1.0, Just(1.0)],
        divisible: [bool; 2],
    ) {
        let stretch = if by_runs { RUN_ROWS } else { TILE };
        // Sinks and a window may meet.
        let capacity = 2 * stretch / PAGE - 1 + room;
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
        let shares = Shares { on_cpu, in_place };
        let passes = Passes::plan(&scanned, PAGE, stretch, capacity, shares);
        let begins = [0, 1].map(|i| passes.begin(i));
        let places: BTreeSet<_> = passes.entries.iter().map(|&(sequence, entry, _)| (sequence, entry)).collect();
        prop_assert_eq!(places.len(), passes.entries.len(), "an entry has one place");
        for pass in 0..passes.blocks.len() {
            let ahead = passes.tokens(pass, 0).end >= passes.tokens(pass, 1).end;
            prop_assert!(ahead || low(0) != low(1) || begins != [0, 0], "who comes first is never behind");
        }
        for (one, begin) in scanned.iter().zip(begins) {
            check_begin(one, stretch, on_cpu, begin)?;
        }
        let before = |ends: [u32; 2]| {
            let all = |i: usize| stretches(&spans, low(i) as usize, PAGE, stretch).take_while(move |(_, end)| *end <= ends[i]);
            [0, 1].map(|i| all(i).map(|(entries, _)| entries.len()).sum::<usize>()).iter().sum::<usize>() as f64
        };
        let most = on_cpu * before(scanned.map(|one| one.queries));
        prop_assert!(before(begins) <= most + 1e-6, "the CPU attends to no more than its part");
        let waits = passes.blocks.last().expect("a pass").is_empty();
        prop_assert!(begins == [0, 0] || waits, "the pass that waits for the CPU brings nothing");
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
                    let row = &rows[block.sequence as usize];
                    for entry in piece.rows.step_by(4).map(|row| first + row / PAGE) {
                        let one = (block.sequence as u32, entry as u32);
                        if row[entry].tier() != Tier::Device && !is_brought(&passes, pass, one, row[entry]) {
                            prop_assert_eq!(row[entry].tier(), Tier::Host, "what is on disk cannot be read there");
                            unbrought.insert(one);
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
            // Runs are whole: otherwise the bits of results would depend on where pages lie.
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

/// The tokens before `begin`, which the CPU attends to, are on the host. If it may attend to all, none is left that it could.
fn check_begin(
    one: &Scanned<'_>,
    stretch: usize,
    on_cpu: f64,
    begin: u32,
) -> std::result::Result<(), TestCaseError> {
    let &Scanned { spans, row, low, queries, divisible } = one;
    let is_there = |end: u32| {
        let mut seen = pieces(spans, low as usize..end as usize)
            .flat_map(|piece| piece.rows.clone().map(move |row| piece.span.first_page as usize + row / PAGE));
        seen.all(|entry| row[entry].tier() == Tier::Host)
    };
    prop_assert!(begin == 0 || divisible && on_cpu > 0.0);
    prop_assert!(is_there(begin) && begin <= queries, "what the CPU attends to is there");
    if on_cpu == 1.0 && divisible {
        let all = || stretches(spans, low as usize, PAGE, stretch);
        let (_, next) = all().find(|(_, end)| *end > begin).expect("what has queries");
        let mut behind = all().filter(|(_, end)| *end > queries);
        let late = behind.any(|(mut entries, _)| entries.any(|entry| row[entry].tier() == Tier::Disk));
        prop_assert!(next > queries || !is_there(next) || late);
    }
    Ok(())
}

/// Whether a pass copies an entry of a sequence that is read from `at`.
fn is_brought(passes: &Passes, pass: usize, one: (u32, u32), at: BlockRef) -> bool {
    let mut entries = passes.entries.iter().filter(|entry| (entry.0, entry.1) == one);
    let place = passes.blocks[pass].iter().position(|block| *block == at);
    entries.any(|entry| place == Some(entry.2 as usize))
}

/// The longest possible contexts, and more work than 32 bits count.
#[test]
fn work_beyond_the_integers_of_kernels_is_noticed() {
    let count = crate::limits::TOKENS_PER_SEQUENCE_MAX as u32;
    let span = SpanView { first_page: 0, skip: 0, count, position: 0, offset: 0, sight: Sight::Window };
    let cut = Cut { queries: 1 << 14, window: None, by_runs: false };
    let mut list = WorkList::default();
    list.clear();
    list.push(cut, 0, 0, &[span], 63 << 14, Held::default());
    assert_eq!(list.blocks.last().map(|block| block.high), Some(i32::MAX));
    let tiles = list.blocks.iter().map(|block| (block.high as u64).div_ceil(64)).sum::<u64>();
    assert_eq!((list.is_countable(), list.prefix.last().map(|&all| all as u64)), (true, Some(tiles)));
    list.push(cut, 1, 63 << 14, &[span], 2 << 14, Held::default());
    assert!(!list.is_countable() && list.prefix.is_sorted());
}
