//! Which process this is. A forked child shares no thread with its parent, so caches of the parent are dead in it.

use pagoda_store::disk::Store;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

static FORKS: AtomicU64 = AtomicU64::new(0);

/// The stores of this process.
static STORES: Mutex<Vec<Weak<Store>>> = Mutex::new(Vec::new());

/// A number that differs between a process and its forked children.
pub(crate) fn process() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Notes a store of this process, whose lock no child is to hold on to.
pub(crate) fn opened(store: &Arc<Store>) {
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    stores.retain(|store| store.strong_count() > 0);
    stores.push(Arc::downgrade(store));
}

/// To be called in a child right after a fork.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // It is free: `opened` holds the interpreter's lock, and so did whoever forked.
    let Ok(mut stores) = STORES.try_lock() else { return };
    for store in stores.drain(..).filter_map(|store| store.upgrade()) {
        let store = ManuallyDrop::new(store);
        // SAFETY: every call of the parent's caches is refused from now on, none of their threads is here, and this reference
        // stays, so that nobody drops the store.
        unsafe { store.abandon() };
    }
}
