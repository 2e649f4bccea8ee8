//! Every interleaving of a copying thread with the core: whoever sees the completion sees the bytes.
//!
//! Runs under `RUSTFLAGS="--cfg loom"` only; see the Makefile.

#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use pagoda_core::fence::Completion;

/// One thread writes a block and then reports that by `finish`; the core reads the block once `finished` returns true.
fn hand_over(finish: impl FnOnce() + Send + 'static, finished: impl Fn() -> bool) {
    let block = Arc::new(UnsafeCell::new(0u64));
    let writer = {
        let block = block.clone();
        thread::spawn(move || {
            // SAFETY: nobody reads before `finish`; loom checks.
            block.with_mut(|word| unsafe { *word = 7 });
            finish();
        })
    };
    if finished() {
        // SAFETY: nobody writes after `finish`; loom checks.
        assert_eq!(block.with(|word| unsafe { *word }), 7);
    }
    writer.join().unwrap();
}

#[test]
fn a_finished_completion_publishes_the_bytes() {
    loom::model(|| {
        let completion = Completion::new();
        let flag = completion.clone();
        hand_over(move || flag.finish(1), || completion.copied() == Some(1));
    });
}

/// Negative control: the same hand-over without release and acquire is a race that loom sees.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_flag_does_not() {
    loom::model(|| {
        let flag = Arc::new(AtomicU64::new(0));
        let seen = flag.clone();
        hand_over(move || flag.store(1, Ordering::Relaxed), || seen.load(Ordering::Relaxed) == 1);
    });
}
