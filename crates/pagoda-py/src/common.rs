//! Which sequences of a step hold pages in common. The answer stays valid as long as their tables only grow.

use crate::step::StepState;
use pagoda_core::Cache;
use pagoda_core::common::{Candidate, Common, Commons, NEW_TOKENS_MAX};
use pagoda_core::ids::{GroupId, SequenceId};

/// The last result for one layer group.
#[derive(Default)]
pub(crate) struct Found {
    /// The sequences that it was found for, with the versions of their tables; None for a sequence that takes no part.
    found_for: Vec<Option<(SequenceId, u32)>>,
    pub(crate) commons: Commons,
}

impl Found {
    /// Looks among the sequences of the open step with few new tokens, of which `takes` accepts the number. Keeps the last
    /// result if tables have only grown since.
    pub(crate) fn update(
        &mut self,
        core: &Cache,
        step: &StepState,
        group: GroupId,
        page_size: u32,
        takes: impl Fn(u32) -> bool,
    ) {
        let Self { found_for, commons } = self;
        let now = core.step_batch().enumerate().map(|(index, (sequence, new_tokens))| {
            ((1..=NEW_TOKENS_MAX).contains(&new_tokens) && takes(new_tokens))
                .then(|| (sequence, core.step_row(index, group).1))
        });
        // A sequence may have been cut inside a page.
        let bounds = step.bounds();
        let whole = |node: &Common| {
            commons.members[node.members.clone()].iter().all(|&place| {
                let place = place as usize;
                let new_tokens = bounds[place + 1] - bounds[place];
                let last = step.spans(core, place, group).last();
                last.is_some_and(|span| node.tokens.end + new_tokens <= span.count)
            })
        };
        if now.clone().eq(found_for.iter().copied()) && commons.nodes.iter().all(whole) {
            return;
        }
        found_for.clear();
        found_for.extend(now);
        let mut candidates = Vec::with_capacity(found_for.len());
        for (index, (_, new_tokens)) in core.step_batch().enumerate() {
            // If there are several spans, the first may have moved.
            if let (Some(_), [span]) = (found_for[index], step.spans(core, index, group))
                && (span.first_page, span.skip) == (0, 0)
            {
                let full = (span.count - new_tokens) / page_size;
                let pages = &core.step_row(index, group).0[..full as usize];
                candidates.push(Candidate { place: index as u32, pages });
            }
        }
        commons.find(&mut candidates, page_size as usize);
    }
}
