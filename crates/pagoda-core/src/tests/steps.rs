use super::*;

#[test]
fn a_sequence_is_as_long_as_integers_of_kernels_count() {
    let mut cache = cache();
    let sequence = cache.create().unwrap();
    assert!(matches!(cache.reserve(&[(sequence, 1 << 31)]), Err(Error::InvalidArgument { .. })));
    assert!(matches!(cache.reserve(&[(sequence, (1 << 31) - 1)]), Err(Error::OutOfBlocks { .. })));
}

/// Where new tokens begin in a batch is a 32-bit number: without a limit it would wrap around for later sequences.
#[test]
fn a_step_has_as_many_tokens_as_integers_of_tables_count() {
    let group = Group { kind: GroupKind::Paged { page_size: 1 << 15 }, ..GROUP };
    let memory = TierMemory { bytes: 1 << 24, extent_bytes: 1 << 20 };
    let mut cache = Cache::new(&[group], [memory; 3]).unwrap();
    let [a, b, c] = [0; 3].map(|_| cache.create().unwrap());
    let most = (1 << 31) - 1;
    let refused = cache.reserve(&[(a, most), (b, most), (c, 3)]).unwrap_err();
    assert_eq!(refused.to_string(), "new_tokens = 4294967297: at most 2147483647 of all sequences together");
    assert!(matches!(cache.reserve(&[(a, most), (b, 1)]), Err(Error::InvalidArgument { .. })));
    cache.audit().unwrap();
    cache.reserve(&[(a, most - 1), (b, 1)]).unwrap();
    cache.rollback().unwrap();
}

/// A page that a sequence was truncated into is reopened by the step that writes there, not by one that is refused.
#[test]
fn a_refused_step_leaves_plans_and_truncated_pages_as_they_were() {
    let mut cache = cache();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 4);
    cache.truncate(sequence, 2).unwrap();
    let mut sealed = Selection::of(0..2, vec![GroupId(0)]);
    sealed.sealed = true;
    let plan = cache.plan(sequence, Tier::Host, &sealed).unwrap();
    assert_eq!(plan.moves().len(), 1);
    assert!(matches!(cache.reserve(&[(sequence, 1 << 20)]), Err(Error::OutOfBlocks { .. })));
    cache.audit().unwrap();
    assert_eq!(cache.plan(sequence, Tier::Host, &sealed).unwrap(), plan);
    cache.execute(&plan).unwrap();
}

/// Kernels of a step that is rolled back may have written to it: a plan of what was there before is refused.
#[test]
fn a_step_that_is_rolled_back_leaves_truncated_pages_open() {
    let mut cache = cache();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, 4);
    cache.truncate(sequence, 2).unwrap();
    let sealed = Selection { sealed: true, ..Selection::of(0..2, vec![GroupId(0)]) };
    let plan = cache.plan(sequence, Tier::Host, &sealed).unwrap();
    assert_eq!(plan.moves().len(), 1);
    cache.reserve(&[(sequence, 1)]).unwrap();
    cache.rollback().unwrap();
    assert!(matches!(cache.execute(&plan), Err(Error::InvalidArgument { argument: "plan", .. })));
    assert_eq!(cache.plan(sequence, Tier::Host, &sealed).unwrap().moves(), []);
    cache.audit().unwrap();
}

/// What a refused step lacks, and what it would have if it waited.
#[test]
fn a_refused_step_says_what_it_lacks_and_what_drains() {
    let mut cache = cache();
    let [first, second] = [0; 2].map(|_| cache.create().unwrap());
    cache.reserve(&[(first, 40)]).unwrap();
    let epoch = cache.commit(None).unwrap();
    cache.release(first).unwrap();
    // Ten of 64 blocks drain.
    let (tier, group, blocks_short, draining) = (Tier::Device, GroupId(0), 61 - 54, 10);
    let lacks = Error::OutOfBlocks { tier, group, blocks_short, bytes_short: 7 * 64, draining };
    assert_eq!(cache.reserve(&[(second, 61 * 4)]), Err(lacks));
    assert!(cache.is_draining());
    cache.retire(epoch).unwrap();
    assert_eq!((cache.is_draining(), cache.drained_blocks()), (false, 10));
    cache.reserve(&[(second, 61 * 4)]).unwrap();
    cache.rollback().unwrap();
    cache.audit().unwrap();
}

#[test]
fn blocks_do_not_wait_for_steps_after_they_were_freed() {
    let mut cache = cache();
    let epochs = [(); 2].map(|()| {
        let sequence = cache.create().unwrap();
        cache.reserve(&[(sequence, 4)]).unwrap();
        let epoch = cache.commit(None).unwrap();
        cache.release(sequence).unwrap();
        epoch
    });
    for (epoch, left) in epochs.into_iter().zip([1, 0]) {
        cache.retire(epoch).unwrap();
        assert_eq!(cache.block_counts(Tier::Device, GroupId(0)).draining, left);
    }
}

/// Those of pages that a step copies are counted until it ends, in whichever order it copies them.
#[test]
fn rows_of_copied_pages_stay_dead_while_a_step_is_open() {
    let mut cache = cache();
    let [first, second] = [0; 2].map(|_| cache.create().unwrap());
    for sequence in [first, second] {
        append(&mut cache, sequence, 3);
        let fork = cache.fork(sequence).unwrap();
        cache.truncate(fork, 2).unwrap();
        cache.truncate(sequence, 1).unwrap();
    }
    assert_eq!(cache.dead_rows(), 2);
    cache.reserve(&[(second, 1), (first, 1)]).unwrap();
    assert_eq!(cache.dead_rows(), 2);
    cache.audit().unwrap();
}

/// It has one version for all of a step's tokens.
#[test]
fn a_step_over_a_state_commits_all_tokens() {
    let group = Group { kind: GroupKind::State, ..GROUP };
    let mut cache = Cache::new(&[GROUP, group], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    cache.reserve(&[(sequence, 3)]).unwrap();
    for wrong in [0, 2, 4] {
        assert!(matches!(
            cache.commit(Some(&[wrong])),
            Err(Error::InvalidArgument { argument: "accepted", .. })
        ));
    }
    cache.commit(Some(&[3])).unwrap();
    assert_eq!(cache.token_count(sequence), Ok(3));
    cache.audit().unwrap();
}

/// A call that names a sequence twice does not change which one has rested longest.
#[test]
fn wrong_arguments_leave_sequences_at_rest() {
    let mut cache = cache();
    let [first, second] = [0; 2].map(|_| cache.create().unwrap());
    for sequence in [first, second] {
        cache.reserve(&[(sequence, 4)]).unwrap();
        cache.commit(None).unwrap();
    }
    let resting = |cache: &mut Cache| cache.resting((Tier::Device, Tier::Host), GroupId(0), false, 2, &[]);
    assert_eq!(resting(&mut cache), [first, second]);
    assert!(matches!(cache.reserve(&[(first, 1), (first, 1)]), Err(Error::InvalidArgument { .. })));
    assert_eq!(resting(&mut cache), [first, second]);
    cache.audit().unwrap();
}

/// When a page moves, only the rows that have it are rewritten.
#[test]
fn a_row_stays_as_it_is_when_pages_of_others_move() {
    let mut cache = cache();
    let [mover, other] = [0; 2].map(|_| cache.create().unwrap());
    cache.reserve(&[(mover, 8), (other, 8)]).unwrap();
    cache.commit(None).unwrap();
    let fork = cache.fork(mover).unwrap();
    let batch = [mover, other, fork].map(|id| (id, 0));
    let versions = |cache: &mut Cache| {
        cache.reserve(&batch).unwrap();
        let versions = [0, 1, 2].map(|index| cache.step_row(index, GroupId(0)).1);
        cache.commit(None).unwrap();
        versions
    };
    let before = versions(&mut cache);
    let plan = cache.plan(mover, Tier::Host, &Selection::of(0..4, vec![GroupId(0)])).unwrap();
    let (_, completion, copies) = cache.execute(&plan).unwrap();
    completion.finish(copies.len() as u32);
    let after = versions(&mut cache);
    assert_eq!([0, 1, 2].map(|index| before[index] == after[index]), [false, true, false]);
    cache.audit().unwrap();
}
