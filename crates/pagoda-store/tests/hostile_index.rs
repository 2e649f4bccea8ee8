//! An index with correct checksums and false lengths, as an attacker who knows the format would make it. Whatever it says, no
//! allocation is larger than the bytes of the file justify, and nothing panics.

use pagoda_core::Cache;
use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_store::disk::io::{Access, Directory, File, Lane, Pulse};
use pagoda_store::disk::{Geometry, Store, sequence};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

struct Measuring;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's promise is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is ours.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// A directory whose index has these bytes.
#[derive(Debug)]
struct Given(Vec<u8>);

#[derive(Debug)]
struct Nothing;

impl Directory for Given {
    fn path(&self) -> &Path {
        Path::new("given")
    }

    fn access(&self) -> Access {
        Access::default()
    }

    fn scratch(&self) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(Nothing))
    }

    fn lock(&self, _: &str) -> io::Result<(Arc<dyn File>, Box<dyn Directory>)> {
        Ok((Arc::new(Nothing), self.share()))
    }

    fn read(&self, _: &str, _: u64) -> io::Result<Option<Vec<u8>>> {
        Ok(Some(self.0.clone()))
    }

    fn share(&self) -> Box<dyn Directory> {
        Box::new(Self(self.0.clone()))
    }

    fn pulse(&self) -> Arc<Pulse> {
        Arc::default()
    }

    fn replace(&self, _: &str, _: &[u8]) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(Nothing))
    }
}

impl File for Nothing {
    fn size(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn forget(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn lanes(&self) -> usize {
        1
    }

    fn lane(&self) -> io::Result<Box<dyn Lane>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

const FINGERPRINT: [u8; 16] = *b"a model of tests";
const SALT: u64 = 77;
const PAGE_SIZE: u32 = 16;

/// As docs/layout.md draws it.
fn header(geometry: &[u64], lines: u32) -> Vec<u8> {
    let mut bytes = [&b"PAGODAIX"[..], &2u32.to_le_bytes(), &(geometry.len() as u32).to_le_bytes()].concat();
    bytes.extend(FINGERPRINT);
    bytes.extend([0u64.to_le_bytes(), SALT.to_le_bytes()].concat());
    bytes.extend(lines.to_le_bytes());
    geometry.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    bytes
}

/// Adds a line that verifies.
fn push(index: &mut Vec<u8>, claimed: Option<u32>, number: u32, body: &[u8]) {
    let at = index.len();
    index.extend(claimed.unwrap_or(body.len() as u32).to_le_bytes());
    index.extend(number.to_le_bytes());
    let head = xxh3_64_with_seed(&index[at..], SALT ^ at as u64);
    index.extend(head.to_le_bytes());
    index.extend(body);
    index.extend(xxh3_64_with_seed(body, head).to_le_bytes());
}

/// Small, about right, or as large as possible.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..40, Just(PAGE_SIZE), Just(u32::MAX), Just(u32::MAX - 1), Just(1 << 31), any::<u32>()]
}

fn long() -> impl Strategy<Value = u64> {
    prop_oneof![number().prop_map(u64::from), Just(u64::MAX), Just(1 << 62), any::<u64>()]
}

#[derive(Clone, Debug)]
struct Put {
    key: Vec<u8>,
    /// Lengths other than those of the key, the pages and the rest.
    lies: [Option<u32>; 4],
    number: u32,
    pages: Vec<(u32, u32, u64)>,
    record: Vec<u64>,
}

fn puts() -> impl Strategy<Value = Vec<Put>> {
    let key = proptest::collection::vec(any::<u8>(), 0..6);
    let lies = proptest::array::uniform4(proptest::option::weighted(0.15, number()));
    let pages = proptest::collection::vec((0u32..3, number(), long()), 0..6);
    // Tokens, groups, what has left, spans, pages; a span; a page or two.
    let groups = prop_oneof![4 => 0u64..4, 1 => long()];
    let shape = (long(), groups, proptest::array::uniform4(long()));
    let shape = shape.prop_map(|(tokens, groups, rest)| [&[tokens, groups][..], &rest].concat());
    let record =
        (shape, proptest::collection::vec(long(), 0..16)).prop_map(|(shape, rest)| [shape, rest].concat());
    let numbered = prop_oneof![0u32..6, number()];
    let put = (key, lies, numbered, pages, record);
    let put = put.prop_map(|(key, lies, number, pages, record)| Put { key, lies, number, pages, record });
    proptest::collection::vec(put, 0..5)
}

impl Put {
    fn body(&self) -> Vec<u8> {
        let lengths = [self.key.len(), self.pages.len(), self.record.len() * 8];
        let mut body = 1u32.to_le_bytes().to_vec();
        for (length, lie) in lengths.into_iter().zip(self.lies) {
            body.extend(lie.unwrap_or(length as u32).to_le_bytes());
        }
        body.extend(&self.key);
        for (group, block, generation) in &self.pages {
            body.extend([group.to_le_bytes(), block.to_le_bytes()].concat());
            body.extend([generation.to_le_bytes(), [7; 8]].concat());
        }
        self.record.iter().for_each(|word| body.extend(word.to_le_bytes()));
        body
    }
}

/// Opens a store over such an index, and a cache over what the index says. Returns the largest allocation.
fn take_in(index: Vec<u8>) -> usize {
    LARGEST.set(0);
    let runs = [vec![5000, 64], vec![700]];
    let geometry = Geometry::new(&runs, 4 << 20).unwrap();
    if let Ok((store, _)) = Store::open(&Given(index), geometry, FINGERPRINT, None) {
        let arena = store.geometry().arena();
        let group = |runs: &Vec<u64>| Group {
            block_bytes: runs.iter().sum(),
            kind: GroupKind::Paged { page_size: PAGE_SIZE },
            window: None,
        };
        let memory = TierMemory { bytes: 1 << 20, extent_bytes: 1 << 16 };
        let groups: Vec<_> = runs.iter().map(group).collect();
        let mut cache = Cache::new(&groups, [memory, memory, arena]).unwrap();
        let decoded: Vec<_> =
            store.entries().iter().filter_map(|(_, entry)| sequence::decode(entry)).collect();
        let shapes: Vec<_> = decoded.into_iter().map(|(kept, _)| kept).collect();
        for id in cache.adopt(&shapes).into_iter().flatten() {
            cache.forget(id);
        }
        cache.audit().unwrap();
    }
    LARGEST.get()
}

/// The largest allocation for an empty index of a tier with this many bytes.
fn least(budget: u64) -> usize {
    take_in(header(&described(budget), 0))
}

/// The geometry as an index has it: extent and segment bytes, then each group.
fn described(budget: u64) -> Vec<u64> {
    // The refusal of an index says what would have been right.
    let geometry = Geometry::new(&[vec![5000, 64], vec![700]], budget).unwrap();
    let other = Store::open(&Given(header(&[], 0)), geometry, FINGERPRINT, None).unwrap_err().to_string();
    let (_, wanted) = other.split_once("and [").unwrap();
    let (wanted, _) = wanted.split_once(']').unwrap();
    wanted.split(", ").map(|number| number.parse().unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn allocations_are_as_large_as_what_is_there(
        puts in puts(),
        count in proptest::option::weighted(0.1, number()),
        lines in prop_oneof![0u32..4, number()],
        tail in proptest::collection::vec(any::<u8>(), 0..20),
        budget in prop_oneof![Just(1u64 << 20), Just(4 << 20), Just(8 << 20)],
    ) {
        let mut index = header(&described(budget), lines);
        if let Some(count) = count {
            index[12..16].copy_from_slice(&count.to_le_bytes());
            let end = index.len() - 8;
            let sum = xxh3_64(&index[..end]);
            index[end..].copy_from_slice(&sum.to_le_bytes());
        }
        puts.iter().for_each(|put| push(&mut index, put.lies[3], put.number, &put.body()));
        index.extend(tail);
        let bytes = index.len();
        let (largest, least) = (take_in(index), least(budget));
        prop_assert!(largest <= least.max(8 * bytes) + 4096, "{largest} bytes at once, for an index of {bytes}");
    }
}

/// Checks the measure itself: an honest index of many pages takes more memory than an empty one.
#[test]
fn an_honest_index_takes_memory_and_is_taken_in() {
    let mut index = header(&described(4 << 20), 1);
    let record = [vec![0; 2], vec![0; 1000]].concat();
    let put = Put { key: b"k".to_vec(), lies: [None; 4], number: 0, pages: Vec::new(), record };
    push(&mut index, None, put.number, &put.body());
    let bytes = index.len();
    assert!((bytes..8 * bytes + least(4 << 20)).contains(&take_in(index)));
}
