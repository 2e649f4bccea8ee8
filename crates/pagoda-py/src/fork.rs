//! Which process this is. A forked child shares no thread with its parent, so caches of the parent are dead in it.

use pagoda_store::disk::io;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

static FORKS: AtomicU64 = AtomicU64::new(0);

/// A number that differs between a process and its forked children.
pub(crate) fn process() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Must be called in a child right after a fork.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: every call of the parent's caches is refused from now on, they are not dropped, and none of their threads is here.
    unsafe { io::abandon() };
}
