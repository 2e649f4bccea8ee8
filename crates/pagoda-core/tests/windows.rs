//! What an endless sequence costs: nothing grows, and a table row is rewritten only once in a run of pages.

use pagoda_core::cache::{Group, GroupKind, TierMemory};
use pagoda_core::ids::{GroupId, Tier};
use pagoda_core::table::Sight;
use pagoda_core::window::Window;
use pagoda_core::{Cache, Error};

const PAGE: u32 = 64;
const WINDOW: Window = Window { sinks: 100, tokens: 1000, headroom: 64, trailing: true };

fn cache() -> Cache {
    let group = Group { block_bytes: 256, kind: GroupKind::Paged { page_size: PAGE }, window: Some(WINDOW) };
    let ring = Group { window: Some(Window { sinks: 0, trailing: false, ..WINDOW }), ..group };
    let memory = TierMemory { bytes: 1 << 16, extent_bytes: 1 << 12 };
    Cache::new(&[group, ring], [memory; 3]).unwrap()
}

#[test]
fn a_million_tokens_take_the_memory_of_a_window() {
    let mut cache = cache();
    let id = cache.create().unwrap();
    let mut rewritten = [0, 0];
    let mut versions = [0, 0];
    for len in 0u64..1_050_000 {
        cache.reserve(&[(id, 1)]).unwrap();
        for group in 0..2 {
            let (row, version) = cache.step_row(0, GroupId(group as u8));
            assert!(row.len() <= (4096 + 100 + 1000 + 64) / PAGE as usize + 3, "{} entries", row.len());
            rewritten[group] += u64::from(version != versions[group]);
            versions[group] = version;
        }
        if len % 10_007 == 0 {
            let spans: Vec<_> = cache.step_spans(0, GroupId(0)).collect();
            let kept: u64 = spans.iter().map(|span| u64::from(span.count)).sum();
            assert!(kept <= 100 + 1000 + 64 + u64::from(PAGE) + 1);
            assert!(spans.iter().all(|span| span.offset == 0), "positions stay those that were stored");
            // Where runs of attention begin does not depend on what has left: tokens keep their rows, except for whole runs.
            for (group, pages_before) in [(0, 100 / u64::from(PAGE)), (1, 0)] {
                let span = cache.step_spans(0, GroupId(group)).last().unwrap();
                let first = len + 1 - u64::from(span.count);
                let row = first - (pages_before * u64::from(PAGE)).min(first);
                assert_eq!(u64::from(span.skip) % 4096, row % 4096);
            }
            if len > 2000 {
                assert!(matches!(spans[0].sight, Sight::Trailing { .. }));
                // The query stands at the end of the sinks and the window, wherever it was stored.
                assert_eq!(spans[0].offset_for(kept as usize - 1), len + 1 - 1100);
            }
            cache.audit().unwrap();
        }
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
    }
    assert!(rewritten.iter().all(|&times| times <= 1_050_000 / 4096 + 2), "{rewritten:?} rows written anew");
    assert_eq!(cache.next_position(id).unwrap(), 1_050_000);
    assert!(cache.block_counts(Tier::Device, GroupId(0)).used <= 2 + 18);
}

#[test]
fn what_has_left_does_not_come_back() {
    let mut cache = cache();
    let id = cache.create().unwrap();
    let step = |cache: &mut Cache, new| {
        cache.reserve(&[(id, new)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.retire(epoch).unwrap();
    };
    step(&mut cache, 1064);
    assert_eq!(cache.rewind_limit(id).unwrap(), 0, "nothing has left");
    cache.truncate(id, 10).unwrap();
    step(&mut cache, 4990);
    let limit = cache.rewind_limit(id).unwrap();
    assert!((4936 - 64..=4936).contains(&limit), "headroom, and what is left of a page: {limit}");
    let error = cache.truncate(id, limit - 1).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { argument: "length", .. }), "{error}");
    let fork = cache.fork(id).unwrap();
    cache.truncate(id, limit).unwrap();
    assert_eq!(cache.rewind_limit(id).unwrap(), limit);
    // Tokens that have left may be dropped, but not sinks; of the others as many as truncation could take.
    for refused in [0..1, 99..101, 3000..5000] {
        let error = cache.drop_tokens(fork, refused).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "start, stop", .. }), "{error}");
    }
    cache.drop_tokens(fork, 100..2000).unwrap();
    assert_eq!(cache.token_count(fork).unwrap(), 3100);
    assert_eq!(cache.rewind_limit(fork).unwrap(), limit - 1900);
    cache.drop_tokens(fork, 3000..3010).unwrap();
    cache.audit().unwrap();
    cache.truncate(id, 0).unwrap();
    assert_eq!((cache.rewind_limit(id).unwrap(), cache.next_position(id).unwrap()), (0, 0));
    step(&mut cache, 3);
    cache.audit().unwrap();
}
