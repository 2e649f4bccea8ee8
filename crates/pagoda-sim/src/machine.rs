//! What a caller may do to a cache, and the naive model of it: the tokens of every sequence.

use crate::copies::{Job, Late, Owed};
use crate::drive::{Conduct, Drive};
use crate::memory::{Memory, Place};
use crate::random::Random;
use crate::sessions::Sessions;
use crate::shape::Shape;
use crate::streaming::Streaming;
use crate::{Missing, Tally};
use pagoda_core::ids::{BlockId, Epoch, GroupId, SequenceId, Tier};
use pagoda_core::plan::{BlockCopy, Plan, Selection};
use pagoda_core::table::{Sight, SpanView};
use pagoda_core::{Cache, Error};
use std::collections::{BTreeMap, VecDeque};

/// The result of a part of the simulation, or a description of what is wrong.
pub(crate) type Outcome<T = ()> = Result<T, String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}
pub(crate) use ensure;

/// Most live sequences at a time.
const SEQUENCES: usize = 10;

/// Lines of a trace.
const TRACE: usize = 60;

/// One appended token: a unique number, and the position at which it was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) name: u64,
    position: u64,
}

/// All tokens of a sequence, including those that have left a window.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tokens {
    pub(crate) all: Vec<Token>,
    next_position: u64,
    /// The largest number of tokens that there ever were.
    longest: u64,
}

/// A live sequence.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) id: SequenceId,
    pub(crate) tokens: Tokens,
}

/// Work that was issued and runs later, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernel {
    Copy(BlockCopy),
    Append { at: Place, row: usize, token: u64 },
    Read { at: Place, row: usize, token: u64 },
    Retired(Epoch),
}

/// A cache under test, what is simulated around it, and what it should hold.
pub(crate) struct Machine {
    pub(crate) random: Random,
    pub(crate) shape: Shape,
    pub(crate) missing: Option<Missing>,
    pub(crate) cache: Cache,
    pub(crate) memory: Memory,
    pub(crate) drive: Drive,
    pub(crate) streaming: Streaming,
    pub(crate) stream: VecDeque<Kernel>,
    pub(crate) retired: u64,
    pub(crate) minted: u64,
    pub(crate) jobs: Vec<Job>,
    pub(crate) owed: Vec<Owed>,
    pub(crate) late: Vec<Late>,
    pub(crate) live: Vec<Live>,
    /// Sequences that read a corrupt page. A caller would not keep them for long.
    pub(crate) doomed: Vec<SequenceId>,
    pub(crate) sessions: Sessions,
    released: Vec<SequenceId>,
    plans: Vec<Plan>,
    /// The batch of the last step that was tried.
    batch: Vec<SequenceId>,
    /// The batch of the open step, with the tokens that it appends.
    step: Option<Vec<(SequenceId, Vec<Token>)>>,
    names: u64,
    pub(crate) tally: Tally,
    pub(crate) trace: VecDeque<String>,
}

type Operation = fn(&mut Machine) -> Outcome;

/// Every operation: how often it occurs in 1000, and its name.
const OPERATIONS: [(usize, &str, Operation); 28] = [
    (25, "create", Machine::create),
    (30, "fork", Machine::fork),
    (25, "release", Machine::release),
    (20, "truncate", Machine::truncate),
    (20, "drop", Machine::drop_tokens),
    (160, "reserve and append", Machine::reserve),
    (80, "attend to pages on disk", Machine::attend_a_little),
    (70, "read ahead", Machine::read_a_little),
    (150, "commit", Machine::commit),
    (20, "roll back", Machine::rollback),
    (60, "retire", Machine::retire),
    (70, "plan and execute", Machine::migrate),
    (20, "plan", Machine::plan_for_later),
    (20, "execute an earlier plan", Machine::execute_earlier),
    (10, "drop copies", Machine::drop_copies),
    (130, "copy a little", Machine::copy_a_little),
    (70, "report copies", Machine::report_one),
    (10, "a link fails", Machine::fail_link),
    (15, "make late copies", Machine::end_late),
    (30, "save", Machine::save),
    (25, "load", Machine::load),
    (5, "forget", Machine::forget),
    (10, "use after release", Machine::use_after_release),
    (15, "read what is kept", Machine::check_any_key),
    (80, "harm the drive", Machine::do_harm),
    (30, "give memory back", Machine::trim),
    (60, "zero freed blocks", Machine::zero),
    (5, "kill or lose power", Machine::restart),
];

impl Machine {
    pub(crate) fn new(seed: u64, missing: Option<Missing>) -> Self {
        let mut random = Random::new(seed);
        let shape = Shape::any(&mut random);
        let conduct = [Conduct::Works, Conduct::Fails, Conduct::Lies, Conduct::Lies][random.below(4)];
        let drive = Drive::new(&shape, conduct);
        let mut machine = Self {
            cache: shape.cache(drive.store.geometry().arena()),
            memory: Memory::new(&shape),
            streaming: Streaming::new(&drive.store, &mut random),
            drive,
            missing,
            stream: VecDeque::new(),
            retired: 0,
            minted: 0,
            jobs: Vec::new(),
            owed: Vec::new(),
            late: Vec::new(),
            live: Vec::new(),
            doomed: Vec::new(),
            sessions: Sessions::default(),
            released: Vec::new(),
            plans: Vec::new(),
            batch: Vec::new(),
            step: None,
            names: 0,
            tally: Tally::default(),
            trace: VecDeque::new(),
            random,
            shape,
        };
        machine.break_fence();
        machine
    }

    pub(crate) fn break_fence(&mut self) {
        if let Some(Missing::Fence(fence)) = self.missing {
            self.cache.break_fence(fence);
        }
    }

    /// Does one operation, and checks everything that must hold after it.
    pub(crate) fn operate(&mut self) -> Outcome {
        let mut pick = self.random.below(OPERATIONS.iter().map(|(weight, ..)| weight).sum());
        let (_, name, act) = OPERATIONS
            .iter()
            .find(|(weight, ..)| {
                let here = pick < *weight;
                pick = if here { 0 } else { pick - weight };
                here
            })
            .expect("the weights add up");
        self.remember(|| (*name).into());
        *self.tally.operations.entry(name).or_default() += 1;
        act(self)?;
        self.age_jobs();
        self.hear_failures()?;
        self.check()
    }

    /// Adds to the trace, for anyone who investigates a failure.
    pub(crate) fn remember(&mut self, what: impl FnOnce() -> String) {
        if self.trace.len() == TRACE {
            self.trace.pop_front();
        }
        self.trace.push_back(what());
    }

    /// The bookkeeping agrees with itself and with the model.
    fn check(&mut self) -> Outcome {
        self.cache.audit().map_err(|error| error.to_string())?;
        let headroom =
            self.shape.groups.iter().filter_map(|group| group.window).map(|window| window.headroom);
        let headroom = u64::from(headroom.min().unwrap_or(0));
        for Live { id, tokens } in &self.live {
            let said = (self.cache.token_count(*id), self.cache.next_position(*id));
            let right = (Ok(tokens.all.len() as u64), Ok(tokens.next_position));
            ensure!(said == right, "{id:?} has tokens and position {said:?}, not {right:?}");
            let limit = self.cache.rewind_limit(*id).map_err(|error| error.to_string())?;
            ensure!(
                limit <= tokens.longest.saturating_sub(headroom),
                "{id:?} rewinds to {limit} of {}",
                tokens.longest
            );
        }
        Ok(())
    }

    pub(crate) fn is_stepping(&self, id: SequenceId) -> bool {
        self.step.as_ref().is_some_and(|step| step.iter().any(|(at, _)| *at == id))
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.live.is_empty()).then(|| self.random.below(self.live.len()))
    }

    /// Passes on what the core said about a sequence, which it must refuse exactly while a step uses it.
    pub(crate) fn unless_stepping<T>(&self, id: SequenceId, result: Result<T, Error>) -> Outcome<Option<T>> {
        ensure!(result.is_err() == self.is_stepping(id), "refused or not: {:?}", result.err());
        Ok(result.ok())
    }

    fn create(&mut self) -> Outcome {
        if self.live.len() < SEQUENCES {
            let id = self.cache.create().map_err(|error| error.to_string())?;
            self.live.push(Live { id, tokens: Tokens::default() });
        }
        Ok(())
    }

    fn fork(&mut self) -> Outcome {
        let Some(index) = self.pick().filter(|_| self.live.len() < SEQUENCES) else { return Ok(()) };
        let parent = self.live[index].clone();
        let child = self.cache.fork(parent.id);
        if let Some(id) = self.unless_stepping(parent.id, child)? {
            self.live.push(Live { id, ..parent });
        }
        Ok(())
    }

    fn release(&mut self) -> Outcome {
        let doomed = self.doomed.pop().and_then(|id| self.live.iter().position(|live| live.id == id));
        let Some(index) = doomed.or_else(|| self.pick()) else { return Ok(()) };
        let id = self.live[index].id;
        let result = self.cache.release(id);
        if self.unless_stepping(id, result)?.is_some() {
            self.live.swap_remove(index);
            self.released.push(id);
        }
        Ok(())
    }

    fn use_after_release(&mut self) -> Outcome {
        let Some(id) = self.random.pick(&self.released) else { return Ok(()) };
        let gone = Error::UseAfterRelease { id };
        let plan = |cache: &Cache| cache.plan(id, Tier::Device, &Selection::of(0..0, Vec::new()));
        let said = [
            self.cache.release(id).err(),
            self.cache.fork(id).err(),
            self.cache.truncate(id, 0).err(),
            plan(&self.cache).err(),
            self.cache.keep(id).err(),
        ];
        ensure!(
            said.iter().all(|error| error.as_ref() == Some(&gone)),
            "a released sequence was used: {said:?}"
        );
        Ok(())
    }

    fn truncate(&mut self) -> Outcome {
        let Some(index) = self.pick() else { return Ok(()) };
        let Live { id, tokens } = &self.live[index];
        let (id, len) = (*id, self.random.below(tokens.all.len() + 1));
        let limit = self.cache.rewind_limit(id).map_err(|error| error.to_string())? as usize;
        let result = self.cache.truncate(id, len as u64);
        if len > 0 && len < limit {
            ensure!(result.is_err(), "{id:?} was cut to {len}, behind {limit}");
        } else if self.unless_stepping(id, result)?.is_some() {
            self.live[index].tokens.truncate(len);
        }
        Ok(())
    }

    fn drop_tokens(&mut self) -> Outcome {
        let Some(index) = self.pick() else { return Ok(()) };
        let Live { id, tokens } = &self.live[index];
        let (id, len) = (*id, tokens.all.len());
        let (a, b) = (self.random.below(len + 1), self.random.below(len + 1));
        let range = a.min(b)..a.max(b);
        let limit = self.cache.rewind_limit(id).map_err(|error| error.to_string())? as usize;
        match self.cache.drop_tokens(id, range.start as u64..range.end as u64) {
            Err(Error::InvalidArgument { argument: "start, stop", .. }) => {
                // A window refuses a drop only if sinks would change, or if more would go than there is to spare.
                let windows = self.shape.groups.iter().filter_map(|group| group.window);
                let sinks = windows.map(|window| window.sinks).max().unwrap_or(0) as usize;
                let spare = len.saturating_sub(limit);
                ensure!(
                    limit > 0 && (range.start < sinks || range.len() > spare),
                    "{range:?} of {id:?} was refused"
                );
            }
            result => {
                if self.unless_stepping(id, result)?.is_some() {
                    self.live[index].tokens.all.drain(range);
                }
            }
        }
        Ok(())
    }

    fn reserve(&mut self) -> Outcome {
        // Often the batch of the previous step, as in decoding.
        let mut ids = std::mem::take(&mut self.batch);
        ids.retain(|id| self.live.iter().any(|live| live.id == *id));
        if ids.is_empty() || self.random.once_in(2) {
            ids.clear();
            for _ in 0..self.random.within(1..5) {
                let Some(index) = self.pick() else { return Ok(()) };
                let id = self.live[index].id;
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
        }
        let batch: Vec<_> = ids.iter().map(|&id| (id, self.random.below(10) as u32)).collect();
        self.batch = ids;
        let free = self.free_blocks();
        match self.cache.reserve(&batch) {
            Err(Error::InvalidArgument { argument: "step", .. }) => {
                ensure!(self.steps(), "no step is open, and one was refused");
                return Ok(());
            }
            Err(Error::OutOfBlocks { tier: Tier::Device, .. }) if self.step.is_none() => {
                ensure!(self.free_blocks() == free, "a refused step changed something");
                self.tally.see("refused: steps without room", 1);
                return self.make_room();
            }
            result => result.map_err(|error| error.to_string())?,
        }
        ensure!(self.step.is_none(), "a second step was opened");
        if self.cache.step_pages_on_disk() > 0 && self.random.once_in(4) {
            self.tally.see("refused: steps with pages on disk", 1);
            self.end(Cache::rollback)?;
            return self.bring_in(&batch);
        }
        let copies = self.cache.step_copies().iter().copied();
        let (from_disk, in_memory): (Vec<_>, Vec<_>) = copies.partition(|copy| copy.from.0 == Tier::Disk);
        let since = Some(Epoch(self.minted));
        if self.gives_up(&from_disk, Late { since, ..Late::default() })
            || self.copy_disk(&from_disk)?.is_err()
        {
            return self.end(Cache::rollback);
        }
        self.stream.extend(in_memory.into_iter().map(Kernel::Copy));
        let mut step = Vec::new();
        for (index, &(id, count)) in batch.iter().enumerate() {
            let tokens = self.tokens(id)?;
            let first = tokens.next_position;
            let new: Vec<_> = (0..u64::from(count))
                .map(|i| Token { name: self.names + 1 + i, position: first + i })
                .collect();
            let all: Vec<_> = tokens.all.iter().chain(&new).map(|token| token.name).collect();
            self.names += u64::from(count);
            for group in self.shape.group_ids() {
                let (old, mut appended) = (all.len() - new.len(), Vec::new());
                let mut on_disk = Vec::new();
                for (token, at, row) in self.placed(index, group, &all)? {
                    if token >= old {
                        ensure!(at.0 == Tier::Device, "token {token} of {id:?} goes to {at:?}");
                        appended.push((at.2, row as u32));
                        self.stream.push_back(Kernel::Append { at, row, token: all[token] });
                    }
                    match at.0 {
                        Tier::Disk => on_disk.push((at, row, all[token])),
                        _ => self.stream.push_back(Kernel::Read { at, row, token: all[token] }),
                    }
                }
                self.streaming.list(id, self.shape.group(group).layers, &on_disk);
                let slots: Vec<_> = self.cache.step_slots(index, group).collect();
                for &(block, _) in slots.iter().filter(|(_, row)| self.shape.zeroes && *row == 0) {
                    let bytes = self.memory.block((Tier::Device, group, block));
                    ensure!(Memory::is_blank(bytes), "{block:?} of {group:?} is handed out as it was");
                }
                ensure!(slots == appended, "{id:?} is to append to {slots:?}, not to {appended:?}");
            }
            step.push((id, new));
        }
        self.tally.see("steps", 1);
        self.step = Some(step);
        Ok(())
    }

    fn tokens(&self, id: SequenceId) -> Outcome<&Tokens> {
        let live = self.live.iter().find(|live| live.id == id);
        live.map(|live| &live.tokens).ok_or_else(|| format!("{id:?} does not live"))
    }

    fn free_blocks(&mut self) -> Vec<u64> {
        Tier::ALL.into_iter().flat_map(|tier| self.cache.free_blocks(tier).collect::<Vec<_>>()).collect()
    }

    /// Where a sequence of the open step has its tokens: all that a future query may see.
    fn placed(&self, index: usize, group: GroupId, all: &[u64]) -> Outcome<Vec<(usize, Place, usize)>> {
        let (shape, row) = (self.shape.group(group), self.cache.step_row(index, group).0);
        let spans: Vec<SpanView> = self.cache.step_spans(index, group).collect();
        let count = |span: &SpanView| span.count as usize;
        let sinks: usize = spans.iter().filter(|span| span.sight != Sight::Window).map(count).sum();
        let held: usize = spans.iter().map(count).sum();
        ensure!(held <= all.len(), "{held} tokens of {} are there", all.len());
        let left = all.len() - held;
        if let Some(window) = shape.window {
            ensure!(
                left == 0 || sinks == all.len().min(window.sinks as usize),
                "{sinks} sinks of {window:?}"
            );
            let id = self.cache.step_batch().nth(index).expect("of the batch").0;
            let earliest = self.cache.rewind_limit(id).map_err(|error| error.to_string())? as usize;
            for query in earliest..=all.len() {
                let first = (query + 1).saturating_sub(window.tokens as usize);
                let missed = (first.max(sinks)..query.min(sinks + left)).next();
                ensure!(missed.is_none(), "query {query} of {id:?} misses token {missed:?}");
            }
        } else {
            ensure!(left == 0, "{left} tokens are gone, and there is no window");
        }
        let spans: Vec<_> = spans.iter().map(|span| (span.first_page, span.skip, span.count)).collect();
        let places = placed(&spans, sinks, left, shape.page_size);
        Ok(places.map(|(token, page, r)| (token, (row[page].tier(), group, row[page].block()), r)).collect())
    }

    fn commit(&mut self) -> Outcome {
        if self.steps() && !self.attend()? {
            return Ok(());
        }
        let Some(step) = self.step.take() else {
            ensure!(self.cache.commit(None).is_err(), "a step was committed that was not open");
            return Ok(());
        };
        let accepted: Option<Vec<u32>> = self
            .random
            .once_in(3)
            .then(|| step.iter().map(|(_, new)| self.random.below(new.len() + 1) as u32).collect());
        self.end(|cache| cache.commit(accepted.as_deref()))?;
        for (index, (id, new)) in step.into_iter().enumerate() {
            let count = accepted.as_ref().map_or(new.len(), |accepted| accepted[index] as usize);
            let live = self.live.iter_mut().find(|live| live.id == id).expect("a step keeps it");
            live.tokens.push(&new[..count]);
            self.tally.see("tokens: appended", count as u64);
            self.tally.see("tokens: rejected", (new.len() - count) as u64);
        }
        self.look_around()
    }

    fn rollback(&mut self) -> Outcome {
        if self.step.take().is_none() {
            ensure!(self.cache.rollback().is_err(), "a step was rolled back that was not open");
            return Ok(());
        }
        self.end(Cache::rollback)
    }

    /// Whether a step is open.
    pub(crate) fn steps(&self) -> bool {
        self.step.is_some()
    }

    /// The open step's tokens are not appended.
    pub(crate) fn forget_step(&mut self) {
        self.step = None;
    }

    pub(crate) fn end(&mut self, end: impl FnOnce(&mut Cache) -> Result<Epoch, Error>) -> Outcome {
        let epoch = end(&mut self.cache).map_err(|error| error.to_string())?;
        self.minted = epoch.0;
        self.streaming.leave();
        self.stream.push_back(Kernel::Retired(epoch));
        Ok(())
    }

    /// Reads every token of every sequence: from memory later, as a step does; from disk now, through the ring or page by
    /// page.
    pub(crate) fn look_around(&mut self) -> Outcome {
        let batch: Vec<_> = self.live.iter().map(|live| (live.id, 0)).collect();
        self.cache.reserve(&batch).map_err(|error| format!("a look around: {error}"))?;
        let mut on_disk = Vec::new();
        for index in 0..self.live.len() {
            let all: Vec<_> = self.live[index].tokens.all.iter().map(|token| token.name).collect();
            for group in self.shape.group_ids() {
                let mut of_it = Vec::new();
                for (token, at, row) in self.placed(index, group, &all)? {
                    let token = all[token];
                    match at.0 {
                        Tier::Disk => of_it.push((at, row, token)),
                        _ => self.stream.push_back(Kernel::Read { at, row, token }),
                    }
                }
                on_disk.push((self.live[index].id, group, of_it));
            }
        }
        if self.random.once_in(2) {
            for (id, group, of_it) in on_disk {
                self.streaming.list(id, self.shape.group(group).layers, &of_it);
            }
            self.step = Some(Vec::new());
            return if self.attend()? { self.rollback() } else { Ok(()) };
        }
        self.end(Cache::rollback)?;
        let mut pages = BTreeMap::<_, Vec<(usize, u64)>>::new();
        for (at, row, token) in on_disk.into_iter().flat_map(|(.., of_it)| of_it) {
            pages.entry((at.1, at.2)).or_default().push((row, token));
        }
        for ((group, block), rows) in pages {
            if self.random.once_in(2) {
                self.check_page(group, block, &rows)?;
            }
        }
        Ok(())
    }

    fn retire(&mut self) -> Outcome {
        let epoch = self.retired + self.random.below((self.minted - self.retired) as usize + 1) as u64;
        self.run_stream(epoch)?;
        self.cache.retire(self.retirable(epoch)).map_err(|error| error.to_string())?;
        ensure!(self.cache.retire(Epoch(self.minted + 1)).is_err(), "a step retired that never was");
        Ok(())
    }

    /// A plan for some pages of a sequence, to some tier.
    fn any_plan(&mut self) -> Outcome<Option<Plan>> {
        let Some(index) = self.pick() else { return Ok(None) };
        let Live { id, tokens } = &self.live[index];
        let (id, count) = (*id, tokens.all.len() + 1);
        let tiers: Vec<_> = self.shape.tiers().collect();
        let (a, b) = (self.random.below(count), self.random.below(count));
        let mut selection = Selection::of(a.min(b) as u64..a.max(b) as u64, self.shape.group_ids().collect());
        selection.keep = self.random.once_in(2);
        selection.newest_first = self.random.once_in(4);
        selection.unshared = self.random.once_in(4);
        selection.from = self.random.once_in(4).then(|| tiers[self.random.below(tiers.len())]);
        for (_, pages_max) in &mut selection.groups {
            *pages_max = [usize::MAX, self.random.within(1..4)][self.random.below(2)];
        }
        let to = tiers[self.random.below(tiers.len())];
        self.cache.plan(id, to, &selection).map(Some).map_err(|error| error.to_string())
    }

    fn migrate(&mut self) -> Outcome {
        let Some(plan) = self.any_plan()? else { return Ok(()) };
        self.launch(&plan).map(drop)
    }

    fn plan_for_later(&mut self) -> Outcome {
        if let Some(plan) = self.any_plan()?.filter(|_| self.plans.len() < 8) {
            self.plans.push(plan);
        }
        Ok(())
    }

    fn execute_earlier(&mut self) -> Outcome {
        if self.plans.is_empty() {
            return Ok(());
        }
        let plan = self.plans.swap_remove(self.random.below(self.plans.len()));
        self.launch(&plan).map(drop)
    }

    /// Moves pages that a step would have to read from disk into memory, as far as there is room.
    fn bring_in(&mut self, batch: &[(SequenceId, u32)]) -> Outcome {
        for &(id, _) in batch {
            let memory: Vec<_> = self.shape.tiers().filter(|tier| *tier != Tier::Disk).collect();
            let len = self.tokens(id)?.all.len() as u64;
            let mut selection = Selection::of(0..len, self.shape.group_ids().collect());
            (selection.from, selection.keep) = (Some(Tier::Disk), self.random.once_in(2));
            for (_, pages_max) in &mut selection.groups {
                *pages_max = self.random.within(1..16);
            }
            let to = memory[self.random.below(memory.len())];
            let plan = self.cache.plan(id, to, &selection).map_err(|error| error.to_string())?;
            self.launch(&plan)?;
        }
        Ok(())
    }

    /// Moves pages of the sequence that has rested longest off the device.
    fn make_room(&mut self) -> Outcome {
        let below: Vec<_> = self.shape.tiers().filter(|tier| *tier != Tier::Device).collect();
        let (to, group) = (below[self.random.below(below.len())], GroupId(0));
        let late: Vec<_> = self.late.iter().filter_map(|late| late.sequence).collect();
        for id in self.cache.resting((Tier::Device, to), group, self.random.once_in(2), 2, &late) {
            let len = self.tokens(id)?.all.len() as u64;
            let mut selection = Selection::of(0..len, self.shape.group_ids().collect());
            selection.from = Some(Tier::Device);
            let plan = self.cache.plan(id, to, &selection).map_err(|error| error.to_string())?;
            self.launch(&plan)?;
        }
        Ok(())
    }

    fn drop_copies(&mut self) -> Outcome {
        for tier in Tier::ALL {
            for group in self.shape.group_ids() {
                let most = self.random.below(4);
                let before = self.cache.block_counts(tier, group).used;
                let dropped =
                    self.cache.drop_copies(tier, group, most, None).map_err(|error| error.to_string())?;
                let after = self.cache.block_counts(tier, group).used;
                ensure!(
                    dropped <= most && before - after == dropped as u64,
                    "{dropped} copies of {most} were dropped"
                );
                self.tally.see("copies: dropped", dropped as u64);
            }
        }
        Ok(())
    }

    fn copy_a_little(&mut self) -> Outcome {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let job = self.random.below(self.jobs.len());
        self.advance(job)
    }

    fn report_one(&mut self) -> Outcome {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let job = self.random.below(self.jobs.len());
        self.report(job, false)
    }

    fn fail_link(&mut self) -> Outcome {
        if self.jobs.is_empty() {
            return Ok(());
        }
        let job = self.random.below(self.jobs.len());
        self.report(job, true)
    }

    /// Gives back memory without blocks: its content is lost.
    pub(crate) fn trim(&mut self) -> Outcome {
        for tier in [Tier::Device, Tier::Host] {
            self.cache.reclaim(tier).for_each(|range| self.memory.forget(tier, range));
        }
        for range in self.cache.reclaim(Tier::Disk).collect::<Vec<_>>() {
            let given = self.drive.store.discard(range);
            self.judge(given)?.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Zeroes freed blocks, like the binding.
    fn zero(&mut self) -> Outcome {
        let (cache, memory, mut on_disk) = (&mut self.cache, &mut self.memory, Vec::new());
        cache.zero(|tier, group, blocks| {
            if tier == Tier::Disk {
                on_disk.push((group, blocks));
                return false;
            }
            memory.zero(tier, group, blocks);
            true
        });
        for (group, blocks) in on_disk {
            blocks.clone().try_for_each(|block| self.require_unread(group, BlockId::new(block)))?;
            let zeroed = self.drive.store.zero(group, blocks.clone());
            if self.judge(zeroed)?.is_ok() {
                self.tally.see("zeroed: runs of blocks on disk", 1);
                self.cache.zero(|tier, of, run| (tier, of, run) == (Tier::Disk, group, blocks.clone()));
            }
        }
        self.streaming.forget_gone();
        Ok(())
    }

    /// The process ends, and everything that it had in memory is lost.
    pub(crate) fn die(&mut self) {
        self.memory = Memory::new(&self.shape);
        (self.retired, self.minted, self.step) = (0, 0, None);
        self.stream.clear();
        self.streaming.leave();
        self.jobs.clear();
        self.owed.clear();
        self.late.clear();
        self.live.clear();
        self.doomed.clear();
        self.released.clear();
        self.plans.clear();
    }

    /// Adds a sequence that was found again.
    pub(crate) fn revived(&mut self, id: SequenceId, tokens: Tokens) {
        self.live.push(Live { id, tokens });
    }

    /// Whether there may be one more live sequence.
    pub(crate) fn has_room(&self) -> bool {
        self.live.len() < SEQUENCES
    }

    pub(crate) fn pick_live(&mut self) -> Option<Live> {
        self.pick().map(|index| self.live[index].clone())
    }

    /// Ends everything: nothing may be left.
    pub(crate) fn wind_up(&mut self) -> Outcome {
        self.drive.disk.calm();
        self.rollback()?;
        while !self.jobs.is_empty() {
            self.report(0, false)?;
        }
        while !self.late.is_empty() {
            self.end_late()?;
        }
        self.look_around()?;
        self.hear_failures()?;
        ensure!(self.owed.is_empty(), "{} failures were never told", self.owed.len());
        self.run_stream(self.minted)?;
        while self.streaming.reads.count() > 0 {
            self.read_a_little()?;
        }
        self.release_slots()?;
        self.cache.retire(self.retirable(self.minted)).map_err(|error| error.to_string())?;
        for Live { id, .. } in std::mem::take(&mut self.live) {
            self.cache.release(id).map_err(|error| error.to_string())?;
        }
        for kept in self.sessions.all() {
            self.cache.forget(kept);
        }
        for (key, _) in self.drive.store.entries() {
            let deleted = self.drive.store.delete(&key);
            self.judge(deleted)?.map_err(|error| error.to_string())?;
        }
        self.zero()?;
        self.cache.audit().map_err(|error| error.to_string())?;
        for tier in Tier::ALL {
            for group in self.shape.group_ids() {
                let counts = self.cache.block_counts(tier, group);
                ensure!(
                    (counts.used, counts.draining) == (0, 0),
                    "{counts:?} of {group:?} are left on {tier}"
                );
            }
        }
        if self.shape.zeroes {
            let in_memory = [Tier::Device, Tier::Host].map(|tier| Memory::is_blank(self.memory.tier(tier)));
            ensure!(in_memory == [true; 2], "of what was released there is some left in memory");
            // What keys had keeps its bytes: the store has not forgotten it.
            let nothing_was_kept = self.drive.store.entries().is_empty();
            let is_blank = self.drive.disk.with("pages", |bytes| Memory::is_blank(bytes));
            let works = self.drive.conduct == Conduct::Works;
            ensure!(
                is_blank || !nothing_was_kept || !works,
                "of what was released there is some left on disk"
            );
        }
        self.trim()
    }
}

impl Tokens {
    /// The next token continues right after the last one that is left.
    fn truncate(&mut self, len: usize) {
        if len == 0 {
            *self = Self::default();
        } else if len < self.all.len() {
            self.all.truncate(len);
            self.next_position = self.all[len - 1].position + 1;
        }
    }

    fn push(&mut self, new: &[Token]) {
        self.all.extend(new);
        self.next_position += new.len() as u64;
        self.longest = self.longest.max(self.all.len() as u64);
    }
}

/// Where the tokens of a sequence are, given its spans (first page, rows to skip, tokens) and that `left` tokens after the
/// first `after` are gone: token, page and row.
pub(crate) fn placed(
    spans: &[(u32, u32, u32)],
    after: usize,
    left: usize,
    page_size: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let rows = spans.iter().flat_map(move |&(first, skip, count)| {
        (skip as usize..(skip + count) as usize)
            .map(move |row| (first as usize + row / page_size, row % page_size))
    });
    (0..)
        .zip(rows)
        .map(move |(token, (page, row))| (if token < after { token } else { token + left }, page, row))
}
