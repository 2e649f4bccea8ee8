//! Tests of the bookkeeping, by call: what the naive model of `tests/model.rs` does not reach.

use super::*;
use crate::cache::{Group, GroupKind, TierMemory};
use crate::ids::{GroupId, SequenceId, Tier};
use crate::plan::{Plan, Selection};
use std::ops::Range;

mod kept;
mod plans;
mod sequences;
mod steps;

/// Pages of four tokens.
const GROUP: Group = Group { block_bytes: 64, kind: GroupKind::Paged { page_size: 4 }, window: None };

/// 64 of their blocks.
const MEMORY: TierMemory = TierMemory { bytes: 1 << 12, extent_bytes: 1 << 8 };

/// An empty cache without a disk.
fn cache() -> Cache {
    Cache::new(&[GROUP], [MEMORY, MEMORY, TierMemory { bytes: 0, ..MEMORY }]).unwrap()
}

/// A cache with three tiers, and a sequence in it with this many tokens, which no step reads any more.
fn filled(tokens: u32) -> (Cache, SequenceId) {
    let mut cache = Cache::new(&[GROUP], [MEMORY; 3]).unwrap();
    let sequence = cache.create().unwrap();
    append(&mut cache, sequence, tokens);
    (cache, sequence)
}

fn append(cache: &mut Cache, sequence: SequenceId, tokens: u32) {
    cache.reserve(&[(sequence, tokens)]).unwrap();
    let epoch = cache.commit(None).unwrap();
    cache.retire(epoch).unwrap();
}

fn plan(cache: &Cache, sequence: SequenceId, to: Tier, tokens: Range<u64>, keep: bool) -> Plan {
    let selection = Selection { keep, ..Selection::of(tokens, vec![GroupId(0)]) };
    cache.plan(sequence, to, &selection).unwrap()
}

fn carry_out(cache: &mut Cache, plan: &Plan) {
    let (_, completion, copies) = cache.execute(plan).unwrap();
    completion.finish(copies.len() as u32);
    cache.settle();
}

fn used(cache: &mut Cache) -> [u64; Tier::COUNT] {
    Tier::ALL.map(|tier| cache.block_counts(tier, GroupId(0)).used)
}
