//! A call that repeats an earlier one does not touch the heap.

use crate::{Arenas, Attention, Backend, Element, Layer, PagedKv, Rows, RowsMut, SequenceTable, Transform};
use pagoda_core::ids::{BlockId, BlockRef, Tier};
use pagoda_core::layout::{BlockLayout, LayerGeometry, RowFormat};
use pagoda_core::table::{Sight, SpanView};
use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
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

const TOKENS: usize = 700;
const NEW: usize = 40;

const TEST: &str = "tests::steady_state::append_and_attend_allocate_nothing";
/// Set in a process that runs only this test: others allocate at the same time.
const ALONE: &str = "PAGODA_TEST_ALONE";

#[test]
fn append_and_attend_allocate_nothing() {
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", TEST]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let format = RowFormat::F16;
    let geometry = LayerGeometry {
        num_kv_heads: 2,
        head_dim: 64,
        v_head_dim: 64,
        k_format: format,
        v_format: Some(format),
    };
    let layout = BlockLayout::new(&[geometry], 64);
    let layer = Layer {
        geometry,
        layout: layout.layers[0],
        block_bytes: layout.block_bytes,
        page_size: 64,
        num_q_heads: 8,
        scale: 0.125,
        softcap: None,
        window: None,
        rope: None,
        transform: Transform::default(),
        derived: None,
    };
    let row: Vec<_> =
        (0..TOKENS.div_ceil(64) as u32).map(|b| BlockRef::new(Tier::Device, BlockId::new(b))).collect();
    let mut arena = vec![0u8; row.len() * layout.block_bytes as usize];
    let arenas = Arenas::new(arena.as_mut_ptr(), std::ptr::null_mut());
    let spans = [SpanView {
        first_page: 0,
        skip: 0,
        count: TOKENS as u32,
        position: 0,
        offset: 0,
        sight: Sight::Window,
    }];
    let tables = [SequenceTable { row: &row, spans: &spans, new_tokens: NEW as u32 }];
    let kv = PagedKv { arenas: &arenas, layer: &layer, sequences: &tables };
    let rows = |heads: usize| vec![1.0f32; NEW * heads * 64];
    let (queries, keys, mut out) = (rows(8), rows(2), rows(8));
    let view = |array: &[f32], heads: isize| Rows {
        ptr: array.as_ptr().cast(),
        element: Element::F32,
        token_stride: heads * 256,
        head_stride: 256,
    };
    for deterministic in [false, true] {
        let backend = Backend::new(2, deterministic, None).unwrap();
        let mut round = || {
            let out = RowsMut(Rows {
                ptr: out.as_mut_ptr().cast(),
                element: Element::F32,
                token_stride: 8 * 256,
                head_stride: 256,
            });
            // SAFETY: the arena has every block of the row, the arrays have every row, and nobody else touches them.
            unsafe {
                let (k, v) = (view(&keys, 2), view(&keys, 2));
                backend.append(&kv, k, Some(v), true).unwrap();
                backend
                    .attend(&Attention {
                        kv,
                        queries: view(&queries, 8),
                        sinks: None,
                        out,
                        lse: None,
                        shared: None,
                    })
                    .unwrap();
            }
        };
        // Each thread has taken each kind of work after a while.
        (0..500).for_each(|_| round());
        let counts = (0..5).map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            (0..50).for_each(|_| round());
            ALLOCATIONS.load(Ordering::Relaxed) - before
        });
        // The thread that runs tests allocates now and then, too.
        assert_eq!(counts.min(), Some(0), "deterministic: {deterministic}");
    }
}
