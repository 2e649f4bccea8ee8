//! The whole bookkeeping, checked against itself. Tests call this after every operation.

use crate::cache::{Cache, GroupKind};
use crate::error::{Error, Result};
use crate::ids::{BlockId, GroupId, PageId, Tier};
use crate::pages::Slot;
use crate::table::{Left, Table};
use crate::work::RUN_ROWS;
use std::collections::{HashMap, HashSet};

macro_rules! require {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Error::Invariant(format!($($message)+)));
        }
    };
}

impl Cache {
    /// Checks every invariant of DESIGN section 4 that bookkeeping can see; the first broken one is the error.
    pub fn audit(&mut self) -> Result<()> {
        self.settle();
        self.arenas.iter().try_for_each(|arena| arena.audit())?;
        self.audit_blocks()?;
        self.audit_references()?;
        self.audit_copies()?;
        self.audit_tables()
    }

    /// Every block that is handed out belongs to one page or drains, and no block does both or twice.
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
        for d in self.epochs.draining() {
            require!(
                seen.insert((d.tier, d.group, d.block)),
                "{} block {:?} drains and has an owner",
                d.tier,
                d.block
            );
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

    /// References of pages are what tables, and tails replaced in the open step, add up to.
    fn audit_references(&self) -> Result<()> {
        let mut counts = HashMap::<PageId, u32>::new();
        let tables = self.sequences.iter().flat_map(|(_, sequence)| &sequence.tables);
        let entries = tables.flat_map(Table::held);
        let replaced = self.step.undo.iter().filter_map(|undo| undo.replaced);
        entries.chain(replaced).for_each(|page| *counts.entry(page).or_default() += 1);
        for (id, page) in self.pages.iter() {
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
            require!(page.sealed || page.only_on_device(), "open page {id:?} is not only on the device");
        }
        require!(counts.is_empty(), "tables refer to pages without blocks: {:?}", counts.keys());
        Ok(())
    }

    /// Pages count the moves of live tickets, and only a live ticket fills a block.
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

    /// What left a window is what no query to come may see, and nothing that should have left is there.
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
        let first = sinks + left.count;
        require!(
            window.keeps_from(len) < first + page_size,
            "{name} of {len} tokens still has token {first}, which {window:?} does not keep"
        );
        Ok(())
    }

    /// Spans cover their pages, positions grow, rows agree with pages, and every token lies in a valid row.
    fn audit_tables(&self) -> Result<()> {
        for (id, sequence) in self.sequences.iter() {
            for (group, table) in self.group_ids().zip(&sequence.tables) {
                let name = format!("sequence {} group {}", id.index, group.0);
                self.audit_window(&name, sequence.len, group, table)?;
                let tokens: u64 = table.spans.iter().map(|span| u64::from(span.count)).sum();
                require!(
                    tokens + table.left.count == sequence.len,
                    "{name} has {tokens} tokens of {}, {} have left",
                    sequence.len,
                    table.left.count
                );
                require!(table.row.len() == table.pages.len(), "{name}: row and pages differ in length");
                if table.placement == self.placement[group.index()] {
                    for (at, page) in table.row.iter().zip(&table.pages) {
                        let Some(page) = *page else { continue };
                        let fastest = self.pages[page].fastest();
                        require!(fastest == Some(*at), "{name} reads {at:?}, its page is at {fastest:?}");
                    }
                }
                let GroupKind::Paged { page_size } = self.groups[group.index()].kind else { continue };
                let mut first_page = 0;
                for (index, span) in table.spans.iter().enumerate() {
                    let last = index + 1 == table.spans.len();
                    require!(
                        span.skip / page_size <= RUN_ROWS as u32 / page_size,
                        "{name}: a span begins behind {} rows",
                        span.skip
                    );
                    for entry in 0..span.rows().div_ceil(page_size) {
                        let held = table.pages[(span.first_page + entry) as usize].is_some();
                        require!(
                            held == (entry >= span.skip / page_size),
                            "{name}: entry {entry} of span {index}, which begins behind {} rows, has a page: {held}",
                            span.skip
                        );
                    }
                    require!(
                        span.first_page == first_page,
                        "{name}: span {index} starts at page {}",
                        span.first_page
                    );
                    require!(last || span.count > 0, "{name}: span {index} is empty");
                    first_page += span.rows().div_ceil(page_size);
                    if let Some(next) = table.spans.get(index + 1) {
                        require!(
                            next.position >= span.end_position(),
                            "{name}: positions go back at span {index}"
                        );
                    }
                    for page_index in span.skip / page_size..span.rows().div_ceil(page_size) {
                        let page = &self.pages[table.page(span.first_page + page_index)];
                        let rows = page_size.min(span.rows() - page_index * page_size);
                        require!(
                            page.fill >= rows,
                            "{name} uses {rows} rows of a page that holds {}",
                            page.fill
                        );
                    }
                }
                let pages = table.pages.len() as u32;
                require!(
                    pages == first_page || (sequence.stepping && pages > first_page),
                    "{name} has {pages} pages for {first_page}"
                );
            }
        }
        Ok(())
    }
}
