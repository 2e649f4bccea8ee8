use super::*;
use crate::window::Window;

/// A slot that has used up its numbers is not reused: its first handle would become valid again.
#[test]
fn a_handle_of_long_ago_is_never_good_again() {
    let mut cache = cache();
    let first = cache.create().unwrap();
    cache.release(first).unwrap();
    cache.sequences.age(first.index, u32::MAX);
    let last = cache.create().unwrap();
    assert_eq!((last.index, last.generation), (first.index, u32::MAX));
    cache.release(last).unwrap();
    let next = cache.create().unwrap();
    assert_ne!(next.index, first.index);
    for gone in [first, last] {
        assert_eq!(cache.token_count(gone), Err(Error::UseAfterRelease { id: gone }));
        assert_eq!(cache.release(gone), Err(Error::UseAfterRelease { id: gone }));
    }
    cache.audit().unwrap();
}

/// Keys that are derived from values are rotated for the row's position, also those of rows that no span covers any more.
#[test]
fn a_run_of_a_cut_span_begins_where_its_first_row_was_stored() {
    for (gone, skip, first_row) in [(0..2, 2, 0), (0..6, 2, 4), (0..8, 0, 8)] {
        let (mut cache, sequence) = filled(40);
        cache.drop_tokens(sequence, gone).unwrap();
        cache.reserve(&[(sequence, 0)]).unwrap();
        let spans: Vec<_> = cache.step_spans(0, GroupId(0)).collect();
        assert_eq!((spans.len(), spans[0].skip), (1, skip));
        let rows = crate::work::RUN_ROWS as u64;
        assert_eq!([0, 1].map(|run| spans[0].run_position(run)), [first_row, first_row + rows]);
    }
}

#[test]
fn a_cache_is_empty_when_nobody_holds_a_row() {
    let mut cache = Cache::new(&[GROUP], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    assert!(cache.is_empty());
    cache.reserve(&[(sequence, 9)]).unwrap();
    assert!(!cache.is_empty());
    cache.rollback().unwrap();
    assert!(cache.is_empty());
    // A fork holds pages, and copies under way do not. The blocks may still drain.
    cache.reserve(&[(sequence, 9)]).unwrap();
    cache.commit(None).unwrap();
    let fork = cache.fork(sequence).unwrap();
    cache.release(sequence).unwrap();
    assert!(!cache.is_empty());
    let plan = cache.plan(fork, Tier::Host, &Selection::of(0..4, vec![GroupId(0)])).unwrap();
    let (_, completion, copies) = cache.execute(&plan).unwrap();
    cache.truncate(fork, 0).unwrap();
    assert!(cache.is_empty());
    completion.finish(copies.len() as u32);
    cache.audit().unwrap();
    assert!(cache.block_counts(Tier::Device, GroupId(0)).draining > 0);
    // No page of what is kept here is full.
    cache.reserve(&[(fork, 3)]).unwrap();
    cache.commit(None).unwrap();
    let (kept, _) = cache.keep(fork).unwrap();
    cache.release(fork).unwrap();
    assert!(!cache.is_empty());
    cache.forget(kept);
    assert!(cache.is_empty());
    cache.audit().unwrap();
}

#[test]
fn tokens_that_a_sequence_does_not_have_cannot_be_removed() {
    let (mut cache, sequence) = filled(8);
    let refused = cache.truncate(sequence, 9).unwrap_err();
    assert_eq!(refused.to_string(), "length = 9: at most 8");
    for range in [Range { start: 3, end: 2 }, 0..9, 9..9] {
        let refused = cache.drop_tokens(sequence, range.clone()).unwrap_err();
        let named = format!("start, stop = {}, {}: a range within 0..8", range.start, range.end);
        assert_eq!(refused.to_string(), named);
    }
    cache.audit().unwrap();
}

/// From a sequence with a state no others, and no span is cut in two.
#[test]
fn no_tokens_may_be_dropped_from_anywhere() {
    let state = Group { kind: GroupKind::State, ..GROUP };
    let mut cache = Cache::new(&[GROUP, state], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 8);
    cache.drop_tokens(sequence, 3..3).unwrap();
    let refused = cache.drop_tokens(sequence, 3..4).unwrap_err();
    assert_eq!(refused.to_string(), "start, stop = 3, 4: empty: a state cannot forget");
    let refused = cache.truncate(sequence, 7).unwrap_err();
    assert_eq!(refused.to_string(), "length = 7: 0 or 8: states cannot be rewound");
    cache.reserve(&[(sequence, 0)]).unwrap();
    assert_eq!(cache.step_spans(0, GroupId(0)).count(), 1);
}

/// Also a sequence with a state, which cannot be rewound.
#[test]
fn a_sequence_of_one_token_may_be_truncated_to_it() {
    let state = Group { kind: GroupKind::State, ..GROUP };
    let mut cache = Cache::new(&[GROUP, state], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 1);
    cache.truncate(sequence, 1).unwrap();
    assert_eq!([0, 1].map(|group| cache.block_counts(Tier::Device, GroupId(group)).used), [1, 1]);
    cache.audit().unwrap();
}

#[test]
fn a_cache_beyond_limits_is_refused() {
    let window = Window { sinks: 0, tokens: 4, headroom: 0, trailing: false };
    let paged = |page_size, window| Group { kind: GroupKind::Paged { page_size }, window, ..GROUP };
    let windowed = |window| vec![paged(4, Some(window))];
    let most = limits::TOKENS_PER_SEQUENCE_MAX as u32;
    let state = Group { kind: GroupKind::State, window: Some(window), ..GROUP };
    for (groups, refused) in [
        (Vec::new(), Some("groups")),
        (vec![paged(4, None); limits::GROUPS_MAX], None),
        (vec![paged(4, None); limits::GROUPS_MAX + 1], Some("groups")),
        (vec![paged(0, None)], Some("page_size")),
        (vec![paged(limits::PAGE_SIZE_MAX, None)], None),
        (vec![paged(limits::PAGE_SIZE_MAX + 1, None)], Some("page_size")),
        (windowed(Window { tokens: 0, ..window }), Some("window")),
        (windowed(Window { tokens: most, ..window }), None),
        (windowed(Window { tokens: most, headroom: 1, ..window }), Some("window")),
        (windowed(Window { tokens: most, sinks: 1, ..window }), Some("window")),
        (vec![state], Some("window")),
    ] {
        let opened = Cache::new(&groups, [MEMORY; 3]);
        let argument = match opened {
            Ok(_) => None,
            Err(Error::InvalidArgument { argument, .. }) => Some(argument),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(argument, refused, "{groups:?}");
    }
}
