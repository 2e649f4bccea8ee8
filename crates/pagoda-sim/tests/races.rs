//! The four ways in which caches of several tiers have served wrong bytes, each as small as possible, and each a second time
//! without what prevents it.
//!
//! A page is one token, a block is one word. Kernels run when the stream is run, copies when they are made: nothing happens
//! by itself.

use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::fence::{Completion, Fence};
use pagoda_core::ids::{BlockId, GroupId, SequenceId, Tier};
use pagoda_core::plan::{BlockCopy, Plan, Selection};
use pagoda_core::{Cache, Error};
use std::collections::{HashMap, VecDeque};

const GROUP: GroupId = GroupId(0);
const BLOCK: u64 = 8;

type Place = (Tier, BlockId);

/// Issued work.
enum Kernel {
    Write(Place, u64),
    Read(Place, u64),
}

struct World {
    cache: Cache,
    memory: HashMap<Place, u64>,
    stream: VecDeque<Kernel>,
    /// Number of reads that found something else.
    wrong: usize,
}

/// Copies that were sent and have not been made.
struct Copies(Completion, Vec<BlockCopy>);

impl World {
    fn new(device: u64, host: u64, missing: Option<Fence>) -> Self {
        let group = Group { block_bytes: BLOCK, kind: GroupKind::Paged { page_size: 1 }, window: None };
        let memory = |blocks| TierMemory { bytes: blocks * BLOCK, extent_bytes: BLOCK };
        let mut cache = Cache::new(&[group], [memory(device), memory(host), memory(0)]).unwrap();
        if let Some(fence) = missing {
            cache.break_fence(fence);
        }
        Self { cache, memory: HashMap::new(), stream: VecDeque::new(), wrong: 0 }
    }

    /// A new sequence with these tokens; issues the kernels that write them.
    fn append(&mut self, tokens: &[u64]) -> SequenceId {
        let id = self.cache.create().unwrap();
        self.cache.reserve(&[(id, tokens.len() as u32)]).unwrap();
        self.write(tokens);
        id
    }

    /// Commits a step of one sequence with these tokens; issues the kernels that write them.
    fn write(&mut self, tokens: &[u64]) {
        for ((block, _), token) in self.cache.step_slots(0, GROUP).zip(tokens) {
            self.stream.push_back(Kernel::Write((Tier::Device, block), *token));
        }
        self.cache.commit(None).unwrap();
    }

    /// Issues kernels that must find these tokens.
    fn attend(&mut self, id: SequenceId, tokens: &[u64]) {
        self.cache.reserve(&[(id, 0)]).unwrap();
        for (at, token) in self.cache.step_row(0, GROUP).0.iter().zip(tokens) {
            self.stream.push_back(Kernel::Read((at.tier(), at.block()), *token));
        }
        self.cache.commit(None).unwrap();
    }

    /// Runs all issued work.
    fn run(&mut self) {
        while let Some(kernel) = self.stream.pop_front() {
            match kernel {
                Kernel::Write(at, token) => drop(self.memory.insert(at, token)),
                Kernel::Read(at, token) => self.wrong += usize::from(self.memory.get(&at) != Some(&token)),
            }
        }
    }

    fn retire(&mut self) {
        self.run();
        self.cache.reserve(&[]).unwrap();
        let epoch = self.cache.commit(None).unwrap();
        self.cache.retire(epoch).unwrap();
    }

    fn plan(&self, id: SequenceId, to: Tier) -> Plan {
        let all = Selection::of(0..self.cache.token_count(id).unwrap(), vec![GROUP]);
        self.cache.plan(id, to, &all).unwrap()
    }

    fn send(&mut self, plan: &Plan) -> Result<Copies, Error> {
        self.cache.execute(plan).map(|(_, completion, copies)| Copies(completion, copies))
    }

    fn make(&mut self, Copies(completion, copies): Copies) {
        for copy in &copies {
            let word = self.memory.get(&(copy.from.0, copy.from.1)).copied().unwrap_or(0);
            self.memory.insert((copy.to.0, copy.to.1), word);
        }
        completion.finish(copies.len() as u32);
    }

    /// A sequence whose pages are on the host, with nothing under way.
    fn on_host(&mut self, tokens: &[u64]) -> SequenceId {
        let id = self.append(tokens);
        self.retire();
        let copies = self.send(&self.plan(id, Tier::Host)).unwrap();
        self.make(copies);
        self.retire();
        // What device blocks held before must not be right by chance.
        self.memory.retain(|(tier, _), _| *tier == Tier::Host);
        id
    }

    /// Runs everything; returns how many reads were wrong.
    fn end(mut self) -> usize {
        self.retire();
        self.wrong
    }
}

/// Pages go to the host before the kernel that writes them has run.
fn store_before_the_kernel(waits: bool) -> usize {
    let mut world = World::new(2, 2, None);
    let id = world.append(&[1, 2]);
    let copies = world.send(&world.plan(id, Tier::Host)).unwrap();
    if waits {
        world.run();
    }
    world.make(copies);
    world.attend(id, &[1, 2]);
    world.end()
}

#[test]
fn a_store_reads_what_the_kernels_before_it_wrote() {
    assert_eq!(store_before_the_kernel(true), 0);
    assert_eq!(store_before_the_kernel(false), 2, "a copy that does not wait takes neither token");
}

/// A block is freed and loaded into before an earlier kernel has read it.
fn load_over_a_reader(missing: Option<Fence>) -> usize {
    let mut world = World::new(2, 2, missing);
    let cold = world.on_host(&[1, 2]);
    let hot = world.append(&[3, 4]);
    world.attend(hot, &[3, 4]);
    world.cache.release(hot).unwrap();
    let plan = world.plan(cold, Tier::Device);
    let copies = world.send(&plan).or_else(|error| {
        assert!(matches!(error, Error::OutOfBlocks { draining: 2, .. }), "{error}");
        world.retire();
        world.send(&plan)
    });
    world.make(copies.unwrap());
    world.attend(cold, &[1, 2]);
    world.end()
}

#[test]
fn a_load_waits_for_the_readers_of_its_target() {
    assert_eq!(load_over_a_reader(None), 0);
    assert_eq!(load_over_a_reader(Some(Fence::Epochs)), 2, "without the fence both tokens are read wrong");
}

/// A block is handed out again before a copy that was sent earlier has used it.
fn reuse_under_a_copy(missing: Option<Fence>) -> usize {
    let mut world = World::new(2, 2, missing);
    let cold = world.on_host(&[1, 2]);
    let late = world.send(&world.plan(cold, Tier::Device)).unwrap();
    world.cache.release(cold).unwrap();
    let hot = world.cache.create().unwrap();
    if world.cache.reserve(&[(hot, 2)]).is_ok() {
        world.write(&[3, 4]);
        world.run();
        world.attend(hot, &[3, 4]);
        world.make(late);
    } else {
        world.make(late);
        world.cache.reserve(&[(hot, 2)]).unwrap();
        world.write(&[3, 4]);
        world.attend(hot, &[3, 4]);
    }
    // Not the core as well: it now hears of a copy of pages that it has forgotten.
    world.run();
    world.wrong
}

#[test]
fn a_block_is_not_reused_under_a_copy() {
    assert_eq!(reuse_under_a_copy(None), 0);
    assert_eq!(reuse_under_a_copy(Some(Fence::Copies)), 2, "without the fence both tokens are read wrong");
}

/// A kernel reads a page that is being loaded.
fn read_before_the_load(missing: Option<Fence>) -> usize {
    let mut world = World::new(2, 2, missing);
    let cold = world.on_host(&[1, 2]);
    let late = world.send(&world.plan(cold, Tier::Device)).unwrap();
    world.attend(cold, &[1, 2]);
    world.run();
    world.make(late);
    world.attend(cold, &[1, 2]);
    world.end()
}

#[test]
fn a_reader_waits_for_the_load() {
    assert_eq!(read_before_the_load(None), 0);
    assert_eq!(
        read_before_the_load(Some(Fence::Completion)),
        2,
        "without the fence both tokens are read wrong"
    );
}
