//! What bookkeeping costs, compared with kvbm-logical in the same run.
//!
//! `make bench` runs it. Medians of repeated rounds on one thread; nothing else should run meanwhile.

use kvbm_logical::BlockManager;
use kvbm_logical::testing::{TestMeta, create_test_manager_with_backend};
use pagoda_core::Cache;
use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::extents::Arena;
use pagoda_core::ids::{GroupId, SequenceId};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 401;
const PAGE_SIZE: u32 = 64;

/// Median nanoseconds of `work` on what `prepare` makes.
fn median<T, U>(mut prepare: impl FnMut() -> T, mut work: impl FnMut(T) -> U) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let input = prepare();
            let start = Instant::now();
            let output = black_box(work(input));
            let time = start.elapsed().as_nanos() as f64;
            drop(output);
            time
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn cache(page_size: u32, pages: u64) -> Cache {
    let block_bytes = 4096;
    let memory = TierMemory { bytes: pages * block_bytes, extent_bytes: 1024 * block_bytes };
    let group = Group { block_bytes, kind: GroupKind::Paged { page_size }, window: None };
    Cache::new(&[group], [memory; 3]).expect("a cache")
}

fn step(cache: &mut Cache, batch: &[(SequenceId, u32)]) {
    cache.reserve(batch).expect("room");
    black_box(cache.step_row(0, GroupId(0)));
    let epoch = cache.commit(None).expect("a step");
    cache.retire(epoch).expect("an epoch");
}

fn decode(sequences: usize, context: u32) -> f64 {
    let mut cache = cache(PAGE_SIZE, u64::from(context / PAGE_SIZE + 16) * sequences as u64);
    let ids: Vec<_> = (0..sequences).map(|_| cache.create().expect("room")).collect();
    step(&mut cache, &ids.iter().map(|&id| (id, context)).collect::<Vec<_>>());
    let batch: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
    median(|| (), |()| step(&mut cache, &batch))
}

fn fork(tokens: u32, page_size: u32) -> f64 {
    let mut cache = cache(page_size, u64::from(tokens / page_size) + 8);
    let parent = cache.create().expect("room");
    step(&mut cache, &[(parent, tokens)]);
    let mut children = Vec::new();
    let fork = median(|| (), |()| children.push(cache.fork(parent).expect("room")));
    children.into_iter().for_each(|child| cache.release(child).expect("live"));
    fork
}

fn take_and_give(count: usize) -> (f64, f64) {
    let mut arena = Arena::new(4096 << 14, 4096 << 10, &[4096]).expect("an arena");
    let group = GroupId(0);
    // Others hold some, so that what is free is scattered.
    let held: Vec<_> = (0..8192).map(|_| arena.take(group).expect("free")).collect();
    held.iter().step_by(3).for_each(|&block| arena.give(group, block));
    let mut taken = Vec::with_capacity(count);
    let mut takes = Vec::new();
    let mut gives = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        taken.extend((0..count).map_while(|_| arena.take(group)));
        takes.push(start.elapsed().as_nanos() as f64 / count as f64);
        assert_eq!(taken.len(), count);
        let start = Instant::now();
        taken.drain(..).for_each(|block| arena.give(group, block));
        gives.push(start.elapsed().as_nanos() as f64 / count as f64);
    }
    takes.sort_by(f64::total_cmp);
    gives.sort_by(f64::total_cmp);
    (takes[ROUNDS / 2], gives[ROUNDS / 2])
}

fn kvbm(count: usize) -> (f64, f64) {
    let manager: BlockManager<TestMeta> =
        create_test_manager_with_backend(16384, |builder| builder.with_lru_backend());
    let take = median(|| (), |()| manager.allocate_blocks(count).expect("free"));
    let give = median(|| manager.allocate_blocks(count).expect("free"), drop);
    (take / count as f64, give / count as f64)
}

fn main() {
    println!("| what | pagoda-core | kvbm-logical |");
    println!("|---|---|---|");
    for count in [1, 16, 128, 1024] {
        let ((take, give), (their_take, their_give)) = (take_and_give(count), kvbm(count));
        println!("| allocate {count} blocks, ns a block | {take:.1} | {their_take:.1} |");
        println!("| free {count} blocks, ns a block | {give:.1} | {their_give:.1} |");
    }
    for (sequences, context) in [(1, 4096), (256, 4096), (256, 32768)] {
        let time = decode(sequences, context) / 1e3;
        println!(
            "| reserve + commit, {sequences} sequences of {context} tokens, one more each, us | {time:.2} | - |"
        );
    }
    for page_size in [64, 16] {
        let time = fork(131_072, page_size) / 1e3;
        println!("| fork of 131,072 tokens, pages of {page_size}, us | {time:.2} | - |");
    }
}
