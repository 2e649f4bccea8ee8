//! Gives space of the file back to the file system while other threads go on. A later write to that space waits for it.

use super::store::Store;
use super::{Error, Result};
use crate::lock;
use pagoda_core::ids::{BlockId, GroupId};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The segments whose space is being given back.
#[derive(Debug, Default)]
pub(super) struct Holes {
    segments: Mutex<Vec<Range<u64>>>,
    fewer: Condvar,
}

/// Segments without a block, from when they are let go until their space has been given back.
#[derive(Debug)]
pub(crate) struct Hole {
    store: Arc<Store>,
    segments: Range<u64>,
}

impl Hole {
    pub(super) fn new(store: &Arc<Store>, segments: Range<u64>) -> Self {
        lock(&store.holes.segments).push(segments.clone());
        Self { store: store.clone(), segments }
    }

    /// Gives the space back, however long the drive takes.
    pub(crate) fn punch(&self) -> Result<()> {
        let bytes = self.store.geometry.segments().0;
        let range = self.segments.start * bytes..self.segments.end * bytes;
        self.store.file.discard(range).map_err(Error::io("giving space back"))
    }
}

impl Drop for Hole {
    fn drop(&mut self) {
        let mut segments = lock(&self.store.holes.segments);
        let own = segments.iter().position(|segments| *segments == self.segments);
        segments.swap_remove(own.expect("there since it was made"));
        self.store.holes.fewer.notify_all();
    }
}

impl Store {
    /// Sleeps until these blocks are in no segment with a hole.
    pub(super) fn wait_for_holes(&self, group: GroupId, blocks: &[BlockId]) {
        let lies_in = |hole: &Range<u64>| {
            blocks.iter().any(|&block| hole.contains(&self.geometry.slot(group, block).segment))
        };
        let holes = lock(&self.holes.segments);
        let waited = self.holes.fewer.wait_while(holes, |holes| holes.iter().any(lies_in));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
