//! Sequences, and per layer group the table that leads from a token to its page.

use crate::error::{Error, Result};
use crate::ids::{BlockRef, Epoch, PageId, SequenceId};
use crate::limits;

/// A run of pages whose tokens are contiguous, as a kernel reads it.
///
/// The pages are `row[first_page..]` of the sequence's row; the run begins `skip` tokens into the first of them and
/// holds `count` tokens. `offset` is what `drop` took out behind it: a query at position `p` sees these keys as if it
/// were at `p - offset`. The last span of a sequence has offset 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanView {
    /// Index of the first page in the row.
    pub first_page: u32,
    /// Tokens of the first page that do not belong to the span.
    pub skip: u32,
    /// Tokens in the span.
    pub count: u32,
    /// Positions by which the span has moved towards the end of the sequence.
    pub offset: u64,
}

/// A run of pages whose tokens are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Index of the first page in the table.
    pub(crate) first_page: u32,
    /// Tokens of the first page before the span.
    pub(crate) skip: u32,
    pub(crate) count: u32,
    /// Position that the first token was stored with.
    pub(crate) position: u64,
}

impl Span {
    /// Position after the last token.
    pub(crate) fn end_position(&self) -> u64 {
        self.position + u64::from(self.count)
    }

    /// Tokens from the start of the first page to the end of the span.
    pub(crate) fn rows(&self) -> u32 {
        self.skip + self.count
    }
}

/// The pages of one sequence in one layer group, in token order.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) pages: Vec<PageId>,
    /// Where each page is read from, as of `placement`.
    pub(crate) row: Vec<BlockRef>,
    /// Never empty; only the last one grows. A state has one that counts its tokens and no others.
    pub(crate) spans: Vec<Span>,
    /// The group's placement version that `row` agrees with.
    pub(crate) placement: u32,
    /// Changes whenever `row` changes in another way than by growing.
    pub(crate) version: u32,
}

impl Table {
    pub(crate) fn new(placement: u32) -> Self {
        let span = Span { first_page: 0, skip: 0, count: 0, position: 0 };
        Self { pages: Vec::new(), row: Vec::new(), spans: vec![span], placement, version: 0 }
    }

    pub(crate) fn last(&self) -> &Span {
        &self.spans[self.spans.len() - 1]
    }

    pub(crate) fn last_mut(&mut self) -> &mut Span {
        let last = self.spans.len() - 1;
        &mut self.spans[last]
    }

    /// Pages of the last span.
    pub(crate) fn last_pages(&self) -> u32 {
        self.pages.len() as u32 - self.last().first_page
    }

    /// The spans as a kernel reads them, the last one longer by `new_tokens`.
    pub(crate) fn views(&self, new_tokens: u32) -> impl Iterator<Item = SpanView> + '_ {
        let gap = |i: usize| self.spans[i + 1].position - self.spans[i].end_position();
        let mut offset: u64 = (0..self.spans.len() - 1).map(gap).sum();
        self.spans.iter().enumerate().map(move |(i, span)| {
            let last = i + 1 == self.spans.len();
            let count = span.count + if last { new_tokens } else { 0 };
            let view = SpanView { first_page: span.first_page, skip: span.skip, count, offset };
            offset -= if last { 0 } else { gap(i) };
            view
        })
    }

    /// The indices of the pages that hold a token of `range` (token axis).
    pub(crate) fn pages_of(&self, range: std::ops::Range<u64>, page_size: u32) -> Vec<usize> {
        let mut indices: Vec<usize> = Vec::new();
        let mut token = 0;
        for span in &self.spans {
            let end = token + u64::from(span.count);
            let (from, to) = (range.start.max(token), range.end.min(end));
            if from < to {
                let page = |t: u64| {
                    span.first_page as usize
                        + ((u64::from(span.skip) + t - token) / u64::from(page_size)) as usize
                };
                indices.extend(page(from)..=page(to - 1));
            }
            token = end;
        }
        indices
    }

    /// The table without the tokens `[start, stop)`: spans are cut, no token moves. The second table returned is what
    /// was there before.
    pub(crate) fn without(&self, start: u64, stop: u64, page_size: u32) -> Self {
        let mut cut = Self { pages: Vec::new(), row: Vec::new(), spans: Vec::new(), ..*self };
        let mut token = 0;
        for span in &self.spans {
            let count = u64::from(span.count);
            let left = start.saturating_sub(token).min(count) as u32;
            let right = stop.saturating_sub(token).min(count) as u32;
            if left == right {
                cut.keep(self, span, 0..span.count, page_size);
            } else {
                cut.keep(self, span, 0..left, page_size);
                cut.keep(self, span, right..span.count, page_size);
            }
            token += count;
        }
        // The next token goes on where the last one stood: positions only grow.
        let end = self.last().end_position();
        if cut.spans.last().is_none_or(|span| span.end_position() != end) {
            let first_page = cut.pages.len() as u32;
            cut.spans.push(Span { first_page, skip: 0, count: 0, position: end });
        }
        cut.version = self.version.wrapping_add(1);
        cut
    }

    fn keep(&mut self, from: &Self, span: &Span, tokens: std::ops::Range<u32>, page_size: u32) {
        if tokens.is_empty() {
            return;
        }
        let (start, stop) = (span.skip + tokens.start, span.skip + tokens.end);
        let pages = (span.first_page + start / page_size) as usize
            ..(span.first_page + stop.div_ceil(page_size)) as usize;
        self.spans.push(Span {
            first_page: self.pages.len() as u32,
            skip: start % page_size,
            count: tokens.end - tokens.start,
            position: span.position + u64::from(tokens.start),
        });
        self.pages.extend_from_slice(&from.pages[pages.clone()]);
        self.row.extend_from_slice(&from.row[pages]);
    }

    /// Takes the tokens from `len` on off the spans; the pages past the last span are the caller's to pop.
    pub(crate) fn shorten(&mut self, len: u64) {
        let mut surplus = self.spans.iter().map(|s| u64::from(s.count)).sum::<u64>() - len;
        while surplus > 0 {
            let span = self.last_mut();
            let gone = surplus.min(u64::from(span.count));
            span.count -= gone as u32;
            surplus -= gone;
            if span.count == 0 && self.spans.len() > 1 {
                self.spans.pop();
            }
        }
    }
}

/// One request, beam or branch.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// Inside the open step.
    pub(crate) stepping: bool,
    pub(crate) len: u64,
    /// The epoch at which it last stepped.
    pub(crate) stepped: Epoch,
    /// One per layer group.
    pub(crate) tables: Vec<Table>,
}

/// Every sequence of a cache.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    slots: Vec<Sequence>,
    vacant: Vec<u32>,
}

impl Sequences {
    pub(crate) fn insert(&mut self, len: u64, stepped: Epoch, tables: Vec<Table>) -> Result<SequenceId> {
        let live = self.slots.len() - self.vacant.len();
        if live >= limits::SEQUENCES_MAX {
            return Err(Error::invalid("sequences", live + 1, format!("at most {}", limits::SEQUENCES_MAX)));
        }
        let sequence =
            |generation| Sequence { generation, live: true, stepping: false, len, stepped, tables };
        if let Some(index) = self.vacant.pop() {
            let generation = self.slots[index as usize].generation;
            self.slots[index as usize] = sequence(generation);
            return Ok(SequenceId { index, generation });
        }
        self.slots.push(sequence(0));
        Ok(SequenceId { index: self.slots.len() as u32 - 1, generation: 0 })
    }

    /// Ends a sequence and hands out its tables.
    pub(crate) fn remove(&mut self, id: SequenceId) -> Vec<Table> {
        let slot = &mut self.slots[id.index as usize];
        slot.live = false;
        slot.generation = slot.generation.wrapping_add(1);
        self.vacant.push(id.index);
        std::mem::take(&mut slot.tables)
    }

    /// The sequence of a handle, in a step or not.
    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence> {
        match self.slots.get(id.index as usize) {
            Some(slot) if slot.live && slot.generation == id.generation => Ok(slot),
            _ => Err(Error::UseAfterRelease { id }),
        }
    }

    /// The sequence of a handle, to be changed: refused while a step uses it.
    pub(crate) fn get_idle(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.get(id)?;
        let slot = &mut self.slots[id.index as usize];
        if slot.stepping {
            return Err(Error::invalid(
                "sequence",
                id.index,
                "not in the open step: commit or roll it back first",
            ));
        }
        Ok(slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        let all = self.slots.iter().enumerate();
        all.filter(|(_, s)| s.live)
            .map(|(index, s)| (SequenceId { index: index as u32, generation: s.generation }, s))
    }
}

impl std::ops::Index<SequenceId> for Sequences {
    type Output = Sequence;

    fn index(&self, id: SequenceId) -> &Sequence {
        &self.slots[id.index as usize]
    }
}

impl std::ops::IndexMut<SequenceId> for Sequences {
    fn index_mut(&mut self, id: SequenceId) -> &mut Sequence {
        &mut self.slots[id.index as usize]
    }
}
