//! Steps that need no more memory than earlier ones do not touch the heap.

use pagoda_core::Cache;
use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::window::Window;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Of this thread only: the thread that runs the tests allocates, too.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is ours.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let group = |block_bytes, window| Group { block_bytes, kind: GroupKind::Paged { page_size: 16 }, window };
    let window = Window { sinks: 20, tokens: 50, headroom: 10, trailing: true };
    let memory = TierMemory { bytes: 1 << 22, extent_bytes: 1 << 14 };
    let mut cache = Cache::new(&[group(256, None), group(64, Some(window))], [memory; 3]).unwrap();
    let sequences: Vec<_> = (0..64).map(|_| cache.create().unwrap()).collect();
    let batch: Vec<_> = sequences.iter().map(|&id| (id, 1)).collect();
    let accepted = vec![1; batch.len()];
    let rounds = |cache: &mut Cache| {
        for _ in 0..200 {
            cache.reserve(&batch).unwrap();
            let spans = cache.step_spans(3, pagoda_core::ids::GroupId(0)).count();
            assert_eq!((spans, cache.step_copies().len()), (1, 0));
            let epoch = cache.commit(Some(&accepted)).unwrap();
            cache.retire(epoch).unwrap();
        }
        for &id in &sequences {
            cache.truncate(id, 0).unwrap();
        }
    };
    rounds(&mut cache);
    let before = ALLOCATIONS.get();
    rounds(&mut cache);
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
