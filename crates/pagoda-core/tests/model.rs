//! The core against a naive model, byte by byte.
//!
//! A fake machine holds one word per token slot of every block. Kernels run late and in order, as on a stream. Copies run at
//! any time and in pieces; copies off the device wait for the steps that may have written what they read. Every word names
//! the token that wrote it, so a stale, foreign or torn page is recognised wherever it is read. The model is a list of tokens
//! per sequence, including those that have left a window; what a query may see is recounted from the list.
//!
//! `PAGODA_MODEL_OPS` sets the number of operations (default 1 000 000); proptest prints the seed of a failure.

use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::fence::{Completion, Fence};
use pagoda_core::ids::{BlockId, BlockRef, Epoch, GroupId, KeptId, SequenceId, Tier};
use pagoda_core::keep::{KeptGroup, KeptPage, KeptSequence};
use pagoda_core::plan::{BlockCopy, Plan, Selection};
use pagoda_core::table::Sight;
use pagoda_core::window::Window;
use pagoda_core::{Cache, Error};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use proptest_state_machine::ReferenceStateMachine;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

const OPS_PER_CASE: usize = 250;

/// One operation. Picks are taken modulo the number of choices when it runs.
#[derive(Clone, Debug)]
enum Op {
    Create,
    Fork(u16),
    Release(u16),
    Truncate(u16, u16),
    Drop(u16, u16, u16),
    Reserve(Vec<(u16, u8)>),
    Commit(Option<Vec<u8>>),
    Rollback,
    Retire(u8),
    Migrate { sequence: u16, to: u8, from: u16, until: u16, keep: bool, stale: bool },
    DropCopies { tier: u8, count: u8, but_of: Option<u16> },
    Resting { from: u8, to: u8, group: u8, unshared: bool, most: u8, other: u16 },
    Keep(u16),
    Revive(u16),
    Forget(u16),
    CopyWords(u8, u8),
    Finish { ticket: u8, fail: bool },
    Zero(u8),
}

/// Where operations come from. Whether one succeeds depends on extents, draining blocks and copies in flight: a state that
/// predicted it would have to be the core itself (docs/adr/0005). So the state is only the shape of the cache, every
/// operation is allowed at any time, and the naive model follows what the core did.
struct Operations;

impl ReferenceStateMachine for Operations {
    type State = Shape;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<Shape> {
        shapes().boxed()
    }

    fn transitions(_: &Shape) -> BoxedStrategy<Op> {
        ops().boxed()
    }

    fn apply(shape: Shape, _: &Op) -> Shape {
        shape
    }
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => Just(Op::Create),
        3 => any::<u16>().prop_map(Op::Fork),
        2 => any::<u16>().prop_map(Op::Release),
        2 => any::<(u16, u16)>().prop_map(|(s, n)| Op::Truncate(s, n)),
        2 => any::<(u16, u16, u16)>().prop_map(|(s, a, b)| Op::Drop(s, a, b)),
        11 => proptest::collection::vec((any::<u16>(), 0u8..10), 1..5).prop_map(Op::Reserve),
        11 => proptest::option::weighted(0.3, proptest::collection::vec(any::<u8>(), 5)).prop_map(Op::Commit),
        2 => Just(Op::Rollback),
        4 => any::<u8>().prop_map(Op::Retire),
        8 => any::<(u16, u8, u16, u16, bool, bool)>().prop_map(|(sequence, to, from, until, keep, stale)| {
            Op::Migrate { sequence, to, from, until, keep, stale }
        }),
        1 => any::<(u8, u8, Option<u16>)>().prop_map(|(tier, count, but_of)| Op::DropCopies { tier, count, but_of }),
        6 => any::<(u8, u8, u8, bool, u8, u16)>().prop_map(|(from, to, group, unshared, most, other)| {
            Op::Resting { from, to, group, unshared, most, other }
        }),
        3 => any::<u16>().prop_map(Op::Keep),
        2 => any::<u16>().prop_map(Op::Revive),
        1 => any::<u16>().prop_map(Op::Forget),
        8 => any::<(u8, u8)>().prop_map(|(t, n)| Op::CopyWords(t, n)),
        6 => (any::<u8>(), proptest::bool::weighted(0.1)).prop_map(|(ticket, fail)| Op::Finish { ticket, fail }),
        6 => any::<u8>().prop_map(Op::Zero),
    ]
}

/// The shape of a cache under test.
#[derive(Clone, Debug)]
struct Shape {
    groups: Vec<Group>,
    blocks: [u64; Tier::COUNT],
    extent_bytes: u64,
    zero_on_free: bool,
}

fn shapes() -> impl Strategy<Value = Shape> {
    let window = (prop_oneof![Just(0), 1u32..8], 1u32..10, 0u32..8, any::<bool>())
        .prop_map(|(sinks, tokens, headroom, trailing)| Window { sinks, tokens, headroom, trailing });
    let paged =
        (1u32..6, 1u64..4, proptest::option::weighted(0.4, window)).prop_map(|(page_size, scale, window)| {
            Group {
                block_bytes: u64::from(page_size) * 8 * scale,
                kind: GroupKind::Paged { page_size },
                window,
            }
        });
    let state =
        (1u64..60).prop_map(|block_bytes| Group { block_bytes, kind: GroupKind::State, window: None });
    let groups = (proptest::collection::vec(paged, 1..3), proptest::option::weighted(0.15, state));
    let groups = groups.prop_map(|(mut paged, state)| {
        paged.extend(state);
        paged
    });
    let zeroing = proptest::bool::weighted(0.3);
    (groups, [8u64..60, 0u64..60, 0u64..40], 1u64..5, zeroing).prop_map(
        |(groups, blocks, per_extent, zero_on_free)| {
            let largest = groups.iter().map(|g| g.block_bytes).max().unwrap();
            Shape { groups, blocks, extent_bytes: largest * per_extent, zero_on_free }
        },
    )
}

/// One appended token: a unique number, and the position at which it was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    name: u64,
    position: u64,
}

#[derive(Clone, Debug)]
struct Modelled {
    id: SequenceId,
    tokens: Vec<Token>,
    next_position: u64,
    /// The largest number of tokens that it ever had.
    longest: u64,
    /// What the state of every state group must be.
    state: u64,
}

type Place = (Tier, GroupId, BlockId);

/// Work on the compute stream.
#[derive(Clone, Debug)]
enum Kernel {
    CopyBlock(BlockCopy),
    Write {
        at: Place,
        row: u32,
        word: u64,
    },
    /// Rows that must read these words.
    Read {
        at: Place,
        rows: Vec<(u32, u64)>,
    },
    Retired(Epoch),
}

struct InFlight {
    plan: Plan,
    completion: Completion,
    copies: Vec<BlockCopy>,
    /// The step that the copies wait for.
    behind: u64,
    /// Words copied so far, over all copies.
    words: usize,
}

/// Whether a call was refused because of this argument.
fn refused<T>(result: &Result<T, Error>, argument: &str) -> bool {
    matches!(result, Err(Error::InvalidArgument { argument: named, .. }) if *named == argument)
}

struct Machine {
    cache: Cache,
    shape: Shape,
    words: HashMap<Place, Vec<u64>>,
    stream: VecDeque<Kernel>,
    retired: u64,
    minted: u64,
    tickets: Vec<InFlight>,
    model: Vec<Modelled>,
    kept: Vec<(KeptId, Modelled)>,
    /// The batch of the open step: index in `model`, and the tokens that it appends.
    step: Option<Vec<(usize, Vec<Token>)>>,
    /// The version of each row that a step has seen, and the row.
    rows_seen: HashMap<(SequenceId, GroupId), (u32, Vec<BlockRef>)>,
    /// Sequences in the order in which they last stepped or were created, some of them released.
    rested: Vec<SequenceId>,
    next_name: u64,
    seen: Seen,
}

/// How often the things that the test is about have happened.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    operations: u64,
    steps: u64,
    refused_steps: u64,
    copies_on_write: u64,
    rejected_tokens: u64,
    words_read: u64,
    pages_moved: u64,
    moves_inside_step: u64,
    failed_tickets: u64,
    /// Steps of a sequence over a window that has passed tokens.
    past_windows: u64,
    refused_rewinds: u64,
    steps_over_disk: u64,
    dropped_copies: u64,
    found_resting: u64,
    kept: u64,
    revived: u64,
    zeroed: u64,
}

impl Seen {
    fn add(&mut self, other: Self) {
        let Self { operations, steps, refused_steps, copies_on_write, .. } = other;
        self.operations += operations;
        self.steps += steps;
        self.refused_steps += refused_steps;
        self.copies_on_write += copies_on_write;
        self.rejected_tokens += other.rejected_tokens;
        self.words_read += other.words_read;
        self.pages_moved += other.pages_moved;
        self.moves_inside_step += other.moves_inside_step;
        self.failed_tickets += other.failed_tickets;
        self.past_windows += other.past_windows;
        self.refused_rewinds += other.refused_rewinds;
        self.steps_over_disk += other.steps_over_disk;
        self.dropped_copies += other.dropped_copies;
        self.found_resting += other.found_resting;
        self.kept += other.kept;
        self.revived += other.revived;
        self.zeroed += other.zeroed;
    }
}

type Outcome = Result<(), TestCaseError>;

impl Machine {
    fn new(shape: &Shape) -> Self {
        let largest = shape.groups.iter().map(|g| g.block_bytes).max().unwrap();
        let memory = |blocks: u64| TierMemory { bytes: blocks * largest, extent_bytes: shape.extent_bytes };
        let mut cache = Cache::new(&shape.groups, shape.blocks.map(memory)).unwrap();
        if shape.zero_on_free {
            cache.zero_on_free();
        }
        Self {
            cache,
            shape: shape.clone(),
            words: HashMap::new(),
            stream: VecDeque::new(),
            retired: 0,
            minted: 0,
            tickets: Vec::new(),
            model: Vec::new(),
            kept: Vec::new(),
            step: None,
            rows_seen: HashMap::new(),
            rested: Vec::new(),
            next_name: 1,
            seen: Seen::default(),
        }
    }

    fn rows(&self, group: GroupId) -> usize {
        match self.shape.groups[group.index()].kind {
            GroupKind::Paged { page_size } => page_size as usize,
            GroupKind::State => 1,
        }
    }

    fn has_states(&self) -> bool {
        self.shape.groups.iter().any(|g| g.kind == GroupKind::State)
    }

    fn windows(&self) -> impl Iterator<Item = (GroupId, Window)> + '_ {
        let groups = self.shape.groups.iter().enumerate();
        groups.filter_map(|(index, group)| Some((GroupId(index as u8), group.window?)))
    }

    fn block(&mut self, at: Place) -> &mut Vec<u64> {
        let rows = self.rows(at.1);
        self.words.entry(at).or_insert_with(|| vec![0; rows])
    }

    /// Zeroes the blocks that wait for it, except runs that `skip` lets fail. Work that is still to be done on such a block
    /// is noticed when it is done.
    fn zero(&mut self, mut skip: u8) {
        let mut cleared = Vec::new();
        self.cache.zero(|tier, group, blocks| {
            skip = skip.rotate_right(1);
            let clears = skip & 1 == 0;
            let runs = blocks.map(|block| (tier, group, BlockId::new(block)));
            cleared.extend(runs.filter(|_| clears));
            clears
        });
        assert!(cleared.is_empty() || self.shape.zero_on_free);
        self.seen.zeroed += cleared.len() as u64;
        cleared.into_iter().for_each(|at| self.block(at).fill(0));
    }

    /// Checks a block that is about to be written for the first time since it was handed out.
    fn check_handed_out(&mut self, at: Place) -> Outcome {
        let zeroed = !self.shape.zero_on_free || self.block(at).iter().all(|&word| word == 0);
        prop_assert!(zeroed, "{at:?} is handed out with the bytes that it had");
        Ok(())
    }

    /// Runs the compute stream up to and including `epoch`.
    fn run_stream(&mut self, epoch: u64) -> Outcome {
        while self.retired < epoch {
            match self.stream.pop_front().expect("an epoch ends each step") {
                Kernel::CopyBlock(copy) => {
                    let bytes = self.block((copy.from.0, copy.group, copy.from.1)).clone();
                    *self.block((copy.to.0, copy.group, copy.to.1)) = bytes;
                }
                Kernel::Write { at, row, word } => self.block(at)[row as usize] = word,
                Kernel::Read { at, rows } => {
                    for (row, word) in rows {
                        self.seen.words_read += 1;
                        let found = self.block(at)[row as usize];
                        prop_assert_eq!(found, word, "row {} of {:?} holds a foreign token", row, at);
                    }
                }
                Kernel::Retired(epoch) => self.retired = epoch.0,
            }
        }
        Ok(())
    }

    /// Makes copies that must be made before anything else happens.
    fn copy_now(&mut self, copies: &[BlockCopy]) -> Outcome {
        self.run_stream(self.minted)?;
        for copy in copies {
            self.check_handed_out((copy.to.0, copy.group, copy.to.1))?;
            let bytes = self.block((copy.from.0, copy.group, copy.from.1)).clone();
            *self.block((copy.to.0, copy.group, copy.to.1)) = bytes;
        }
        Ok(())
    }

    /// A cache that knows only what was written down finds what is kept, unchanged.
    fn adopt_elsewhere(&self) -> Outcome {
        let written: Vec<_> = self.kept.iter().map(|(id, _)| self.cache.describe(*id).unwrap()).collect();
        let mut other = Self::new(&self.shape);
        let ids = other.cache.adopt(&written);
        other.cache.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
        for (id, written) in ids.into_iter().zip(&written) {
            let id = id.map_err(|error| TestCaseError::fail(format!("{error} of {written:?}")))?;
            let described = other.cache.describe(id).unwrap();
            prop_assert_eq!(&described, written);
        }
        self.adopt_nonsense(&written)
    }

    /// One number is changed: what was written down is then taken at its word or refused, but never spoils anything. What is
    /// taken in continues like any sequence.
    fn adopt_nonsense(&self, written: &[KeptSequence]) -> Outcome {
        for (at, kept) in written.iter().enumerate().take(3) {
            for number in [0, 1, 2, 17, (1 << 31) - 1, u32::MAX] {
                for field in 0..10 {
                    let mut kept = kept.clone();
                    let Some(group) = kept.groups.iter_mut().find(|group| !group.pages.is_empty()) else {
                        break;
                    };
                    let KeptGroup { left, spans, pages } = group;
                    let block = BlockId::new(number.min(u32::MAX - 1));
                    match field {
                        0 => kept.len = number.into(),
                        1 => left.after = u64::from(number) << 32,
                        2 => left.count = number.into(),
                        3 => spans[0].first_page = number,
                        4 => spans[0].skip = number,
                        5 => spans[0].count = number,
                        6 => spans[0].position = u64::MAX - u64::from(number),
                        7 => spans.iter_mut().for_each(|span| span.position += u64::from(number)),
                        8 => *pages.last_mut().unwrap() = KeptPage::Sealed(block),
                        _ => *pages.last_mut().unwrap() = KeptPage::Open(block, number),
                    }
                    let mut all = written.to_vec();
                    all[at] = kept;
                    let mut other = Self::new(&self.shape);
                    let ids = other.cache.adopt(&all);
                    other.cache.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
                    for (id, written) in ids.into_iter().zip(&all) {
                        if let Ok(id) = id {
                            prop_assert_eq!(&other.cache.describe(id).unwrap(), written);
                            other.go_on(id)?;
                            other.cache.forget(id);
                        }
                    }
                    for group in (0..self.shape.groups.len() as u8).map(GroupId) {
                        prop_assert_eq!(other.cache.block_counts(Tier::Disk, group).used, 0);
                    }
                }
            }
        }
        Ok(())
    }

    /// A kept sequence grows if it may, loses its first half, and is released.
    fn go_on(&mut self, id: KeptId) -> Outcome {
        let Ok((sequence, _)) = self.cache.revive(id) else { return Ok(()) };
        if self.cache.reserve(&[(sequence, 9)]).is_ok() {
            let epoch = self.cache.commit(None).unwrap();
            self.cache.retire(epoch).unwrap();
        }
        let half = self.cache.token_count(sequence).unwrap() / 2;
        // Windows may refuse it.
        let _ = self.cache.drop_tokens(sequence, 0..half);
        let _ = self.cache.truncate(sequence, half);
        let audited = self.cache.audit();
        self.cache.release(sequence).unwrap();
        audited.map_err(|error| TestCaseError::fail(error.to_string()))
    }

    /// Copies `count` more words of a ticket. First runs the steps that may have written the source. The target is written at
    /// once, since it was free.
    fn copy_words(&mut self, ticket: usize, count: usize) -> Outcome {
        for _ in 0..count {
            let flight = &self.tickets[ticket];
            let mut word = flight.words;
            let copy = flight.copies.iter().find(|copy| {
                let rows = self.rows(copy.group);
                let here = word < rows;
                word = if here { word } else { word - rows };
                here
            });
            let Some(&copy) = copy else { return Ok(()) };
            if copy.from.0 == Tier::Device {
                self.run_stream(self.tickets[ticket].behind)?;
            }
            let value = self.block((copy.from.0, copy.group, copy.from.1))[word];
            self.block((copy.to.0, copy.group, copy.to.1))[word] = value;
            self.tickets[ticket].words += 1;
        }
        Ok(())
    }

    fn finish(&mut self, ticket: usize, fail: bool) -> Outcome {
        let planned = self.tickets[ticket].copies.len();
        let copied = if fail { planned / 2 } else { planned };
        self.seen.failed_tickets += u64::from(copied < planned);
        self.seen.pages_moved += copied as u64;
        self.seen.moves_inside_step += u64::from(self.step.is_some() && copied > 0);
        let words: usize = self.tickets[ticket].copies[..copied].iter().map(|c| self.rows(c.group)).sum();
        self.copy_words(ticket, words.saturating_sub(self.tickets[ticket].words))?;
        self.tickets.swap_remove(ticket).completion.finish(copied as u32);
        Ok(())
    }

    fn pick(&self, pick: u16) -> Option<usize> {
        (!self.model.is_empty()).then(|| pick as usize % self.model.len())
    }

    fn stepping(&self, index: usize) -> bool {
        self.step.as_ref().is_some_and(|step| step.iter().any(|(at, _)| *at == index))
    }

    /// Checks that the core refused an operation on a sequence exactly if a step uses it.
    fn expect_idle<T>(&self, index: usize, result: Result<T, Error>) -> Result<Option<T>, TestCaseError> {
        prop_assert_eq!(result.is_err(), self.stepping(index), "refused or not: {:?}", result.err());
        Ok(result.ok())
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        self.seen.operations += 1;
        match *op {
            Op::Create if self.model.len() < 12 => {
                let id = self.cache.create().unwrap();
                self.rests(id);
                self.model.push(Modelled { id, tokens: Vec::new(), next_position: 0, longest: 0, state: 0 });
            }
            Op::Fork(pick) if self.model.len() < 12 => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let result = self.cache.fork(self.model[index].id);
                if let Some(id) = self.expect_idle(index, result)? {
                    self.rests(id);
                    self.model.push(Modelled { id, ..self.model[index].clone() });
                }
            }
            Op::Create | Op::Fork(_) => {}
            Op::Release(pick) => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let id = self.model[index].id;
                let result = self.cache.release(id);
                if self.expect_idle(index, result)?.is_some() {
                    let moved = self.model.len() - 1;
                    self.model.swap_remove(index);
                    for (at, _) in self.step.iter_mut().flatten().filter(|(at, _)| *at == moved) {
                        *at = index;
                    }
                    prop_assert_eq!(self.cache.release(id), Err(Error::UseAfterRelease { id }));
                }
            }
            Op::Truncate(pick, len) => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let len = len as usize % (self.model[index].tokens.len() + 1);
                let limit = self.cache.rewind_limit(self.model[index].id).unwrap();
                let result = self.cache.truncate(self.model[index].id, len as u64);
                if len > 0 && (len as u64) < limit {
                    self.seen.refused_rewinds += 1;
                    prop_assert!(refused(&result, "length") || self.stepping(index));
                } else if self.expect_idle(index, result)?.is_some() {
                    let sequence = &mut self.model[index];
                    if len < sequence.tokens.len() {
                        sequence.next_position = sequence.tokens[len].position;
                    }
                    // After a cut back to the end of an older span, tokens continue right after it.
                    if let Some(last) = sequence.tokens[..len].last().filter(|_| len < sequence.tokens.len())
                    {
                        sequence.next_position = last.position + 1;
                    }
                    if len == 0 {
                        (sequence.next_position, sequence.longest) = (0, 0);
                    }
                    sequence.tokens.truncate(len);
                    sequence.state = if len == 0 { 0 } else { sequence.state };
                }
            }
            Op::Drop(pick, a, b) => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let count = self.model[index].tokens.len() + 1;
                let (a, b) = (a as usize % count, b as usize % count);
                let (start, stop) = (a.min(b), a.max(b));
                let limit = self.cache.rewind_limit(self.model[index].id).unwrap();
                let result = self.cache.drop_tokens(self.model[index].id, start as u64..stop as u64);
                let sinks = self.windows().map(|(_, window)| window.sinks).max().unwrap_or(0);
                let spare = (count as u64 - 1).saturating_sub(limit);
                if self.has_states() && start < stop {
                    prop_assert!(refused(&result, "start, stop") || self.stepping(index));
                } else if refused(&result, "start, stop") {
                    // A window refuses a drop only if sinks would change, or if more would go than there is to spare.
                    prop_assert!(limit > 0 && (start < sinks as usize || (stop - start) as u64 > spare));
                } else if self.expect_idle(index, result)?.is_some() {
                    self.model[index].tokens.drain(start..stop);
                }
            }
            Op::Reserve(ref batch) => self.reserve(batch)?,
            Op::Commit(ref accepted) => self.commit(accepted.as_deref())?,
            Op::Rollback => {
                if let Some(step) = self.step.take() {
                    step.iter().for_each(|(at, _)| self.rests(self.model[*at].id));
                    let epoch = self.cache.rollback().unwrap();
                    self.minted = epoch.0;
                    self.stream.push_back(Kernel::Retired(epoch));
                } else {
                    prop_assert!(self.cache.rollback().is_err());
                }
            }
            Op::Retire(pick) => {
                let epoch = self.retired + u64::from(pick) % (self.minted - self.retired + 1);
                self.run_stream(epoch)?;
                self.cache.retire(Epoch(epoch)).unwrap();
                prop_assert!(self.cache.retire(Epoch(self.minted + 1)).is_err());
            }
            Op::Migrate { sequence, to, from, until, keep, stale } => {
                let Some(index) = self.pick(sequence) else { return Ok(()) };
                let count = self.model[index].tokens.len() + 1;
                let (a, b) = (from as u64 % count as u64, until as u64 % count as u64);
                self.migrate(index, Tier::ALL[to as usize % Tier::COUNT], a.min(b)..a.max(b), keep, stale)?;
            }
            Op::DropCopies { tier, count, but_of } => {
                let (tier, pages_max) = (Tier::ALL[tier as usize % Tier::COUNT], usize::from(count % 4));
                let spared = but_of.and_then(|pick| self.pick(pick));
                for group in (0..self.shape.groups.len() as u8).map(GroupId) {
                    let before = self.cache.block_counts(tier, group);
                    let dropped = match spared.map(|index| &self.model[index]) {
                        Some(Modelled { id, tokens, .. }) => {
                            // If a page has a copy on the target tier, a plan has no bytes to copy for it.
                            let all = Selection::of(0..tokens.len() as u64, vec![group]);
                            let moves =
                                |cache: &Cache| cache.plan(*id, tier, &all).map(|plan| plan.moves().to_vec());
                            let before = moves(&self.cache);
                            let dropped = self.cache.drop_copies(tier, group, pages_max, Some(*id));
                            prop_assert_eq!(moves(&self.cache), before);
                            dropped.unwrap()
                        }
                        None => self.cache.drop_copies(tier, group, pages_max, None).unwrap(),
                    };
                    prop_assert!(dropped <= pages_max);
                    // From the device, only pages that are kept and that no sequence holds.
                    prop_assert!(dropped == 0 || tier > Tier::Device || !self.kept.is_empty());
                    prop_assert_eq!(self.cache.block_counts(tier, group).used, before.used - dropped as u64);
                    self.seen.dropped_copies += dropped as u64;
                }
            }
            Op::Resting { from, to, group, unshared, most, other } => {
                let [from, to] = [from, to].map(|tier| Tier::ALL[tier as usize % Tier::COUNT]);
                let group = GroupId(group % self.shape.groups.len() as u8);
                if from != to && self.shape.blocks[to.index()] > 0 {
                    self.look_through((from, to), group, unshared, usize::from(most % 4), other)?;
                }
            }
            Op::Keep(pick) => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                match self.cache.keep(self.model[index].id) {
                    Ok((id, copies)) => {
                        self.copy_now(&copies)?;
                        self.kept.push((id, self.model[index].clone()));
                        self.seen.kept += 1;
                    }
                    Err(Error::OutOfBlocks { tier, .. }) => prop_assert_eq!(tier, Tier::Disk),
                    Err(Error::InvalidArgument { argument, .. }) => prop_assert_eq!(argument, "sequence"),
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
            Op::Revive(pick) if !self.kept.is_empty() && self.model.len() < 12 => {
                let (id, modelled) = self.kept[pick as usize % self.kept.len()].clone();
                match self.cache.revive(id) {
                    Ok((id, copies)) => {
                        self.copy_now(&copies)?;
                        self.rests(id);
                        self.model.push(Modelled { id, ..modelled });
                        self.seen.revived += 1;
                    }
                    Err(Error::OutOfBlocks { tier, .. }) => prop_assert_eq!(tier, Tier::Device),
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
            Op::Forget(pick) if !self.kept.is_empty() => {
                let (id, _) = self.kept.swap_remove(pick as usize % self.kept.len());
                self.cache.forget(id);
                prop_assert!(refused(&self.cache.revive(id), "kept"));
            }
            Op::Revive(_) | Op::Forget(_) => {}
            Op::CopyWords(ticket, count) if !self.tickets.is_empty() => {
                self.copy_words(ticket as usize % self.tickets.len(), count as usize % 16)?;
            }
            Op::Finish { ticket, fail } if !self.tickets.is_empty() => {
                self.finish(ticket as usize % self.tickets.len(), fail)?;
            }
            Op::CopyWords(..) | Op::Finish { .. } => {}
            Op::Zero(skip) => self.zero(skip),
        }
        while let Some(error) = self.cache.take_failure() {
            let copy_failed = matches!(error, Error::CopyFailed { .. });
            prop_assert!(copy_failed);
        }
        self.cache.audit().map_err(|error| TestCaseError::fail(format!("after {op:?}: {error}")))?;
        for sequence in &self.model {
            let limit = self.cache.rewind_limit(sequence.id).unwrap();
            prop_assert!(limit <= sequence.tokens.len() as u64);
            let headroom = self.windows().map(|(_, window)| window.headroom).min().unwrap_or(0);
            let passed = sequence.longest.saturating_sub(u64::from(headroom));
            prop_assert!(
                self.has_states() || limit <= passed,
                "{limit} of {}: headroom {headroom}",
                sequence.longest
            );
            prop_assert_eq!(self.cache.token_count(sequence.id).unwrap(), sequence.tokens.len() as u64);
            prop_assert_eq!(self.cache.next_position(sequence.id).unwrap(), sequence.next_position);
        }
        Ok(())
    }

    /// A sequence has stepped or was created.
    fn rests(&mut self, id: SequenceId) {
        self.rested.retain(|other| *other != id);
        self.rested.push(id);
    }

    /// The sequences with something to move, found by planning for each.
    fn look_through(
        &mut self,
        way: (Tier, Tier),
        group: GroupId,
        unshared: bool,
        most: usize,
        other: u16,
    ) -> Outcome {
        let other = self.pick(other).map(|index| self.model[index].id);
        let found = self.cache.resting(way, group, unshared, most, other.as_slice());
        let mut all = Vec::new();
        for id in self.rested.clone().into_iter().filter(|id| Some(*id) != other) {
            let Some(index) = self.model.iter().position(|sequence| sequence.id == id) else { continue };
            let mut selection = Selection::of(0..self.model[index].tokens.len() as u64, vec![group]);
            (selection.from, selection.unshared) = (Some(way.0), unshared);
            let plan = self.cache.plan(id, way.1, &selection);
            if self.stepping(index) {
                continue;
            }
            let has_some = plan.is_ok_and(|plan| !plan.moves().is_empty());
            if !unshared {
                prop_assert_eq!(self.cache.with_movable(way, &[id]).contains(&(id, group)), has_some);
            }
            if has_some {
                all.push(id);
            }
        }
        self.seen.found_resting += found.len() as u64;
        if unshared {
            // A page that others held when it was searched may be overlooked.
            prop_assert!(found.iter().all(|id| all.contains(id)));
        } else {
            prop_assert_eq!(&found[..], &all[..all.len().min(most)]);
        }
        Ok(())
    }

    fn migrate(
        &mut self,
        index: usize,
        to: Tier,
        tokens: std::ops::Range<u64>,
        keep: bool,
        stale: bool,
    ) -> Outcome {
        let id = self.model[index].id;
        let pages_max = if stale { usize::MAX } else { 3 };
        let groups = (0..self.shape.groups.len() as u8).map(|group| (GroupId(group), pages_max)).collect();
        let only = (stale && keep).then_some(Tier::Host);
        let selection = Selection {
            tokens,
            groups,
            keep,
            newest_first: stale,
            from: only,
            unshared: stale,
            sealed: stale,
        };
        let plan = self.cache.plan(id, to, &selection);
        let Ok(plan) = plan else {
            prop_assert_eq!(self.shape.blocks[to.index()], 0, "{:?}", plan);
            return Ok(());
        };
        prop_assert!(plan.moves().iter().all(|m| only.is_none_or(|tier| tier == m.from)));
        let result = self.cache.execute(&plan);
        match result {
            Ok((_, completion, copies)) => {
                prop_assert!(!self.stepping(index));
                prop_assert_eq!(copies.iter().map(|c| c.bytes).sum::<u64>(), plan.bytes());
                if stale && !plan.moves().is_empty() && !copies.is_empty() {
                    let again = self.cache.execute(&plan);
                    prop_assert!(
                        matches!(again, Err(Error::InvalidArgument { argument: "plan", .. })),
                        "{:?}",
                        again
                    );
                }
                for copy in &copies {
                    self.check_handed_out((copy.to.0, copy.group, copy.to.1))?;
                }
                self.tickets.push(InFlight { plan, completion, copies, behind: self.minted, words: 0 });
            }
            Err(Error::OutOfBlocks { tier, group, blocks_short, .. }) => {
                prop_assert_eq!(tier, to);
                prop_assert!(blocks_short > 0);
                let wanted = plan.moves().iter().filter(|m| m.bytes > 0 && m.group == group).count() as u64;
                prop_assert!(wanted >= blocks_short);
            }
            Err(Error::InvalidArgument { argument: "sequence", .. }) => prop_assert!(self.stepping(index)),
            Err(error) => return Err(TestCaseError::fail(format!("{error} of {plan:?}"))),
        }
        Ok(())
    }

    fn reserve(&mut self, picks: &[(u16, u8)]) -> Outcome {
        let mut batch: Vec<(usize, u32)> = Vec::new();
        for &(pick, count) in picks {
            let Some(index) = self.pick(pick) else { return Ok(()) };
            if batch.iter().all(|(at, _)| *at != index) {
                batch.push((index, u32::from(count)));
            }
        }
        let request: Vec<_> = batch.iter().map(|&(at, count)| (self.model[at].id, count)).collect();
        let free_before = self.free_blocks();
        let result = self.cache.reserve(&request);
        if self.step.is_some() {
            prop_assert!(refused(&result, "step"));
            return Ok(());
        }
        match result {
            Ok(()) => {}
            Err(Error::OutOfBlocks { tier: Tier::Device, blocks_short, .. }) => {
                prop_assert!(blocks_short > 0);
                self.seen.refused_steps += 1;
                request.iter().for_each(|(id, _)| self.rests(*id));
                prop_assert_eq!(free_before, self.free_blocks(), "a refused step changed something");
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
        self.seen.steps += 1;
        let issued = self.stream.len();
        for copy in self.cache.step_copies().to_vec() {
            self.seen.copies_on_write += 1;
            self.check_handed_out((copy.to.0, copy.group, copy.to.1))?;
            self.stream.push_back(Kernel::CopyBlock(copy));
        }
        let mut step = Vec::new();
        for (index, &(at, count)) in batch.iter().enumerate() {
            let start = self.model[at].next_position;
            let new: Vec<_> = (0..u64::from(count))
                .map(|i| Token { name: self.next_name + i, position: start + i })
                .collect();
            self.next_name += u64::from(count);
            for group in (0..self.shape.groups.len() as u8).map(GroupId) {
                self.issue(index, at, group, &new)?;
            }
            step.push((at, new));
        }
        let reads_disk = self.stream.iter().skip(issued).any(|kernel| match kernel {
            Kernel::CopyBlock(copy) => copy.from.0 == Tier::Disk,
            Kernel::Read { at, .. } => at.0 == Tier::Disk,
            Kernel::Write { .. } | Kernel::Retired(_) => false,
        });
        self.seen.steps_over_disk += u64::from(reads_disk);
        prop_assert_eq!(self.cache.step_pages_on_disk() > 0, reads_disk);
        self.step = Some(step);
        Ok(())
    }

    fn free_blocks(&mut self) -> Vec<u64> {
        let groups = self.shape.groups.len() as u8;
        let places = Tier::ALL.into_iter().flat_map(|tier| (0..groups).map(move |g| (tier, GroupId(g))));
        places.map(|(tier, group)| self.cache.block_counts(tier, group).free).collect()
    }

    /// Issues the appends and reads of one sequence in one group, following the core's row and spans.
    fn issue(&mut self, index: usize, at: usize, group: GroupId, new: &[Token]) -> Outcome {
        let sequence = self.model[at].clone();
        let (row, version) = self.cache.step_row(index, group);
        let row = row.to_vec();
        if let Some((then, before)) = self.rows_seen.insert((sequence.id, group), (version, row.clone())) {
            prop_assert!(
                then != version || row.starts_with(&before),
                "a row has changed, and not its version"
            );
        }
        let place = |page: usize| (row[page].tier(), group, row[page].block());
        if self.shape.groups[group.index()].kind == GroupKind::State {
            let mut row = row.iter().map(|at| (at.tier(), group, at.block()));
            if !sequence.tokens.is_empty() {
                let at = row.next().expect("a state to read");
                self.stream.push_back(Kernel::Read { at, rows: vec![(0, sequence.state)] });
            }
            if let Some(last) = new.last() {
                let at = row.next().expect("a state to write");
                self.stream.push_back(Kernel::Write { at, row: 0, word: last.name });
            }
            prop_assert_eq!(row.next(), None);
            return Ok(());
        }
        let page_size = self.rows(group) as u32;
        let expected: Vec<Token> = sequence.tokens.iter().chain(new).copied().collect();
        let end = sequence.next_position + new.len() as u64;
        let spans: Vec<_> = self.cache.step_spans(index, group).collect();
        let sinks: usize = spans.iter().filter(|s| s.sight != Sight::Window).map(|s| s.count as usize).sum();
        let left = expected.len() - spans.iter().map(|span| span.count as usize).sum::<usize>();
        self.check_window(at, group, sinks, left, expected.len())?;
        self.seen.past_windows += u64::from(left > 0);
        let mut token = 0;
        let mut last_offset = None;
        let (mut reads, mut written) = (Vec::new(), Vec::new());
        for span in spans {
            token = if token == sinks { token + left } else { token };
            for i in 0..span.count {
                let (page, r) = ((span.skip + i) / page_size, (span.skip + i) % page_size);
                let at = place((span.first_page + page) as usize);
                prop_assert!(at.0 != Tier::Disk || self.cache.step_reaches_disk(index, group));
                let want = expected[token];
                let seen_at = end - (expected.len() - token) as u64;
                prop_assert_eq!(want.position + span.offset, seen_at, "token {} of {:?}", token, span);
                for query in sequence.tokens.len().max(token)..expected.len() {
                    let nearer = self.trails(group, token, query);
                    prop_assert_eq!(span.offset_for(query - left), span.offset + nearer, "{:?}", span);
                }
                if token >= sequence.tokens.len() {
                    prop_assert_eq!(at.0, Tier::Device);
                    if r == 0 {
                        self.check_handed_out(at)?;
                    }
                    written.push((at.2, r));
                    self.stream.push_back(Kernel::Write { at, row: r, word: want.name });
                }
                reads.push(Kernel::Read { at, rows: vec![(r, want.name)] });
                token += 1;
            }
            last_offset = Some(span.offset);
        }
        prop_assert_eq!((token, last_offset), (expected.len(), Some(0)));
        prop_assert_eq!(self.cache.step_slots(index, group).collect::<Vec<_>>(), written);
        self.stream.extend(reads);
        Ok(())
    }

    /// By how many positions a query sees a token nearer than it was stored.
    fn trails(&self, group: GroupId, token: usize, query: usize) -> u64 {
        let Some(window) = self.shape.groups[group.index()].window else { return 0 };
        let (sinks, tokens) = (window.sinks as usize, window.tokens as usize);
        if !window.trailing || token >= sinks { 0 } else { (query + 1).saturating_sub(sinks + tokens) as u64 }
    }

    /// Every future query finds what its window holds, and little more is there. Of `len` tokens, including new ones, `left`
    /// are gone after the first `sinks`.
    fn check_window(&self, at: usize, group: GroupId, sinks: usize, left: usize, len: usize) -> Outcome {
        let Group { window, .. } = self.shape.groups[group.index()];
        let Some(window) = window else {
            prop_assert_eq!((sinks, left), (0, 0));
            return Ok(());
        };
        let before = self.model[at].tokens.len();
        prop_assert_eq!(sinks, len.min(window.sinks as usize));
        // Starting with the earliest query to which a rewind may lead.
        let earliest = self.cache.rewind_limit(self.model[at].id).unwrap() as usize;
        for query in earliest..=len {
            for token in (query + 1).saturating_sub(window.tokens as usize)..query {
                prop_assert!(token < sinks || token >= sinks + left, "query {query} misses token {token}");
            }
        }
        let kept = (window.tokens + window.headroom) as usize + self.rows(group);
        prop_assert!(before.saturating_sub(sinks + left) <= kept, "{before} tokens, {left} of them left");
        Ok(())
    }

    fn commit(&mut self, accepted: Option<&[u8]>) -> Outcome {
        let Some(step) = self.step.take() else {
            prop_assert!(self.cache.commit(None).is_err());
            return Ok(());
        };
        let counts: Option<Vec<u32>> = accepted.filter(|_| !self.has_states()).map(|accepted| {
            step.iter().zip(accepted).map(|((_, new), a)| u32::from(*a) % (new.len() as u32 + 1)).collect()
        });
        let too_many: Vec<u32> = step.iter().map(|(_, new)| new.len() as u32 + 1).collect();
        prop_assert!(step.is_empty() || self.cache.commit(Some(&too_many)).is_err());
        let epoch = self.cache.commit(counts.as_deref()).unwrap();
        step.iter().for_each(|(at, _)| self.rests(self.model[*at].id));
        self.minted = epoch.0;
        self.stream.push_back(Kernel::Retired(epoch));
        for (index, (at, new)) in step.into_iter().enumerate() {
            let count = counts.as_ref().map_or(new.len(), |counts| counts[index] as usize);
            let sequence = &mut self.model[at];
            self.seen.rejected_tokens += (new.len() - count) as u64;
            sequence.tokens.extend(&new[..count]);
            sequence.next_position += count as u64;
            sequence.longest = sequence.longest.max(sequence.tokens.len() as u64);
            sequence.state = new.last().map_or(sequence.state, |last| last.name);
        }
        Ok(())
    }

    /// Ends everything: nothing may be left.
    fn wind_up(&mut self) -> Outcome {
        self.apply(&Op::Rollback)?;
        while !self.tickets.is_empty() {
            prop_assert!(!self.tickets[0].plan.moves().is_empty() || self.tickets[0].copies.is_empty());
            self.finish(0, false)?;
        }
        self.apply(&Op::Reserve((0..self.model.len() as u16).map(|i| (i, 0)).collect()))?;
        self.apply(&Op::Commit(None))?;
        self.run_stream(self.minted)?;
        while !self.model.is_empty() {
            self.apply(&Op::Release(0))?;
        }
        self.cache.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
        self.adopt_elsewhere()?;
        while !self.kept.is_empty() {
            self.apply(&Op::Forget(0))?;
        }
        self.cache.retire(Epoch(self.minted)).unwrap();
        self.zero(0);
        for tier in Tier::ALL {
            for group in (0..self.shape.groups.len() as u8).map(GroupId) {
                let counts = self.cache.block_counts(tier, group);
                prop_assert_eq!((counts.used, counts.draining), (0, 0));
            }
        }
        self.cache.audit().map_err(|error| TestCaseError::fail(error.to_string()))
    }
}

/// Generates cases and runs each on a fresh cache. `seen` adds up what they did.
fn run(config: Config, broken: Option<Fence>, seen: &Cell<Seen>) -> Result<(), String> {
    let strategy = Operations::sequential_strategy(1..2 * OPS_PER_CASE);
    let result = TestRunner::new(config).run(&strategy, |(shape, ops, applied)| {
        let mut machine = Machine::new(&shape);
        if let Some(fence) = broken {
            machine.cache.break_fence(fence);
        }
        for op in &ops {
            // Shrinking first leaves out what came after the failure.
            if let Some(applied) = &applied {
                applied.fetch_add(1, Ordering::Relaxed);
            }
            machine.apply(op)?;
        }
        machine.wind_up()?;
        let mut total = seen.get();
        total.add(machine.seen);
        seen.set(total);
        Ok(())
    });
    result.map_err(|error| error.to_string())
}

fn operations() -> u64 {
    std::env::var("PAGODA_MODEL_OPS").map_or(1_000_000, |ops| ops.parse().expect("a number of operations"))
}

#[test]
fn the_core_agrees_with_a_naive_model() {
    let seen = Cell::new(Seen::default());
    let cases = operations().div_ceil(OPS_PER_CASE as u64 * 9 / 10) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 50_000, ..Config::default() };
    run(config, None, &seen).unwrap_or_else(|error| panic!("{error}"));
    let seen = seen.into_inner();
    assert!(seen.operations >= operations());
    let often = [
        seen.steps,
        seen.refused_steps,
        seen.copies_on_write,
        seen.rejected_tokens,
        seen.words_read,
        seen.pages_moved,
        seen.past_windows,
        seen.refused_rewinds,
        seen.steps_over_disk,
        seen.found_resting,
        seen.zeroed,
    ];
    assert!(
        often.iter().all(|&count| count > seen.operations / 1000),
        "the operations miss the point: {seen:?}"
    );
    assert!(
        seen.moves_inside_step > 0 && seen.failed_tickets > 0 && seen.dropped_copies > 0 && seen.revived > 0,
        "{seen:?}"
    );
}

/// Negative control: without the fence, the same test must fail.
fn notices_that_it_is_gone(fence: Fence) {
    let config = Config { cases: 4000, failure_persistence: None, max_shrink_iters: 1, ..Config::default() };
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = run(config, Some(fence), &Cell::default());
    std::panic::set_hook(hook);
    assert!(result.is_err(), "4000 runs without the fence {fence:?} went unnoticed");
}

#[test]
fn a_missing_epoch_fence_is_noticed() {
    notices_that_it_is_gone(Fence::Epochs);
}

#[test]
fn a_missing_copy_fence_is_noticed() {
    notices_that_it_is_gone(Fence::Copies);
}

#[test]
fn a_missing_step_fence_is_noticed() {
    notices_that_it_is_gone(Fence::Step);
}

#[test]
fn a_missing_completion_fence_is_noticed() {
    notices_that_it_is_gone(Fence::Completion);
}

#[test]
fn a_page_that_leaves_its_window_too_early_is_noticed() {
    notices_that_it_is_gone(Fence::Window);
}

#[test]
fn a_block_that_is_not_zeroed_is_noticed() {
    notices_that_it_is_gone(Fence::Zeros);
}
