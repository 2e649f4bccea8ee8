//! The whole bookkeeping, checked against itself. Tests call this after every operation.

use crate::cache::{Cache, GroupKind, uncovered};
use crate::error::{Error, Result};
use crate::ids::{BlockId, BlockRef, GroupId, PageId, Tier};
use crate::limits::TOKENS_PER_SEQUENCE_MAX;
use crate::pages::Slot;
use crate::sequences::Sequence;
use crate::table::{Left, Span, Table};
use crate::work::RUN_ROWS;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

macro_rules! require {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Error::Invariant(format!($($message)+)));
        }
    };
}

impl Cache {
    /// Checks every invariant that bookkeeping can see; the first broken one is the error.
    pub fn audit(&mut self) -> Result<()> {
        self.settle();
        self.arenas.iter().try_for_each(|arena| arena.audit())?;
        self.audit_blocks()?;
        self.audit_references()?;
        self.audit_counters()?;
        self.audit_copies()?;
        self.audit_rests()?;
        self.audit_tables()
    }

    /// Every block that is handed out either belongs to exactly one page or drains.
    fn audit_blocks(&self) -> Result<()> {
        let mut seen = HashSet::<(Tier, GroupId, BlockId)>::new();
        for (id, page) in self.pages.iter() {
            for tier in Tier::ALL {
                let (Slot::Ready { block } | Slot::Filling { block, .. }) = page.slots[tier.index()] else {
                    continue;
                };
                require!(
                    seen.insert((tier, page.group, block)),
                    "{tier} block {block:?} of page {id:?} has two owners"
                );
                require!(
                    self.arenas[tier.index()].is_taken(page.group, block),
                    "{tier} block {block:?} of page {id:?} is free"
                );
            }
        }
        for tail in self.kept.values().flat_map(|kept| &kept.tails) {
            let place = (Tier::Disk, tail.group, tail.block);
            require!(seen.insert(place), "kept block {:?} has two owners", tail.block);
            require!(
                self.arenas[Tier::Disk.index()].is_taken(tail.group, tail.block),
                "kept block {:?} is free",
                tail.block
            );
        }
        let draining = self.epochs.draining().map(|d| (d.tier, d.group, d.block));
        for place in draining.chain(self.freed.iter().flatten().copied()) {
            require!(seen.insert(place), "{} block {:?} drains and has an owner", place.0, place.2);
        }
        for tier in Tier::ALL {
            for group in self.group_ids() {
                let owned = seen.iter().filter(|(t, g, _)| *t == tier && *g == group).count() as u64;
                let taken = self.arenas[tier.index()].taken(group);
                require!(
                    owned == taken,
                    "group {} has {taken} {tier} blocks out, {owned} have an owner",
                    group.0
                );
            }
        }
        Ok(())
    }

    /// The reference counts of pages match the tables and the tails replaced in the open step.
    fn audit_references(&self) -> Result<()> {
        let mut counts = HashMap::<PageId, u32>::new();
        let tables = self.sequences.iter().flat_map(|(_, sequence)| &sequence.tables);
        let entries = tables.flat_map(Table::held);
        let replaced = self.step.undo.iter().filter_map(|undo| undo.replaced);
        entries.chain(replaced).for_each(|page| *counts.entry(page).or_default() += 1);
        let mut kept = HashMap::<PageId, u32>::new();
        let entries = self.kept.values().flat_map(|kept| &kept.tables).flat_map(Table::held);
        entries.for_each(|page| *kept.entry(page).or_default() += 1);
        for (&page, count) in &kept {
            *counts.entry(page).or_default() += count;
            require!(self.pages[page].ready(Tier::Disk).is_some(), "page {page:?} is kept, and not on disk");
        }
        require!(
            self.pages.spread_is_right(),
            "pages on more than one tier are not those that are said to be"
        );
        for (id, page) in self.pages.iter() {
            let (is_kept, counted) = (kept.get(&id).copied().unwrap_or(0), self.pages.kept(id));
            require!(is_kept == counted, "page {id:?} counts {counted} keeps, there are {is_kept}");
            let (held, counted) = (counts.remove(&id).unwrap_or(0), self.pages.references(id));
            require!(held == counted, "page {id:?} counts {counted} references, tables hold {held}");
            require!(
                held > 0 || page.copies > 0,
                "page {id:?} has blocks, but neither references nor copies"
            );
            require!(held == 0 || page.fastest().is_some(), "page {id:?} is referenced and cannot be read");
            let page_size = self.groups[page.group.index()].page_size();
            require!(page.fill <= page_size, "page {id:?} holds {} of {page_size} tokens", page.fill);
            require!(
                page.sealed == (page.fill == page_size),
                "page {id:?} with {} tokens: sealed {}",
                page.fill,
                page.sealed
            );
            let places = Tier::ALL.into_iter().filter(|&tier| page.ready(tier).is_some());
            require!(
                page.sealed || places.eq(page.fastest().map(BlockRef::tier).filter(|&at| at != Tier::Disk)),
                "open page {id:?} is not in one place in memory: {:?}",
                page.slots
            );
        }
        require!(counts.is_empty(), "tables refer to pages without blocks: {:?}", counts.keys());
        Ok(())
    }

    /// Statistics that are kept up to date, or counted only at the ends of spans, match a full recount.
    fn audit_counters(&self) -> Result<()> {
        let referred =
            |least| self.pages.iter().filter(|(id, _)| self.pages.references(*id) >= least).count();
        let (held, shared) = (referred(1) as u64, referred(2) as u64);
        require!(held == self.pages.held(), "{held} pages are held, {} counted", self.pages.held());
        require!(shared == self.shared_pages(), "{shared} pages are shared, {} counted", self.shared_pages());
        let mut covered = HashMap::<PageId, Vec<Range<u32>>>::new();
        let rows = self.paged_tables().flat_map(|(table, page_size)| table.covered(page_size));
        rows.for_each(|(page, rows)| covered.entry(page).or_default().push(rows));
        let dead: u64 = covered
            .into_iter()
            .map(|(page, mut ranges)| {
                ranges.sort_by_key(|range| range.start);
                uncovered(self.pages[page].fill, &ranges)
            })
            .sum();
        require!(dead == self.dead_rows(), "{dead} rows are dead, {} counted", self.dead_rows());
        Ok(())
    }

    /// The copy counts of pages match the moves of live tickets, and only live tickets fill blocks.
    fn audit_copies(&self) -> Result<()> {
        let mut counts = HashMap::<PageId, u16>::new();
        self.tickets.iter().flat_map(|t| &t.moves).for_each(|m| *counts.entry(m.page).or_default() += 1);
        for (id, page) in self.pages.iter() {
            let live = counts.get(&id).copied().unwrap_or(0);
            require!(live == page.copies, "page {id:?} counts {} copies, tickets have {live}", page.copies);
            for slot in page.slots {
                let Slot::Filling { ticket, .. } = slot else { continue };
                require!(self.tickets.iter().any(|t| t.id == ticket), "page {id:?} waits for a dead ticket");
            }
        }
        Ok(())
    }

    /// Every sequence is found by its rest, and no sequence that searches will skip has a page that may move.
    fn audit_rests(&self) -> Result<()> {
        let found: HashMap<_, _> = self.sequences.rests.from(0).map(|(rest, id)| (id, rest)).collect();
        let ways = Tier::ALL.into_iter().flat_map(|from| Tier::ALL.map(|to| (from, to)));
        let (count, counted) = (self.sequences.iter().count() as u64, self.sequence_count());
        require!(count == counted, "there are {count} sequences, and {counted} are counted");
        for (id, sequence) in self.sequences.iter() {
            let (index, rest) = (id.index, sequence.rest);
            require!(found.get(&id) == Some(&rest), "sequence {index} is not found by its rest, {rest}");
            for (group, (from, to)) in
                self.group_ids().flat_map(|group| ways.clone().map(move |way| (group, way)))
            {
                let [first, _] = self.searched[group.index()][from.index()][to.index()];
                // The open step gives it new pages, and a new rest when it ends.
                require!(
                    rest >= first || sequence.stepping || !self.has_movable(id, (from, to), group, false),
                    "sequence {index} has pages of group {} to move from {from} to {to}, and will not be looked through",
                    group.0
                );
            }
        }
        Ok(())
    }

    /// Only tokens that no future query sees have left a window, and none is there that should have left.
    fn audit_window(&self, name: &str, len: u64, group: GroupId, table: &Table) -> Result<()> {
        let (left, page_size) = (table.left, u64::from(self.groups[group.index()].page_size()));
        let Some(window) = self.groups[group.index()].window else {
            require!(left == Left::default(), "{name} has no window, and {left:?} have left");
            return Ok(());
        };
        let sinks = u64::from(window.sinks);
        require!(
            left.count == 0 || (left.after == sinks && window.least_len(left.end()) <= len),
            "{name} of {len} tokens: {left:?} have left, queries to come see the last {}",
            window.tokens
        );
        // Positions have a gap after the sinks, for the tokens that have left.
        let mut token = 0;
        let gap = table.spans.windows(2).find_map(|pair| {
            token += u64::from(pair[0].count);
            (token == sinks).then(|| pair[1].position.saturating_sub(pair[0].end_position()))
        });
        require!(
            sinks == 0 || gap.unwrap_or(0) >= left.count,
            "{name}: behind its {sinks} sinks positions go on by {gap:?}, and {} have left",
            left.count
        );
        let first = sinks + left.count;
        require!(
            window.keeps_from(len) < first + page_size,
            "{name} of {len} tokens still has token {first}, which {window:?} does not keep"
        );
        Ok(())
    }

    /// Checks every table of every sequence.
    fn audit_tables(&self) -> Result<()> {
        for (id, sequence) in self.sequences.iter() {
            check_positions(&format!("sequence {}", id.index), &sequence.tables)?;
            for (group, table) in self.group_ids().zip(&sequence.tables) {
                self.audit_table(
                    &format!("sequence {} group {}", id.index, group.0),
                    sequence,
                    group,
                    table,
                )?;
            }
        }
        Ok(())
    }

    /// Rows agree with pages, and there are as many pages as the spans need.
    fn audit_table(&self, name: &str, sequence: &Sequence, group: GroupId, table: &Table) -> Result<()> {
        require!(table.row.len() == table.pages.len(), "{name}: row and pages differ in length");
        let is_placed = table.placement == self.placement[group.index()];
        for (at, page) in table.row.iter().zip(&table.pages).filter(|_| is_placed) {
            let Some(page) = *page else { continue };
            let fastest = self.pages[page].fastest();
            require!(fastest == Some(*at), "{name} reads {at:?}, its page is at {fastest:?}");
        }
        let fills: Vec<_> = table.pages.iter().map(|page| page.map(|page| self.pages[page].fill)).collect();
        self.check_table(name, sequence.len, group, table, &fills)?;
        let GroupKind::Paged { page_size } = self.groups[group.index()].kind else { return Ok(()) };
        let pages = table.spans.iter().map(|span| span.rows().div_ceil(page_size)).sum::<u32>();
        require!(
            sequence.stepping || fills.len() == pages as usize,
            "{name} has {} pages for {pages}",
            fills.len()
        );
        Ok(())
    }

    /// Spans cover their pages, positions grow, and every token lies in a valid row. `fills` has the number of tokens for
    /// each entry that holds a page. All numbers may be arbitrary: they may come from a file.
    pub(crate) fn check_table(
        &self,
        name: &str,
        len: u64,
        group: GroupId,
        table: &Table,
        fills: &[Option<u32>],
    ) -> Result<()> {
        let most = TOKENS_PER_SEQUENCE_MAX;
        require!(
            table.left.after <= most && table.left.count <= most && !table.spans.is_empty(),
            "{name}: {:?} have left, {} spans are there",
            table.left,
            table.spans.len()
        );
        let fits = |span: &Span| {
            let end = span.position.saturating_add(u64::from(span.count));
            u64::from(span.skip) <= most && end <= most
        };
        require!(table.spans.iter().all(fits), "{name}: a span is beyond limits");
        let tokens: u64 = table.spans.iter().map(|span| u64::from(span.count)).sum();
        require!(
            tokens + table.left.count == len,
            "{name} has {tokens} tokens of {len}, {} have left",
            table.left.count
        );
        self.audit_window(name, len, group, table)?;
        let GroupKind::Paged { page_size } = self.groups[group.index()].kind else { return Ok(()) };
        let mut first_page = 0;
        for (index, span) in table.spans.iter().enumerate() {
            let last = index + 1 == table.spans.len();
            let pages = span.rows().div_ceil(page_size);
            require!(
                span.skip / page_size <= RUN_ROWS as u32 / page_size,
                "{name}: a span begins behind {} rows",
                span.skip
            );
            require!(
                u64::from(span.skip) <= span.position,
                "{name}: span {index} begins at position {}, behind {} rows",
                span.position,
                span.skip
            );
            require!(
                span.first_page == first_page,
                "{name}: span {index} starts at page {}",
                span.first_page
            );
            require!(
                span.count > 0 || (last && span.skip == 0),
                "{name}: span {index} is empty, behind {} rows",
                span.skip
            );
            let entries = first_page as usize..first_page as usize + pages as usize;
            let Some(entries) = fills.get(entries) else {
                return Err(Error::Invariant(format!(
                    "{name} has {} pages, span {index} goes on",
                    fills.len()
                )));
            };
            for (entry, fill) in (0..).zip(entries) {
                require!(
                    fill.is_some() == (entry >= span.skip / page_size),
                    "{name}: entry {entry} of span {index}, which begins behind {} rows, has {fill:?}",
                    span.skip
                );
                let rows = page_size.min(span.rows() - entry * page_size);
                require!(
                    fill.is_none_or(|fill| fill >= rows),
                    "{name} uses {rows} rows of a page that holds {fill:?}"
                );
            }
            first_page += pages;
            if let Some(next) = table.spans.get(index + 1) {
                require!(next.position >= span.end_position(), "{name}: positions go back at span {index}");
            }
        }
        Ok(())
    }
}

/// The groups of a sequence agree on the position of each token that they have, and of the next one.
pub(crate) fn check_positions(name: &str, tables: &[Table]) -> Result<()> {
    for table in &tables[1..] {
        let (mut all, mut others) = (shifts(&tables[0]).peekable(), shifts(table).peekable());
        while let (Some((tokens, shift)), Some((those, other))) = (all.peek(), others.peek()) {
            let (first, end) = (tokens.start.max(those.start), tokens.end.min(those.end));
            require!(
                first >= end || shift == other,
                "{name}: positions are {shift} ahead of token {first} in one group and {other} in another"
            );
            if tokens.end == end {
                all.next();
            } else {
                others.next();
            }
        }
    }
    Ok(())
}

/// The token range of each span (the last one includes the next token), and how far its positions are ahead of its tokens.
fn shifts(table: &Table) -> impl Iterator<Item = (Range<u64>, i64)> {
    let (mut start, last) = (0, table.spans.len() - 1);
    table.spans.iter().enumerate().map(move |(index, span)| {
        let first = start + if start >= table.left.after { table.left.count } else { 0 };
        start += u64::from(span.count);
        let end = first + u64::from(span.count) + u64::from(index == last);
        (first..end, span.position as i64 - first as i64)
    })
}
