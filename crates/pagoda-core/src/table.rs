//! The table that maps the tokens of a sequence to pages, for each layer group.

use crate::ids::{BlockRef, PageId};
use crate::window::Window;
use crate::work::RUN_ROWS;
use std::ops::Range;

/// A run of pages whose tokens are contiguous, as a kernel reads it.
///
/// The pages are `row[first_page..]` of the sequence's row; the run begins `skip` tokens into the first of them and holds
/// `count` tokens. `offset` is the number of positions that `drop` removed after it: a query at position `p` sees these keys
/// as if it were at `p - offset`. The last span of a sequence has offset 0. In a group with a window, spans only contain the
/// tokens that have not left: these make up the axis on which kernels count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanView {
    /// Index of the first page in the row.
    pub first_page: u32,
    /// Stored rows before the span: those of pages that have left, whose entries in the row mean nothing, and those of its
    /// first page.
    pub skip: u32,
    /// Tokens in the span.
    pub count: u32,
    /// Position that the first token was stored with.
    pub position: u64,
    /// Positions by which the span has moved towards the end of the sequence.
    pub offset: u64,
    /// Which queries see it.
    pub sight: Sight,
}

/// Which of the later queries see the tokens of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sight {
    /// Those whose window contains them.
    #[default]
    Window,
    /// All: they are sinks.
    Always,
    /// All. Queries after index `from` of the axis see them nearer, by as many positions as they are past it.
    Trailing {
        /// Below 0 if every query is past it.
        from: i64,
    },
}

impl SpanView {
    /// Positions by which a query at index `query` of the axis is rotated back for this span.
    pub fn offset_for(&self, query: usize) -> u64 {
        match self.sight {
            Sight::Trailing { from } => self.offset + (query as i64 - from).max(0) as u64,
            Sight::Window | Sight::Always => self.offset,
        }
    }

    /// Position of the first stored row of a fixed run of the span.
    pub fn run_position(&self, run: usize) -> u64 {
        self.position + (run * RUN_ROWS) as u64 - u64::from(self.skip)
    }

    /// The first `count` tokens and the others.
    fn split(self, count: u32, page_size: u32) -> (Self, Self) {
        let rows = self.skip + count;
        let first_page = self.first_page + rows / page_size;
        let position = self.position + u64::from(count);
        let rest = Self { first_page, skip: rows % page_size, count: self.count - count, position, ..self };
        (Self { count, ..self }, rest)
    }
}

/// A run of pages whose tokens are contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Index of the first page in the table.
    pub first_page: u32,
    /// Stored rows before the span: those of pages that have left, and of the first page that has not.
    pub skip: u32,
    /// Tokens in the span.
    pub count: u32,
    /// Position that the first token was stored with.
    pub position: u64,
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

    /// Its entries in the table that hold tokens, counted from its first page.
    pub(crate) fn entries(&self, page_size: u32) -> Range<u32> {
        self.skip / page_size..self.rows().div_ceil(page_size)
    }
}

/// Tokens that are no longer in a table: `count` of them, after the first `after` of the sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Tokens before them: the sinks.
    pub after: u64,
    /// How many they are.
    pub count: u64,
}

impl Left {
    /// The token after them.
    pub(crate) fn end(&self) -> u64 {
        self.after + self.count
    }

    /// The index of a sequence's token among those in the table. For a token that has left, it is the index of the gap.
    pub(crate) fn place(&self, token: u64) -> u64 {
        if token <= self.after { token } else { token.max(self.end()) - self.count }
    }
}

/// The pages of one sequence in one layer group, in token order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// `None` where a page has left. Such entries are removed a run at a time, so that rows do not shift at every step.
    pub(crate) pages: Vec<Option<PageId>>,
    /// Where each page is read from, as of `placement`; arbitrary where a page has left.
    pub(crate) row: Vec<BlockRef>,
    /// Never empty; only the last one grows. A state has just one, which counts its tokens.
    pub(crate) spans: Vec<Span>,
    /// The tokens that the group's window has passed.
    pub(crate) left: Left,
    /// The group's placement version that `row` agrees with.
    pub(crate) placement: u32,
    /// Changes whenever `row` changes other than by growing.
    pub(crate) version: u32,
    /// Whether an entry of `row` may be on disk. If false, none is.
    pub(crate) reaches_disk: bool,
}

impl Table {
    pub(crate) fn new(placement: u32) -> Self {
        let (pages, row, left) = (Vec::new(), Vec::new(), Left::default());
        Self { pages, row, spans: vec![Span::default()], left, placement, version: 0, reaches_disk: false }
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

    /// The table's pages, except those that have left.
    pub(crate) fn held(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().filter_map(|page| *page)
    }

    /// Adds an entry for a page that is read from `at`.
    pub(crate) fn push(&mut self, page: PageId, at: BlockRef) {
        self.pages.push(Some(page));
        self.row.push(at);
    }

    /// Removes the last entry and returns its page.
    pub(crate) fn pop(&mut self) -> Option<PageId> {
        self.row_changed();
        self.row.pop();
        self.pages.pop().flatten()
    }

    /// Replaces the last page with one that is read from `at`; returns the old one.
    pub(crate) fn replace_last(&mut self, page: PageId, at: BlockRef) -> Option<PageId> {
        self.row_changed();
        *self.row.last_mut()? = at;
        self.pages.last_mut()?.replace(page)
    }

    /// To be called when the row is about to change other than by growing.
    pub(crate) fn row_changed(&mut self) {
        self.version = self.version.wrapping_add(1);
    }

    /// The page of an entry that holds tokens of the sequence.
    pub(crate) fn page(&self, index: u32) -> PageId {
        self.pages[index as usize].expect("a page that holds tokens has not left")
    }

    /// The spans as a kernel reads them, the last one with `new_tokens` more. Sinks get spans of their own.
    pub(crate) fn views(
        &self,
        new_tokens: u32,
        window: Option<Window>,
        page_size: u32,
    ) -> impl Iterator<Item = SpanView> + '_ {
        let left = self.left;
        // Tokens that left between two spans do not change the distance from a query to the spans before them.
        let hidden = move |token: u64| if token == left.after && token > 0 { left.count } else { 0 };
        let gap = |i: usize| self.spans[i + 1].position - self.spans[i].end_position();
        let mut offset = (0..self.spans.len() - 1).map(gap).sum::<u64>() - hidden(left.after);
        let mut token = 0;
        let sinks = window.map_or(0, |window| u64::from(window.sinks));
        let pinned = match window {
            Some(window) if window.trailing => {
                Sight::Trailing { from: window.trails_from() as i64 - left.count as i64 }
            }
            _ => Sight::Always,
        };
        self.spans.iter().enumerate().flat_map(move |(i, span)| {
            let last = i + 1 == self.spans.len();
            let Span { first_page, skip, count, position } = *span;
            let count = count + if last { new_tokens } else { 0 };
            let first = sinks.saturating_sub(token).min(u64::from(count)) as u32;
            let view = SpanView { first_page, skip, count, position, offset, sight: Sight::Window };
            let (head, tail) = if first > 0 {
                let (head, tail) = view.split(first, page_size);
                (Some(SpanView { sight: pinned, ..head }), tail)
            } else {
                (None, view)
            };
            token += u64::from(count);
            offset -= if last { 0 } else { gap(i) - hidden(token) };
            head.into_iter().chain((tail.count > 0 || first == 0).then_some(tail))
        })
    }

    /// The indices of the pages that hold a token of `range` (token axis).
    pub(crate) fn pages_of(&self, range: Range<u64>, page_size: u32) -> Vec<usize> {
        let range = self.left.place(range.start)..self.left.place(range.end);
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

    /// The rows that spans cover, entry by entry.
    pub(crate) fn covered(&self, page_size: u32) -> impl Iterator<Item = (PageId, Range<u32>)> + '_ {
        self.spans.iter().flat_map(move |span| {
            span.entries(page_size).filter_map(move |entry| self.rows(span, entry, page_size))
        })
    }

    /// Like `covered`, but only for the first and the last entry of each span: those in between are fully covered.
    pub(crate) fn covered_at_ends(&self, page_size: u32) -> impl Iterator<Item = (PageId, Range<u32>)> + '_ {
        self.spans.iter().flat_map(move |span| {
            let entries = span.entries(page_size);
            let last = entries.clone().skip(1).last();
            entries.take(1).chain(last).filter_map(move |entry| self.rows(span, entry, page_size))
        })
    }

    /// The rows of an entry's page that a span covers; `None` if the page has left.
    fn rows(&self, span: &Span, entry: u32, page_size: u32) -> Option<(PageId, Range<u32>)> {
        let (page, first) = (self.pages[(span.first_page + entry) as usize]?, entry * page_size);
        Some((page, span.skip.saturating_sub(first)..page_size.min(span.rows() - first)))
    }

    /// The table without the tokens `[start, stop)` of the sequence: spans are cut, no token moves.
    pub(crate) fn without(&self, start: u64, stop: u64, page_size: u32) -> Self {
        let mut cut = Self { pages: Vec::new(), row: Vec::new(), spans: Vec::new(), ..*self };
        let (here, there) = (self.left.place(start), self.left.place(stop));
        cut.left.count -= stop - start - (there - here);
        let mut token = 0;
        for span in &self.spans {
            let count = u64::from(span.count);
            let left = here.saturating_sub(token).min(count) as u32;
            let right = there.saturating_sub(token).min(count) as u32;
            if left == right {
                cut.keep(self, span, 0..span.count, page_size);
            } else {
                cut.keep(self, span, 0..left, page_size);
                cut.keep(self, span, right..span.count, page_size);
            }
            token += count;
        }
        // The next token follows the position of the former last one: positions only grow.
        let end = self.last().end_position();
        if cut.spans.last().is_none_or(|span| span.end_position() != end) {
            let first_page = cut.pages.len() as u32;
            cut.spans.push(Span { first_page, skip: 0, count: 0, position: end });
        }
        cut.row_changed();
        cut
    }

    fn keep(&mut self, from: &Self, span: &Span, tokens: Range<u32>, page_size: u32) {
        if tokens.is_empty() {
            return;
        }
        let (start, stop) = (span.skip + tokens.start, span.skip + tokens.end);
        // A start that is not cut keeps its row numbers, since deterministic mode uses them to cut attention into runs.
        let before = if tokens.start == 0 { 0 } else { start / page_size };
        let pages =
            (span.first_page + before) as usize..(span.first_page + stop.div_ceil(page_size)) as usize;
        self.spans.push(Span {
            first_page: self.pages.len() as u32,
            skip: start - before * page_size,
            count: tokens.end - tokens.start,
            position: span.position + u64::from(tokens.start),
        });
        self.pages.extend_from_slice(&from.pages[pages.clone()]);
        self.row.extend_from_slice(&from.row[pages]);
    }

    /// Removes the tokens from `len` on from the spans; the caller pops the pages past the last span.
    pub(crate) fn shorten(&mut self, len: u64) {
        if len == 0 {
            self.spans.truncate(1);
            (self.spans[0], self.left) = (Span::default(), Left::default());
            return;
        }
        let mut surplus = self.spans.iter().map(|s| u64::from(s.count)).sum::<u64>() - self.left.place(len);
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

    /// Lets the tokens between the first `sinks` and token `from` of the sequence leave, in whole pages; calls `gone` for
    /// each page.
    pub(crate) fn leave(&mut self, sinks: u32, from: u64, page_size: u32, mut gone: impl FnMut(PageId)) {
        let sinks = u64::from(sinks);
        if from <= sinks + self.left.count {
            return;
        }
        // The span that holds `from`, the first token of that span, and the first row of the page.
        let (mut at, first) = self.span_of(self.left.place(from));
        let span = self.spans[at];
        let row = span.skip + (self.left.place(from) - first) as u32;
        let row = (row - row % page_size).max(span.skip);
        if first + u64::from(row - span.skip) <= sinks {
            return;
        }
        let (mut begin, start) = self.span_of(sinks);
        self.left.after = sinks;
        let mut skip = row;
        if start < sinks {
            let split = self.split(begin, (sinks - start) as u32, page_size);
            begin += 1;
            skip = if at + 1 == begin { row - split } else { row };
            at += 1;
        }
        let passed = self.spans[begin].first_page..self.spans[at].first_page;
        self.left.count += self.spans[begin..at].iter().map(|span| u64::from(span.count)).sum::<u64>();
        self.spans.drain(begin..at);
        self.empty(&passed, &mut gone);
        self.remove_entries(passed);
        let Span { first_page, skip: before, .. } = self.spans[begin];
        self.empty(&(first_page + before / page_size..first_page + skip / page_size), &mut gone);
        let span = &mut self.spans[begin];
        span.count -= skip - before;
        span.position += u64::from(skip - before);
        self.left.count += u64::from(skip - before);
        // Entries are removed in whole runs, so that rows keep their places in runs.
        let run = (RUN_ROWS as u32 / page_size).max(1);
        let entries = skip / page_size / run * run;
        span.skip = skip - entries * page_size;
        self.remove_entries(first_page..first_page + entries);
    }

    /// The span that holds a token of the table, and the first token of that span.
    fn span_of(&self, token: u64) -> (usize, u64) {
        let mut first = 0;
        for (index, span) in self.spans.iter().enumerate() {
            let end = first + u64::from(span.count);
            if token < end {
                return (index, first);
            }
            first = end;
        }
        unreachable!("token {token} of {first}")
    }

    /// Cuts a span after its first `count` tokens; returns how many of its rows come before the second part's first page. A
    /// page that both parts share stays with the first, since the second is about to let go of its share.
    fn split(&mut self, index: usize, count: u32, page_size: u32) -> u32 {
        let span = &mut self.spans[index];
        let rows = span.skip + count;
        let shared = rows % page_size;
        let first_page = span.first_page + rows.div_ceil(page_size);
        let rest = Span {
            first_page,
            skip: shared,
            count: span.count - count,
            position: span.position + u64::from(count),
        };
        span.count = count;
        self.spans.insert(index + 1, rest);
        if shared > 0 {
            self.pages.insert(first_page as usize, None);
            self.row.insert(first_page as usize, self.row[first_page as usize - 1]);
            self.spans[index + 2..].iter_mut().for_each(|span| span.first_page += 1);
            self.row_changed();
        }
        rows - shared
    }

    /// Hands out the pages of entries.
    fn empty(&mut self, entries: &Range<u32>, gone: impl FnMut(PageId)) {
        let pages = &mut self.pages[entries.start as usize..entries.end as usize];
        pages.iter_mut().filter_map(Option::take).for_each(gone);
    }

    /// Removes entries that have no pages.
    fn remove_entries(&mut self, entries: Range<u32>) {
        let count = entries.end - entries.start;
        if count == 0 {
            return;
        }
        let range = entries.start as usize..entries.end as usize;
        self.pages.drain(range.clone());
        self.row.drain(range);
        let behind = self.spans.iter_mut().filter(|span| span.first_page >= entries.end);
        behind.for_each(|span| span.first_page -= count);
        self.row_changed();
    }
}
