//! Whether a drive still answers, so that waiting callers know when to give up.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts requests to a file system, and the answers.
#[derive(Debug, Default)]
pub struct Pulse {
    asked: AtomicU64,
    answered: AtomicU64,
}

impl Pulse {
    /// Makes a call that may take as long as the drive likes.
    pub(in crate::disk) fn ask<T>(&self, call: impl FnOnce() -> T) -> T {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let answer = call();
        self.answered.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// While an answer is awaited, a number that changes with every call and every answer.
    pub fn awaited(&self) -> Option<u64> {
        let (answered, asked) = (self.answered.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed));
        (asked != answered).then(|| asked.wrapping_add(answered))
    }

    /// How many answers there were.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}
