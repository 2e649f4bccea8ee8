use super::*;
use crate::fence::Failure;

/// A page is moved once, however often it is in the selection or in the table.
#[test]
fn a_plan_has_each_page_once() {
    let mut cache = cache();
    let sequence = cache.create().unwrap();
    cache.reserve(&[(sequence, 12)]).unwrap();
    cache.commit(None).unwrap();
    // The second page is in two spans.
    cache.drop_tokens(sequence, 5..7).unwrap();
    let selection = Selection::of(0..10, vec![GroupId(0); 2]);
    let plan = cache.plan(sequence, Tier::Host, &selection).unwrap();
    assert_eq!(plan.moves().len(), 3);
    let (_, completion, copies) = cache.execute(&plan).unwrap();
    completion.finish(copies.len() as u32);
    cache.audit().unwrap();
    assert_eq!(cache.block_counts(Tier::Host, GroupId(0)).used, 3);
}

#[test]
fn moves_between_two_tiers_are_known_until_they_have_ended() {
    let (mut cache, sequence) = filled(8);
    let moves = |cache: &mut Cache, from, to| {
        cache.moves_between(from, to, false).into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    let copied = plan(&cache, sequence, Tier::Host, 0..8, true);
    let (_, completion, copies) = cache.execute(&copied).unwrap();
    assert_eq!(moves(&mut cache, Tier::Device, Tier::Host), [], "it leaves a copy");
    assert_eq!(cache.moves_between(Tier::Device, Tier::Host, true).len(), 1);
    completion.finish(copies.len() as u32);
    assert_eq!(cache.moves_between(Tier::Device, Tier::Host, true).len(), 0);
    assert_eq!(moves(&mut cache, Tier::Device, Tier::Host), []);
    let moved = plan(&cache, sequence, Tier::Disk, 0..8, false);
    let (id, completion, copies) = cache.execute(&moved).unwrap();
    assert_eq!(moves(&mut cache, Tier::Device, Tier::Disk), [id]);
    assert_eq!(moves(&mut cache, Tier::Device, Tier::Host), []);
    assert_eq!(moves(&mut cache, Tier::Host, Tier::Disk), []);
    completion.finish(copies.len() as u32);
    assert_eq!(moves(&mut cache, Tier::Device, Tier::Disk), []);
}

#[test]
fn no_tokens_have_no_state() {
    let state = Group { kind: GroupKind::State, ..GROUP };
    let mut cache = Cache::new(&[state], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 3);
    for (tokens, moves) in [(1..1, 0), (1..2, 1)] {
        assert_eq!(plan(&cache, sequence, Tier::Host, tokens, false).moves().len(), moves);
    }
}

/// Whichever call is the next one.
#[test]
fn blocks_that_a_copy_has_left_are_free_once_it_is_done() {
    let asked: [fn(&mut Cache) -> u64; 3] = [
        |cache| cache.block_counts(Tier::Device, GroupId(0)).free,
        |cache| cache.free_blocks(Tier::Device).sum(),
        |cache| cache.reclaim(Tier::Device).map(|range| range.end - range.start).sum(),
    ];
    for (ask, answer) in asked.into_iter().zip([64, 64, 256]) {
        let (mut cache, sequence) = filled(8);
        let moved = plan(&cache, sequence, Tier::Host, 0..8, false);
        let (_, completion, copies) = cache.execute(&moved).unwrap();
        completion.finish(copies.len() as u32);
        assert_eq!(ask(&mut cache), answer);
    }
}

/// A page has a new generation whenever its bytes are, also as a page of another sequence.
#[test]
fn a_plan_of_what_a_page_was_is_refused_for_good() {
    let (mut cache, sequence) = filled(4);
    let rewrite = |cache: &mut Cache, sequence| {
        cache.truncate(sequence, 2).unwrap();
        append(cache, sequence, 2);
    };
    rewrite(&mut cache, sequence);
    let old = plan(&cache, sequence, Tier::Host, 0..4, false);
    cache.truncate(sequence, 0).unwrap();
    let other = cache.create().unwrap();
    append(&mut cache, other, 4);
    for _ in 0..3 {
        let new = plan(&cache, other, Tier::Host, 0..4, false);
        assert_eq!(new.moves()[0].page, old.moves()[0].page);
        assert!(matches!(cache.execute(&old), Err(Error::InvalidArgument { argument: "plan", .. })));
        rewrite(&mut cache, other);
    }
}

#[test]
fn what_has_arrived_may_move_on_at_once() {
    let (mut cache, sequence) = filled(4);
    let to_host = plan(&cache, sequence, Tier::Host, 0..4, false);
    let (_, completion, _) = cache.execute(&to_host).unwrap();
    let way = (Tier::Host, Tier::Disk);
    assert_eq!(cache.with_movable(way, &[sequence]), []);
    let released = cache.fork(sequence).unwrap();
    cache.release(released).unwrap();
    completion.finish(1);
    assert_eq!(cache.with_movable(way, &[released, sequence]), [(sequence, GroupId(0))]);
}

#[test]
fn a_copy_is_spared_where_a_faster_tier_has_another() {
    for (tier, other) in [(Tier::Host, Tier::Disk), (Tier::Disk, Tier::Host)] {
        let (mut cache, sequence) = filled(4);
        let kept = plan(&cache, sequence, tier, 0..4, true);
        carry_out(&mut cache, &kept);
        assert_eq!(
            [Tier::Device, other].map(|at| cache.drop_copies(at, GroupId(0), 9, None)),
            [Ok(0), Ok(0)]
        );
        assert_eq!(cache.drop_copies(tier, GroupId(0), 9, Some(sequence)), Ok(0));
        assert_eq!(cache.drop_copies(tier, GroupId(0), 9, None), Ok(1));
        assert_eq!(used(&mut cache), [1, 0, 0]);
        cache.audit().unwrap();
    }
}

#[test]
fn what_has_arrived_is_spared_where_it_came_from_and_makes_room_at_once() {
    let (mut cache, sequence) = filled(64 * 4);
    let kept = plan(&cache, sequence, Tier::Host, 0..8, true);
    let (_, completion, _) = cache.execute(&kept).unwrap();
    completion.finish(2);
    assert_eq!(cache.drop_copies(Tier::Host, GroupId(0), 9, None), Ok(2));
    // An open page that is kept on disk needs a block of the device, which is full until then.
    let open = cache.create().unwrap();
    cache.truncate(sequence, 63 * 4).unwrap();
    append(&mut cache, open, 2);
    let (key, _) = cache.keep(open).unwrap();
    let moved = plan(&cache, sequence, Tier::Host, 0..4, false);
    let (_, completion, _) = cache.execute(&moved).unwrap();
    assert!(matches!(cache.revive(key), Err(Error::OutOfBlocks { tier: Tier::Device, .. })));
    completion.finish(1);
    cache.revive(key).unwrap();
    cache.audit().unwrap();
}

/// Whoever holds one of its pages is told of a ticket, until it has ended.
#[test]
fn moves_of_a_sequence_are_those_of_its_pages() {
    let (mut cache, sequence) = filled(8);
    let [fork, other] = [cache.fork(sequence).unwrap(), cache.create().unwrap()];
    append(&mut cache, other, 4);
    let (first, second) = (0..4, 4..8);
    let tickets = [first, second].map(|tokens| {
        let there = plan(&cache, sequence, Tier::Host, tokens, true);
        cache.execute(&there).unwrap()
    });
    let moves =
        |cache: &mut Cache, of| cache.moves_of(of).unwrap().into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    cache.truncate(fork, 4).unwrap();
    let [(first, completion, _), (second, ..)] = &tickets;
    assert_eq!(
        [sequence, fork, other].map(|of| moves(&mut cache, of)),
        [vec![*first, *second], vec![*first], vec![]]
    );
    completion.finish(1);
    assert_eq!(moves(&mut cache, fork), []);
    assert_eq!(moves(&mut cache, sequence), [*second]);
}

#[test]
fn a_plan_takes_the_pages_that_were_selected() {
    let (mut cache, sequence) = filled(8);
    let fork = cache.fork(sequence).unwrap();
    append(&mut cache, sequence, 6);
    let pages = |selection: Selection| {
        let plan = cache.plan(sequence, Tier::Host, &selection).unwrap();
        plan.moves().iter().map(|m| m.page).collect::<Vec<_>>()
    };
    let all = || Selection::of(0..14, vec![GroupId(0)]);
    let [a, b, c, open] = pages(all())[..] else { panic!("four pages") };
    assert_eq!(pages(Selection { sealed: true, ..all() }), [a, b, c]);
    assert_eq!(pages(Selection { groups: vec![(GroupId(0), 2)], ..all() }), [a, b]);
    assert_eq!(pages(Selection { groups: vec![(GroupId(0), 2)], newest_first: true, ..all() }), [open, c]);
    assert_eq!(pages(Selection { tokens: 4..9, ..all() }), [b, c]);
    assert_eq!(pages(Selection { unshared: true, ..all() }), [c, open]);
    // What a drop has left: tokens 0 and 6 to 13.
    cache.drop_tokens(sequence, 1..6).unwrap();
    for (tokens, expected) in [(0..1, vec![a]), (1..3, vec![b]), (2..4, vec![b, c]), (7..9, vec![open])] {
        let plan = plan(&cache, sequence, Tier::Host, tokens, false);
        assert_eq!(plan.moves().iter().map(|m| m.page).collect::<Vec<_>>(), expected);
    }
    // The fork holds rows 1 to 5 as well.
    assert_eq!(cache.dead_rows(), 0);
    cache.release(fork).unwrap();
    assert_eq!(cache.dead_rows(), 3 + 2);
}

#[test]
fn a_plan_of_what_is_not_there_is_refused() {
    let mut cache = cache();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 4);
    let all = |stop, group| Selection::of(0..stop, vec![GroupId(group)]);
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    let backwards = Selection { tokens: 3..2, ..all(4, 0) };
    for (to, selection, refused) in [
        (Tier::Host, all(5, 0), "tokens"),
        (Tier::Host, backwards, "tokens"),
        (Tier::Host, all(4, 1), "groups"),
        (Tier::Disk, all(4, 0), "to"),
    ] {
        let planned = cache.plan(sequence, to, &selection);
        assert!(
            matches!(planned, Err(Error::InvalidArgument { argument, .. }) if argument == refused),
            "{planned:?}"
        );
    }
    assert_eq!(cache.plan(sequence, Tier::Host, &all(4, 0)).unwrap().moves().len(), 1);
}

/// Page numbers do not tell whose pages they are: their blocks must be of the group that the plan names.
#[test]
fn a_plan_of_a_cache_of_another_shape_is_refused() {
    let large = Group { block_bytes: 256, ..GROUP };
    let filled = |groups: &[Group]| {
        let mut cache = Cache::new(groups, [MEMORY; 3]).unwrap();
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 8)]).unwrap();
        cache.commit(None).unwrap();
        (cache, sequence)
    };
    let (of_two, sequence) = filled(&[GROUP; 2]);
    let plan = of_two.plan(sequence, Tier::Host, &Selection::of(0..8, vec![GroupId(1)])).unwrap();
    let (of_large, sequence) = filled(&[large]);
    let larger = of_large.plan(sequence, Tier::Host, &Selection::of(0..8, vec![GroupId(0)])).unwrap();
    for plan in [plan, larger] {
        let (mut other, _) = filled(&[GROUP; 1]);
        other.reserve(&[(sequence, 8)]).unwrap();
        other.commit(None).unwrap();
        assert!(matches!(other.execute(&plan), Err(Error::InvalidArgument { argument: "plan", .. })));
        other.audit().unwrap();
    }
}

#[test]
fn a_plan_is_refused_once_its_pages_move_have_moved_or_are_others() {
    let (mut cache, sequence) = filled(4);
    let [keeping, to_host, to_disk] = [(Tier::Host, true), (Tier::Host, false), (Tier::Disk, false)]
        .map(|(to, keep)| plan(&cache, sequence, to, 0..4, keep));
    let is_refused = |cache: &mut Cache, plan| {
        let outcome = cache.execute(plan);
        cache.audit().unwrap();
        matches!(outcome, Err(Error::InvalidArgument { argument: "plan", .. }))
    };
    let (ticket, completion, _) = cache.execute(&keeping).unwrap();
    assert!(is_refused(&mut cache, &to_host) && is_refused(&mut cache, &to_disk), "its page is being copied");
    completion.finish(1);
    assert!(is_refused(&mut cache, &to_host), "there is a copy already");
    // Now a plan has nothing to copy, and is done at once.
    let (next, completion, copies) = cache.execute(&plan(&cache, sequence, Tier::Host, 0..4, false)).unwrap();
    assert!(next != ticket && copies.is_empty() && completion.copied() == Some(0));
    assert_eq!(used(&mut cache), [0, 1, 0]);
    let back = plan(&cache, sequence, Tier::Device, 0..4, false);
    carry_out(&mut cache, &back);
    let sealed = plan(&cache, sequence, Tier::Disk, 0..4, false);
    cache.truncate(sequence, 2).unwrap();
    append(&mut cache, sequence, 1);
    assert!(is_refused(&mut cache, &sealed), "it was written to");
    assert!(
        plan(&cache, sequence, Tier::Disk, 0..3, false).moves().is_empty(),
        "an open page stays in memory"
    );
    cache.truncate(sequence, 0).unwrap();
    append(&mut cache, sequence, 4);
    let before = plan(&cache, sequence, Tier::Disk, 0..4, false);
    cache.truncate(sequence, 0).unwrap();
    append(&mut cache, sequence, 4);
    assert_eq!(before.moves()[0].page, plan(&cache, sequence, Tier::Disk, 0..4, false).moves()[0].page);
    assert!(is_refused(&mut cache, &before), "another page has its number");
}

/// A page that moves to disk is nowhere else, even if a copy was left on the tier in between.
#[test]
fn a_page_that_moves_down_leaves_all_tiers_above() {
    let (mut cache, sequence) = filled(4);
    for (to, keep, places) in [
        (Tier::Host, true, [1, 1, 0]),
        (Tier::Disk, false, [0, 0, 1]),
        (Tier::Host, true, [0, 1, 1]),
        (Tier::Device, true, [1, 1, 1]),
        (Tier::Disk, true, [1, 1, 1]),
        (Tier::Disk, false, [0, 0, 1]),
    ] {
        let there = plan(&cache, sequence, to, 0..4, keep);
        carry_out(&mut cache, &there);
        cache.audit().unwrap();
        assert_eq!(used(&mut cache), places, "{to} {keep}");
    }
}

/// The pages that a plan has to copy come before those that have a copy already: the count of arrivals is about the former.
#[test]
fn a_copy_that_failed_is_not_read_whatever_else_a_plan_moves() {
    let (mut cache, sequence) = filled(12);
    let first = plan(&cache, sequence, Tier::Host, 0..4, true);
    carry_out(&mut cache, &first);
    let all = plan(&cache, sequence, Tier::Host, 0..12, false);
    let (ticket, completion, copies) = cache.execute(&all).unwrap();
    assert_eq!(copies.len(), 2);
    completion.fail(1, Failure::Io("gone".into()));
    assert!(matches!(cache.ticket_failure(ticket), Some(Error::CopyFailed { copied: 1, .. })));
    cache.reserve(&[(sequence, 0)]).unwrap();
    let tiers: Vec<_> = cache.step_row(0, GroupId(0)).0.iter().map(|at| at.tier()).collect();
    assert_eq!(tiers, [Tier::Host, Tier::Host, Tier::Device]);
    cache.rollback().unwrap();
    cache.audit().unwrap();
    assert_eq!((used(&mut cache), cache.moved_bytes()[0][1]), ([1, 2, 0], 2 * 64));
}

/// A failure is reported to whoever asks about its ticket, otherwise to the next caller; never twice.
#[test]
fn a_failure_is_told_once() {
    for (by_step, asks) in [(false, true), (true, true), (false, false), (true, false)] {
        let (mut cache, sequence) = filled(4);
        let [fork, other] = [cache.fork(sequence).unwrap(), cache.create().unwrap()];
        append(&mut cache, other, 4);
        let to_host = plan(&cache, sequence, Tier::Host, 0..4, false);
        let (ticket, completion, copies) = cache.execute(&to_host).unwrap();
        assert_eq!(cache.holders(GroupId(0), copies[0].from), [sequence, fork]);
        if by_step {
            cache.reserve(&[(other, 1)]).unwrap();
        }
        completion.fail(0, Failure::Corrupt("spoilt".into()));
        assert_eq!(cache.take_failure(), None, "somebody may still ask");
        let told = if asks {
            cache.ticket_failure(ticket)
        } else {
            drop(completion);
            // A step holds it, and notes that it has failed.
            cache.settle();
            if by_step {
                cache.commit(None).unwrap();
            }
            cache.take_failure()
        };
        let (copied, planned, reason) = (0, 1, "spoilt".into());
        let sequences = vec![sequence, fork];
        assert_eq!(told, Some(Error::CorruptPage { ticket, copied, planned, sequences, reason }));
        if by_step && asks {
            cache.commit(None).unwrap();
        }
        assert_eq!((cache.ticket_failure(ticket), cache.take_failure()), (None, None));
        cache.audit().unwrap();
    }
}

#[test]
fn tickets_and_pages_go_on_when_their_numbers_begin_anew() {
    let mut cache = cache();
    cache.tickets_minted = u32::MAX - 2;
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 4);
    for to in [Tier::Host, Tier::Device].into_iter().cycle().take(6) {
        let selection = Selection::of(0..4, vec![GroupId(0)]);
        let plan = cache.plan(sequence, to, &selection).unwrap();
        let (_, completion, copies) = cache.execute(&plan).unwrap();
        assert_eq!(copies.len(), 1);
        completion.finish(1);
        cache.audit().unwrap();
    }
    cache.pages.age(u32::MAX);
    cache.truncate(sequence, 2).unwrap();
    cache.reserve(&[(sequence, 1)]).unwrap();
    cache.rollback().unwrap();
    cache.audit().unwrap();
}
