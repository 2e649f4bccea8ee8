//! Whether a drive answers, for those who would wait no longer.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what is asked of a file system, and the answers. To look at while one thread asks.
#[derive(Debug, Default)]
pub struct Pulse {
    /// Odd while an answer is awaited.
    turns: AtomicU64,
}

impl Pulse {
    /// Makes a call that takes as long as the drive likes.
    pub(super) fn ask<T>(&self, call: impl FnOnce() -> T) -> T {
        self.turns.fetch_add(1, Ordering::Relaxed);
        let answer = call();
        self.turns.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// What is awaited, if anything is: a number that no other call has.
    pub fn awaited(&self) -> Option<u64> {
        Some(self.turns.load(Ordering::Relaxed)).filter(|turns| turns % 2 == 1)
    }
}
