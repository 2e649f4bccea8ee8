//! Many simulated caches, and proof that nothing can be taken away unnoticed.
//!
//! `PAGODA_SIM_SEED` simulates one cache again, that of a failure; `PAGODA_SIM_OPS` sets the total number of operations
//! (default 1 000 000). `--nocapture` shows what was counted.

use pagoda_core::fence::Fence;
use pagoda_sim::{Missing, Tally, simulate};

/// Operations per cache.
const OPERATIONS: usize = 1500;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|value| value.parse().unwrap_or_else(|_| panic!("{name} = {value}: a number")))
}

#[test]
fn no_wrong_byte_is_ever_served() {
    let operations = variable("PAGODA_SIM_OPS").unwrap_or(1_000_000);
    let seed = variable("PAGODA_SIM_SEED");
    let seeds = seed.map_or(0..operations.div_ceil(OPERATIONS as u64), |seed| seed..seed + 1);
    let mut tally = Tally::default();
    for seed in seeds {
        let one = simulate(seed, OPERATIONS, None).unwrap_or_else(|failure| panic!("{failure}"));
        tally.add(&one);
    }
    show(&tally);
    if seed.is_some() {
        return;
    }
    assert!(tally.operation_count() >= operations);
    let seen = |what: &str| tally.seen.get(what).copied().unwrap_or(0);
    let often = ["steps", "saves", "loads", "pages read", "pages written"];
    let copies = ["made again", "dropped", "calls that gave up"].map(|what| format!("copies: {what}"));
    let refusals = ["without room", "with pages on disk"].map(|why| format!("refused: steps {why}"));
    let streamed = ["checked: rows in the ring", "streamed: parts of reads", "streamed: steps that gave up"];
    let told = ["told: corrupt pages", "told: failed copies", "refused: stale plans", "restarts: keys found"];
    let named = refusals.iter().chain(&copies).map(String::as_str);
    for what in often.iter().chain(&streamed).chain(&told).copied().chain(named) {
        assert!(
            seen(what) > operations / 4000,
            "the operations miss the point, too little of {what}:\n{tally}"
        );
    }
    assert!(tally.faults.len() > 50, "faults of too few kinds:\n{tally}");
    let wrong = tally.wrong_reads();
    assert!(wrong > operations / 1000, "the drive handed out wrong bytes {wrong} times:\n{tally}");
}

#[expect(clippy::print_stdout, reason = "whoever runs it for long wants to see what it came to")]
fn show(tally: &Tally) {
    println!("{} operations\n{tally}", tally.operation_count());
}

/// A failure is only useful if it can be reproduced.
#[test]
fn a_seed_is_a_schedule() {
    for seed in 0..8 {
        let [first, second] =
            [(), ()].map(|()| simulate(seed, OPERATIONS, None).map(|tally| tally.to_string()));
        assert_eq!(first.unwrap(), second.unwrap());
    }
    let [first, second] = [(), ()].map(|()| notices(Missing::Checksums));
    assert_eq!(first.to_string(), second.to_string());
}

/// Negative control: without it, the same simulation must fail. Returns how.
fn notices(missing: Missing) -> pagoda_sim::Failure {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let failure = (0..400).find_map(|seed| simulate(seed, OPERATIONS, Some(missing)).err());
    std::panic::set_hook(hook);
    failure.unwrap_or_else(|| panic!("400 caches without {missing:?} went unnoticed"))
}

#[test]
fn a_missing_epoch_fence_is_noticed() {
    notices(Missing::Fence(Fence::Epochs));
}

#[test]
fn a_missing_copy_fence_is_noticed() {
    notices(Missing::Fence(Fence::Copies));
}

#[test]
fn a_missing_step_fence_is_noticed() {
    notices(Missing::Fence(Fence::Step));
}

#[test]
fn a_missing_completion_fence_is_noticed() {
    notices(Missing::Fence(Fence::Completion));
}

#[test]
fn a_page_that_leaves_its_window_too_early_is_noticed() {
    notices(Missing::Fence(Fence::Window));
}

#[test]
fn blocks_that_are_handed_out_before_they_are_zeroed_are_noticed() {
    let failure = notices(Missing::Fence(Fence::Zeros));
    assert!(failure.what.contains("is handed out as it was"), "{failure}");
}

#[test]
fn copies_that_do_not_wait_for_kernels_are_noticed() {
    let failure = notices(Missing::CopiesAfterKernels);
    assert!(failure.what.contains("is not that of token"), "{failure}");
}

#[test]
fn missing_checksums_are_noticed() {
    let failure = notices(Missing::Checksums);
    assert!(failure.what.contains("is not that of token"), "{failure}");
}

#[test]
fn generations_that_the_ring_does_not_look_at_are_noticed() {
    let failure = notices(Missing::Generations);
    assert!(failure.what.contains("in the ring is not that of token"), "{failure}");
}

#[test]
fn slots_that_are_handed_out_too_early_are_noticed() {
    let failure = notices(Missing::EndOfReads);
    assert!(failure.what.contains("in the ring is not that of token"), "{failure}");
}

#[test]
fn steps_that_retire_under_their_reads_are_noticed() {
    let failure = notices(Missing::FenceOfReads);
    // The block has lost its page, or has another one.
    let seen = ["nothing was written to it", "is written to under a read"];
    assert!(seen.iter().any(|what| failure.what.contains(what)), "{failure}");
}

#[test]
fn steps_that_retire_under_late_copies_are_noticed() {
    notices(Missing::FenceOfLateCopies);
}
