use super::*;
use crate::ids::BlockId;
use crate::keep::{KeptGroup, KeptPage, KeptSequence};
use crate::table::{Left, Span};
use crate::window::Window;

fn span(first_page: u32, skip: u32, count: u32, position: u64) -> Span {
    Span { first_page, skip, count, position }
}

/// Kept pages stay on disk, and that copy is all that stays once nobody else holds them.
#[test]
fn copies_of_what_is_kept_are_spared_in_memory_alone() {
    let (mut cache, sequence) = filled(4);
    let to_disk = plan(&cache, sequence, Tier::Disk, 0..4, true);
    carry_out(&mut cache, &to_disk);
    let (kept, _) = cache.keep(sequence).unwrap();
    let unshared = Selection { unshared: true, ..Selection::of(0..4, vec![GroupId(0)]) };
    assert_eq!(cache.plan(sequence, Tier::Host, &unshared).unwrap().moves().len(), 1, "a key is no sequence");
    let dropped = |cache: &mut Cache, tier| {
        let dropped = cache.drop_copies(tier, GroupId(0), 9, None).unwrap();
        cache.audit().unwrap();
        dropped
    };
    assert_eq!(Tier::ALL.map(|tier| dropped(&mut cache, tier)), [0, 0, 0]);
    for (to, places) in [(Tier::Host, [0, 1, 1]), (Tier::Disk, [0, 0, 1]), (Tier::Device, [1, 0, 1])] {
        let there = plan(&cache, sequence, to, 0..4, false);
        carry_out(&mut cache, &there);
        assert_eq!(used(&mut cache), places);
        cache.audit().unwrap();
    }
    cache.release(sequence).unwrap();
    assert_eq!(Tier::ALL.map(|tier| dropped(&mut cache, tier)), [1, 0, 0]);
    assert_eq!(used(&mut cache), [0, 0, 1]);
    cache.forget(kept);
    assert_eq!(used(&mut cache), [0, 0, 0]);
    // Pages that are not kept leave the disk.
    let (mut cache, sequence) = filled(4);
    for (to, places) in [(Tier::Disk, [0, 0, 1]), (Tier::Host, [0, 1, 0])] {
        let there = plan(&cache, sequence, to, 0..4, false);
        carry_out(&mut cache, &there);
        assert_eq!(used(&mut cache), places);
    }
}

#[test]
fn what_has_arrived_on_disk_may_be_kept_at_once() {
    let (mut cache, sequence) = filled(4);
    let to_disk = plan(&cache, sequence, Tier::Disk, 0..4, true);
    let (_, completion, _) = cache.execute(&to_disk).unwrap();
    assert!(matches!(cache.keep(sequence), Err(Error::InvalidArgument { argument: "sequence", .. })));
    completion.finish(1);
    cache.keep(sequence).unwrap();
    cache.audit().unwrap();
}

/// A tier that is full is searched for them again and again, and there may be very many that others need.
#[test]
fn only_copies_that_may_be_spared_are_looked_at() {
    let (mut cache, sequence) = filled(16);
    let looked_at = |cache: &Cache| Tier::ALL.map(|tier| cache.pages.spare(tier, GroupId(0)).count());
    let to_disk = plan(&cache, sequence, Tier::Disk, 0..16, true);
    carry_out(&mut cache, &to_disk);
    assert_eq!(looked_at(&cache), [0, 0, 4]);
    let (kept, _) = cache.keep(sequence).unwrap();
    assert_eq!(looked_at(&cache), [4, 0, 0]);
    cache.forget(kept);
    assert_eq!(looked_at(&cache), [0, 0, 4]);
    let to_host = plan(&cache, sequence, Tier::Host, 0..16, false);
    carry_out(&mut cache, &to_host);
    assert_eq!(looked_at(&cache), [0, 0, 4]);
    cache.release(sequence).unwrap();
    assert_eq!(looked_at(&cache), [0, 0, 0]);
}

/// Whatever is refused, sequences or blocks, nothing stays taken.
#[test]
fn what_is_kept_is_not_revived_by_halves() {
    let memory = TierMemory { bytes: 1 << 8, ..MEMORY };
    let mut cache = Cache::new(&[GROUP], [memory; 3]).unwrap();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 3);
    let (kept, _) = cache.keep(sequence).unwrap();
    let used = |cache: &mut Cache| cache.block_counts(Tier::Device, GroupId(0)).used;
    let others: Vec<_> = (1..limits::SEQUENCES_MAX).map(|_| cache.create().unwrap()).collect();
    assert!(matches!(cache.revive(kept), Err(Error::InvalidArgument { argument: "sequences", .. })));
    assert_eq!(used(&mut cache), 1);
    cache.release(others[0]).unwrap();
    cache.reserve(&[(others[1], 12)]).unwrap();
    cache.commit(None).unwrap();
    assert!(matches!(cache.revive(kept), Err(Error::OutOfBlocks { .. })));
    cache.create().unwrap();
    cache.audit().unwrap();
}

/// A state cannot be kept, whatever is written down.
#[test]
fn a_state_is_not_adopted() {
    let group = Group { kind: GroupKind::State, ..GROUP };
    let mut cache = Cache::new(&[group], [MEMORY; 3]).unwrap();
    let one = span(0, (1 << 31) - 1, 1, 0);
    let written = KeptGroup { spans: vec![one, one], ..KeptGroup::default() };
    let kept = KeptSequence { len: 2, groups: vec![written] };
    assert!(cache.adopt(&[kept]).remove(0).is_err());
    cache.audit().unwrap();
}

/// What another cache cannot have written down is refused, at once or halfway, and does not affect those that follow.
#[test]
fn a_sequence_of_another_shape_is_not_adopted() {
    let window = Window { sinks: 0, tokens: 4, headroom: 0, trailing: false };
    let windowed = Group { window: Some(window), ..GROUP };
    let sealed = |block| KeptPage::Sealed(BlockId::new(block));
    let open = |block, fill| KeptPage::Open(BlockId::new(block), fill);
    let of = |pages| KeptGroup { spans: vec![span(0, 0, 6, 0)], pages, ..KeptGroup::default() };
    let six = |groups| KeptSequence { len: 6, groups };
    let right = six(vec![of(vec![sealed(0), open(1, 2)])]);
    let most = limits::TOKENS_PER_SEQUENCE_MAX;
    let passed = |count| {
        let (left, spans) = (Left { after: 0, count }, vec![span(0, 0, 4, most - 4)]);
        let written = KeptGroup { left, spans, pages: vec![sealed(2)] };
        KeptSequence { len: count + 4, groups: vec![written] }
    };
    for (group, kept, is_right) in [
        (GROUP, six(Vec::new()), false),
        (GROUP, six([&right.groups[..], &right.groups].concat()), false),
        (GROUP, six(vec![of(vec![sealed(0), open(1, 2), KeptPage::Left])]), false),
        (GROUP, six(vec![of(vec![sealed(0), open(1, 2), sealed(2)])]), false),
        (GROUP, six(vec![of(vec![sealed(0), open(1, 4)])]), false),
        (GROUP, six(vec![of(vec![sealed(0), open(64, 2)])]), false),
        (windowed, passed(most - 4), true),
        (windowed, passed(most - 3), false),
    ] {
        let mut cache = Cache::new(&[group], [MEMORY; 3]).unwrap();
        let adopted = cache.adopt(&[kept.clone(), right.clone()]);
        assert_eq!(adopted[0].is_ok(), is_right, "{kept:?}: {adopted:?}");
        cache.audit().unwrap();
        if group == GROUP {
            assert_eq!(cache.describe(*adopted[1].as_ref().unwrap()), Some(right.clone()));
        }
    }
}

/// Tokens that have left keep their positions: without that gap distances would be negative.
#[test]
fn what_has_left_without_a_gap_is_not_adopted() {
    let window = Window { sinks: 4, tokens: 4, headroom: 0, trailing: false };
    let group = Group { window: Some(window), ..GROUP };
    for (position, is_right) in [(104, true), (103, false), (4, false)] {
        let mut cache = Cache::new(&[group], [MEMORY; 3]).unwrap();
        let pages = (0..2).map(|block| KeptPage::Sealed(BlockId::new(block))).collect();
        let spans = vec![span(0, 0, 4, 0), span(1, 0, 4, position)];
        let left = Left { after: 4, count: 100 };
        let kept = KeptSequence { len: 108, groups: vec![KeptGroup { left, spans, pages }] };
        let adopted = cache.adopt(&[kept]).remove(0);
        assert_eq!(adopted.is_ok(), is_right, "{adopted:?}");
        let Ok(adopted) = adopted else { continue };
        let (sequence, _) = cache.revive(adopted).unwrap();
        cache.reserve(&[(sequence, 1)]).unwrap();
        let offsets: Vec<_> = cache.step_spans(0, GroupId(0)).map(|span| span.offset).collect();
        assert_eq!(offsets, [0, 0]);
    }
}

/// What steps rely on: a span without tokens begins at its first page, positions are within what kernels count, and all
/// groups continue at the same position.
#[test]
fn a_sequence_that_could_not_have_grown_is_not_adopted() {
    let end = limits::TOKENS_PER_SEQUENCE_MAX;
    let empty = |skip, position| (Vec::new(), span(0, skip, 0, position));
    let four = |position| (vec![KeptPage::Sealed(BlockId::new(0))], span(0, 0, 4, position));
    let two = |position| (vec![KeptPage::Sealed(BlockId::new(0))], span(0, 2, 2, position));
    for (len, [first, second], is_right) in [
        (0, [empty(0, 0), empty(0, 0)], true),
        (0, [(vec![KeptPage::Left], span(0, 4, 0, 0)), empty(0, 0)], false),
        (0, [empty(0, end), empty(0, end)], true),
        (0, [empty(0, 0), empty(0, end)], false),
        (4, [four(end - 4), four(end - 4)], true),
        (4, [four(end - 3), four(end - 3)], false),
        (4, [four(7), four(8)], false),
        (2, [two(2), two(2)], true),
        (2, [two(1), two(1)], false),
    ] {
        let mut cache = Cache::new(&[GROUP; 2], [MEMORY; 3]).unwrap();
        let named = |(pages, span): &(Vec<_>, _)| KeptGroup {
            spans: vec![*span],
            pages: pages.clone(),
            ..KeptGroup::default()
        };
        let mut second = named(&second);
        second.pages.iter_mut().for_each(|page| *page = KeptPage::Sealed(BlockId::new(4)));
        let kept = KeptSequence { len, groups: vec![named(&first), second] };
        let adopted = cache.adopt(std::slice::from_ref(&kept)).remove(0);
        assert_eq!(adopted.is_ok(), is_right, "{kept:?}: {adopted:?}");
        let Ok(adopted) = adopted else { continue };
        let (sequence, _) = cache.revive(adopted).unwrap();
        if cache.next_position(sequence).unwrap() < end {
            cache.reserve(&[(sequence, 17)]).unwrap();
            cache.commit(None).unwrap();
        }
        cache.drop_tokens(sequence, 0..len).unwrap();
        cache.audit().unwrap();
    }
}
