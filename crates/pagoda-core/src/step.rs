//! One forward pass over a ragged batch: reserve, then (outside) append and attend, then commit or roll back.

use crate::cache::{Cache, Group, GroupKind};
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::ids::{BlockId, BlockRef, Epoch, GroupId, PageId, SequenceId, Tier};
use crate::limits;
use crate::plan::BlockCopy;
use crate::table::SpanView;

/// The open step, and the memory that steps reuse.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) phase: Phase,
    pub(crate) entries: Vec<Entry>,
    /// What to take back if the step fails: one per entry and layer group.
    pub(crate) undo: Vec<Undo>,
    copies: Vec<BlockCopy>,
    /// What is missing so far: the first group that is short, then blocks and bytes over all groups.
    short: Option<(GroupId, u64, u64)>,
}

/// Where a step stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No step.
    #[default]
    Closed,
    /// Being reserved: no kernel has seen its blocks.
    Entering,
    /// Between reserve and commit.
    Open,
}

/// One sequence of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) sequence: SequenceId,
    pub(crate) new_tokens: u32,
}

/// How one table was before the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Undo {
    pub(crate) pages: u32,
    /// The tail page that a copy has replaced. It keeps its reference until the step ends.
    pub(crate) replaced: Option<PageId>,
    /// A tail page that is appended to in place although it held more tokens than were in use, and how many it held.
    reopened: Option<(PageId, u32)>,
}

impl Cache {
    /// Opens a step: takes pages for `new_tokens` more tokens of each sequence, updates their tables, and lists the copies of
    /// shared open pages to make before the first append. All or nothing, from free blocks only.
    pub fn reserve(&mut self, batch: &[(SequenceId, u32)]) -> Result<()> {
        if self.step.phase != Phase::Closed {
            return Err(Error::invalid(
                "step",
                "open",
                "one open step per cache: commit or roll it back first",
            ));
        }
        self.settle();
        self.step.entries.clear();
        self.step.undo.clear();
        self.step.copies.clear();
        self.step.phase = Phase::Entering;
        let result = self.enter(batch);
        if result.is_err() {
            self.leave(None);
        } else {
            self.step.phase = Phase::Open;
        }
        result
    }

    fn enter(&mut self, batch: &[(SequenceId, u32)]) -> Result<()> {
        let total = batch.iter().map(|&(_, new_tokens)| u64::from(new_tokens)).sum::<u64>();
        if total > limits::TOKENS_PER_STEP_MAX {
            let limit = format!("at most {} of all sequences together", limits::TOKENS_PER_STEP_MAX);
            return Err(Error::invalid("new_tokens", total, limit));
        }
        for &(sequence, new_tokens) in batch {
            if self.sequences.get(sequence)?.stepping {
                // No other step is open, so the sequence is in this batch twice.
                return Err(Error::invalid("sequences", sequence, "each of them once"));
            }
            let slot = &mut self.sequences[sequence];
            let end = slot.tables[0].last().end_position() + u64::from(new_tokens);
            if end > limits::TOKENS_PER_SEQUENCE_MAX {
                let limit = format!("at most {} positions in a sequence", limits::TOKENS_PER_SEQUENCE_MAX);
                return Err(Error::invalid("new_tokens", new_tokens, limit));
            }
            slot.stepping = true;
            self.step.entries.push(Entry { sequence, new_tokens });
        }
        for index in 0..self.step.entries.len() {
            let Entry { sequence, new_tokens } = self.step.entries[index];
            for group in self.group_ids() {
                self.refresh_row(sequence, group);
                let table = &self.sequences[sequence].tables[group.index()];
                let pages = table.pages.len() as u32;
                self.step.undo.push(Undo { pages, replaced: None, reopened: None });
                if new_tokens > 0 {
                    match self.groups[group.index()].kind {
                        GroupKind::Paged { page_size } => self.extend(sequence, group, new_tokens, page_size),
                        GroupKind::State => self.push_pages(sequence, group, 1),
                    }
                }
            }
        }
        match self.step.short.take() {
            None => Ok(()),
            Some((group, blocks_short, bytes_short)) => {
                let (tier, draining) = (Tier::Device, self.draining(Tier::Device, group));
                Err(Error::OutOfBlocks { tier, group, blocks_short, bytes_short, draining })
            }
        }
    }

    /// Makes room for `new_tokens` at the end of a table.
    fn extend(&mut self, sequence: SequenceId, group: GroupId, new_tokens: u32, page_size: u32) {
        let table = &self.sequences[sequence].tables[group.index()];
        let room = table.last_pages() * page_size - table.last().rows();
        if room > 0 {
            let tail = table.page(table.pages.len() as u32 - 1);
            self.open_tail(sequence, group, tail, page_size - room);
        }
        self.push_pages(sequence, group, new_tokens.saturating_sub(room).div_ceil(page_size));
    }

    /// Makes the tail page of a table writable after its first `used` tokens: in place if nobody else can see it, otherwise
    /// in a copy.
    fn open_tail(&mut self, sequence: SequenceId, group: GroupId, tail: PageId, used: u32) {
        let sole = self.pages.references(tail) == 1;
        let page = &mut self.pages[tail];
        if sole && page.copies == 0 && page.only_on_device() {
            if page.fill != used {
                page.generation = page.generation.wrapping_add(1);
                let fill = std::mem::replace(&mut page.fill, used);
                page.sealed = false;
                self.step.undo.last_mut().expect("pushed by enter").reopened = Some((tail, fill));
            }
            return;
        }
        let from = page.fastest().expect("a referenced page can be read");
        let Some(block) = self.arenas[Tier::Device.index()].take(group) else {
            return self.lack(group, 1);
        };
        self.step.copies.push(self.block_copy(group, (from.tier(), from.block()), (Tier::Device, block)));
        let copy = self.pages.open(group, block);
        self.pages[copy].fill = used;
        let table = &mut self.sequences[sequence].tables[group.index()];
        table.replace_last(copy, BlockRef::new(Tier::Device, block));
        self.step.undo.last_mut().expect("pushed by enter").replaced = Some(tail);
    }

    fn push_pages(&mut self, sequence: SequenceId, group: GroupId, count: u32) {
        for pushed in 0..count {
            let Some(block) = self.arenas[Tier::Device.index()].take(group) else {
                return self.lack(group, count - pushed);
            };
            let page = self.pages.open(group, block);
            let table = &mut self.sequences[sequence].tables[group.index()];
            table.push(page, BlockRef::new(Tier::Device, block));
        }
    }

    /// Notes that blocks are missing. If one is missing, so are all that follow: no block of a group is freed while its pages
    /// are reserved.
    fn lack(&mut self, group: GroupId, count: u32) {
        let (_, blocks, bytes) = self.step.short.get_or_insert((group, 0, 0));
        *blocks += u64::from(count);
        *bytes =
            bytes.saturating_add(u64::from(count).saturating_mul(self.groups[group.index()].block_bytes));
    }

    /// Brings a row up to date after pages of its group have moved.
    fn refresh_row(&mut self, sequence: SequenceId, group: GroupId) {
        let placement = self.placement[group.index()];
        let table = &mut self.sequences[sequence].tables[group.index()];
        if table.placement == placement {
            return;
        }
        table.reaches_disk = false;
        let mut has_changed = false;
        for (at, page) in table.row.iter_mut().zip(&table.pages) {
            let Some(page) = *page else { continue };
            let now = self.pages[page].fastest().expect("a referenced page can be read");
            has_changed |= std::mem::replace(at, now) != now;
            table.reaches_disk |= now.tier() == Tier::Disk;
        }
        table.placement = placement;
        // The pages that moved may all belong to other sequences.
        if has_changed {
            table.row_changed();
        }
    }

    /// Closes the step. Of each sequence's new tokens the first `accepted` stay (all, if `None`); full pages are sealed.
    ///
    /// Returns an epoch to pass to `retire` once the step's kernels have ended.
    pub fn commit(&mut self, accepted: Option<&[u32]>) -> Result<Epoch> {
        self.require_step()?;
        if let Some(accepted) = accepted {
            if accepted.len() != self.step.entries.len() {
                let limit = format!("one entry for each of {} sequences", self.step.entries.len());
                return Err(Error::invalid("accepted", format!("{} entries", accepted.len()), limit));
            }
            let states = self.has_states();
            for (entry, &count) in self.step.entries.iter().zip(accepted) {
                if count > entry.new_tokens || (states && count < entry.new_tokens) {
                    let limit = if states { "exactly" } else { "at most" };
                    let limit =
                        format!("{limit} the {} new tokens of sequence {}", entry.new_tokens, entry.sequence);
                    return Err(Error::invalid("accepted", count, limit));
                }
            }
        }
        Ok(self.leave(Some(accepted)))
    }

    /// Closes the step as if it had never been opened.
    pub fn rollback(&mut self) -> Result<Epoch> {
        self.require_step()?;
        Ok(self.leave(None))
    }

    /// Reports that the work of every step up to `epoch` has ended: blocks that waited for it become free.
    pub fn retire(&mut self, epoch: Epoch) -> Result<()> {
        if epoch > self.epochs.minted() {
            return Err(Error::invalid(
                "epoch",
                epoch.0,
                format!("at most {}, the last one minted", self.epochs.minted().0),
            ));
        }
        self.epochs.retire(epoch);
        self.settle();
        Ok(())
    }

    /// Ends the step: commits it (`Some`, with the accepted tokens) or undoes it (`None`).
    fn leave(&mut self, committed: Option<Option<&[u32]>>) -> Epoch {
        // A step that was refused ran no kernel: its blocks need not drain.
        let epoch = if self.step.phase == Phase::Open { self.epochs.mint() } else { self.epochs.minted() };
        let mut undo = std::mem::take(&mut self.step.undo);
        // With invalid arguments no step began: sequences go on resting as before.
        let has_begun = !undo.is_empty();
        let mut undone = undo.drain(..);
        for index in 0..self.step.entries.len() {
            let Entry { sequence, new_tokens } = self.step.entries[index];
            let accepted = committed.map(|accepted| accepted.map_or(new_tokens, |counts| counts[index]));
            self.sequences[sequence].stepping = false;
            if has_begun {
                self.sequences.rest(sequence);
            }
            self.sequences[sequence].len += u64::from(accepted.unwrap_or(0));
            for group in self.group_ids() {
                // A reserve that failed half way has no undo for the tables it did not reach.
                let Some(before) = undone.next() else { break };
                match accepted {
                    Some(count) => {
                        self.seal(sequence, group, count, before);
                        self.move_window(sequence, group);
                    }
                    None => self.restore(sequence, group, before),
                }
            }
        }
        drop(undone);
        self.step.undo = undo;
        self.step.phase = Phase::Closed;
        epoch
    }

    /// Adds `count` new tokens to a table, and gives back what the step reserved beyond them.
    fn seal(&mut self, sequence: SequenceId, group: GroupId, count: u32, before: Undo) {
        let table = &mut self.sequences[sequence].tables[group.index()];
        table.last_mut().count += count;
        match self.groups[group.index()].kind {
            GroupKind::Paged { page_size } => {
                self.pop_surplus_pages(sequence, group);
                let table = &self.sequences[sequence].tables[group.index()];
                let (span, len) = (table.last(), table.pages.len() as u32);
                let touched = before.pages.saturating_sub(1).max(span.first_page);
                for index in touched..if count > 0 { len } else { touched } {
                    let page = &mut self.pages[table.page(index)];
                    let fill = page_size.min(span.rows() - (index - span.first_page) * page_size);
                    // A page that was sealed before the step may have other holders.
                    if !page.sealed {
                        page.fill = fill;
                        page.sealed = fill == page_size;
                    }
                }
                if let Some(tail) = before.replaced {
                    self.release_page(tail);
                }
            }
            GroupKind::State if count > 0 => {
                let table = &mut self.sequences[sequence].tables[group.index()];
                let written = table.page(table.pages.len() as u32 - 1);
                self.pages[written].sealed = true;
                self.pages[written].fill = 1;
                if before.pages > 0 {
                    table.row_changed();
                    table.row.swap_remove(0);
                    let last = table.pages.swap_remove(0).expect("a version of the state");
                    self.release_page(last);
                }
            }
            GroupKind::State => {}
        }
    }

    /// Lets go of the pages that the group's window has passed.
    fn move_window(&mut self, sequence: SequenceId, group: GroupId) {
        let Group { window: Some(window), .. } = self.groups[group.index()] else { return };
        let page_size = self.groups[group.index()].page_size();
        let from = if self.keeps(Fence::Window) {
            window.keeps_from(self.sequences[sequence].len)
        } else {
            self.sequences[sequence].len.saturating_sub(1)
        };
        let mut table = std::mem::take(&mut self.sequences[sequence].tables[group.index()]);
        table.leave(window.sinks, from, page_size, |page| self.release_page(page));
        self.sequences[sequence].tables[group.index()] = table;
    }

    /// Gives a table back the pages it had before the step.
    fn restore(&mut self, sequence: SequenceId, group: GroupId, before: Undo) {
        self.pop_pages(sequence, group, before.pages);
        if let Some(tail) = before.replaced {
            let at = self.pages[tail].fastest().expect("a referenced page can be read");
            let copy = self.sequences[sequence].tables[group.index()].replace_last(tail, at);
            self.release_page(copy.expect("opened by this step"));
        }
        if let Some((tail, fill)) = before.reopened.filter(|_| self.step.phase == Phase::Entering) {
            // No kernel has seen the page: its bytes are unchanged, and plans for it are valid.
            let page_size = self.groups[group.index()].page_size();
            let page = &mut self.pages[tail];
            page.generation = page.generation.wrapping_sub(1);
            (page.fill, page.sealed) = (fill, fill == page_size);
        }
    }

    fn require_step(&self) -> Result<()> {
        if self.step.phase == Phase::Open {
            return Ok(());
        }
        Err(Error::invalid("step", "closed", "an open step: call reserve first"))
    }

    /// Whether a step is open.
    pub fn step_is_open(&self) -> bool {
        self.step.phase == Phase::Open
    }

    /// The copies of shared open pages to make before the first append of the open step.
    pub fn step_copies(&self) -> &[BlockCopy] {
        &self.step.copies
    }

    /// Pages of the open step's sequences that are on disk. Only searches where there may be one.
    pub fn step_pages_on_disk(&self) -> usize {
        let copies = self.step.copies.iter().filter(|copy| copy.from.0 == Tier::Disk);
        let tables = self.step.entries.iter().flat_map(|entry| &self.sequences[entry.sequence].tables);
        let held =
            tables.filter(|table| table.reaches_disk).flat_map(|table| table.row.iter().zip(&table.pages));
        copies.count() + held.filter(|(at, page)| page.is_some() && at.tier() == Tier::Disk).count()
    }

    /// Whether the `index`-th sequence of the open step may have pages of a group on disk. If false, it has none.
    pub fn step_reaches_disk(&self, index: usize, group: GroupId) -> bool {
        self.sequences[self.step.entries[index].sequence].tables[group.index()].reaches_disk
    }

    /// The batch of the open step: each sequence with its number of new tokens.
    pub fn step_batch(&self) -> impl ExactSizeIterator<Item = (SequenceId, u32)> + Clone + '_ {
        self.step.entries.iter().map(|entry| (entry.sequence, entry.new_tokens))
    }

    /// Where the pages of the `index`-th sequence of the open step are read from, new ones included. For a state: the version
    /// to read, if there is one, then the version to write.
    ///
    /// Also returns the row's `version`: while that stays the same, the row has only grown.
    pub fn step_row(&self, index: usize, group: GroupId) -> (&[BlockRef], u32) {
        let table = &self.sequences[self.step.entries[index].sequence].tables[group.index()];
        (&table.row, table.version)
    }

    /// The spans of the `index`-th sequence of the open step, new tokens included.
    pub fn step_spans(&self, index: usize, group: GroupId) -> impl Iterator<Item = SpanView> + '_ {
        let entry = self.step.entries[index];
        let Group { window, .. } = self.groups[group.index()];
        let page_size = self.groups[group.index()].page_size();
        self.sequences[entry.sequence].tables[group.index()].views(entry.new_tokens, window, page_size)
    }

    /// Where the new tokens of the `index`-th sequence of the open step go: a block of the device and a row of it.
    pub fn step_slots(&self, index: usize, group: GroupId) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let entry = self.step.entries[index];
        let table = &self.sequences[entry.sequence].tables[group.index()];
        let page_size = self.groups[group.index()].page_size();
        let span = table.last();
        (span.rows()..span.rows() + entry.new_tokens).map(move |row| {
            (table.row[(span.first_page + row / page_size) as usize].block(), row % page_size)
        })
    }
}
