//! Copies under way: late, in pieces and in any order, some of them twice, and reported at any time afterwards.

use crate::Missing;
use crate::machine::{Kernel, Machine, Outcome, ensure};
use crate::memory::Place;
use crate::shape::WORD;
use pagoda_core::Error;
use pagoda_core::fence::{Completion, Failure};
use pagoda_core::ids::{Epoch, KeptId, SequenceId, TicketId, Tier};
use pagoda_core::plan::{BlockCopy, Plan};
use std::ops::Range;

/// Most pages that one part of a job writes to disk or reads from it.
const DISK_PAGES: usize = 16;

/// The copies of one plan.
pub(crate) struct Job {
    id: TicketId,
    completion: Completion,
    copies: Vec<BlockCopy>,
    parts: Vec<Part>,
    /// The step whose kernels may have written what is copied.
    behind: u64,
    /// Operations since it was sent.
    age: u64,
}

/// Copies that are made together: in memory, or of one group to or from disk.
struct Part {
    copies: Range<usize>,
    /// Bytes that have been copied, if in memory.
    copied: usize,
    outcome: Option<Result<(), Failure>>,
}

/// Copies to or from disk whose call has given up; they are made all the same, at any later time.
#[derive(Default)]
pub(crate) struct Late {
    pub(crate) copies: Vec<BlockCopy>,
    /// The step whose kernels may have written what is copied.
    pub(crate) behind: u64,
    /// For copies of a step: the last step that had been closed when they began.
    pub(crate) since: Option<Epoch>,
    /// What is let go of when they have ended.
    pub(crate) sequence: Option<SequenceId>,
    pub(crate) kept: Option<KeptId>,
    /// What they read from, while its key keeps it.
    pub(crate) source: Option<KeptId>,
}

/// A failure that the core still has to report.
pub(crate) struct Owed {
    id: TicketId,
    copied: u32,
    corrupt: bool,
}

fn source(copy: &BlockCopy) -> Place {
    (copy.from.0, copy.group, copy.from.1)
}

fn target(copy: &BlockCopy) -> Place {
    (copy.to.0, copy.group, copy.to.1)
}

/// The group whose blocks on disk a copy touches, and whether it writes them.
fn on_disk(copy: &BlockCopy) -> Option<(u8, bool)> {
    let writes = copy.to.0 == Tier::Disk;
    (writes || copy.from.0 == Tier::Disk).then_some((copy.group.0, writes))
}

/// Cuts the copies of a job into parts.
fn cut(copies: &[BlockCopy]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (index, copy) in copies.iter().enumerate() {
        match parts.last_mut() {
            Some(Part { copies: part, .. })
                if on_disk(&copies[part.start]) == on_disk(copy)
                    && (on_disk(copy).is_none() || part.len() < DISK_PAGES) =>
            {
                part.end = index + 1;
            }
            _ => parts.push(Part { copies: index..index + 1, copied: 0, outcome: None }),
        }
    }
    parts
}

impl Machine {
    /// Executes a plan; returns whether the core accepted it.
    pub(crate) fn launch(&mut self, plan: &Plan) -> Outcome<bool> {
        match self.cache.execute(plan) {
            Ok((id, completion, copies)) => {
                ensure!(
                    copies.iter().map(|copy| copy.bytes).sum::<u64>() == plan.bytes(),
                    "{plan:?} became {copies:?}"
                );
                if !copies.is_empty() {
                    let (parts, behind) = (cut(&copies), self.minted);
                    self.jobs.push(Job { id, completion, copies, parts, behind, age: 0 });
                }
                Ok(true)
            }
            Err(Error::OutOfBlocks { tier, blocks_short, .. }) => {
                ensure!(tier == plan.to && blocks_short > 0, "{tier} lacks {blocks_short} for {plan:?}");
                self.tally.see("refused: plans without room", 1);
                Ok(false)
            }
            Err(Error::InvalidArgument { argument: "sequence", .. }) => {
                ensure!(self.is_stepping(plan.sequence), "refused as if in a step: {plan:?}");
                Ok(false)
            }
            Err(Error::InvalidArgument { argument: "plan", .. } | Error::UseAfterRelease { .. }) => {
                self.tally.see("refused: stale plans", 1);
                Ok(false)
            }
            Err(error) => Err(format!("{error} of {plan:?}")),
        }
    }

    /// Whether a call gives up now on the copies that it needs; if so, they are made later.
    pub(crate) fn gives_up(&mut self, copies: &[BlockCopy], needs: Late) -> bool {
        let gives_up = !copies.is_empty() && self.random.once_in(4);
        if gives_up {
            self.late.push(Late { copies: copies.to_vec(), behind: self.minted, ..needs });
            self.tally.see("copies: calls that gave up", 1);
        }
        gives_up
    }

    /// Makes some late copies, and lets go of what they needed.
    pub(crate) fn end_late(&mut self) -> Outcome {
        if self.late.is_empty() {
            return Ok(());
        }
        let late = self.late.swap_remove(self.random.below(self.late.len()));
        self.run_stream(late.behind)?;
        // The call has had an error already.
        let _ = self.copy_disk(&late.copies)?;
        late.kept.into_iter().for_each(|kept| self.forget_kept(kept));
        late.sequence.map_or(Ok(()), |id| self.cache.release(id)).map_err(|error| error.to_string())
    }

    /// Lets go of a kept sequence, like the binding: once no late copies read from its blocks.
    pub(crate) fn forget_kept(&mut self, kept: KeptId) {
        match self.late.iter_mut().find(|late| late.source == Some(kept)) {
            Some(reader) => reader.kept = Some(kept),
            None => self.cache.forget(kept),
        }
    }

    /// Makes copies before anything else happens.
    pub(crate) fn copy_now(&mut self, copies: &[BlockCopy]) -> Outcome<Result<(), Failure>> {
        self.run_stream(self.minted)?;
        self.copy_disk(copies)
    }

    /// Like `copy_now`, for copies whose sources no pending kernel writes.
    pub(crate) fn copy_disk(&mut self, copies: &[BlockCopy]) -> Outcome<Result<(), Failure>> {
        for Part { copies: range, .. } in cut(copies) {
            if let Err(failure) = self.transfer(&copies[range])? {
                return Ok(Err(failure));
            }
        }
        Ok(Ok(()))
    }

    /// Makes the copies of one part to or from disk.
    fn transfer(&mut self, copies: &[BlockCopy]) -> Outcome<Result<(), Failure>> {
        let group = copies[0].group;
        if copies[0].to.0 == Tier::Disk {
            let pages: Vec<_> = copies.iter().map(|copy| (copy.to.1, source(copy))).collect();
            self.write_pages(group, &pages)
        } else {
            let pages: Vec<_> = copies.iter().map(|copy| (copy.from.1, target(copy))).collect();
            self.read_pages(group, &pages)
        }
    }

    /// Copies a little more of a job: some words in memory, or one part to or from disk. Now and then it copies something
    /// again.
    pub(crate) fn advance(&mut self, job: usize) -> Outcome {
        let left: Vec<_> = (0..self.jobs[job].parts.len())
            .filter(|&part| self.jobs[job].parts[part].outcome.is_none())
            .collect();
        let Some(part) = self.random.pick(&left) else { return Ok(()) };
        let words = self.random.within(1..32);
        let again = self.random.once_in(8);
        self.advance_part(job, part, words * WORD, again)
    }

    fn advance_part(&mut self, job: usize, part: usize, bytes: usize, again: bool) -> Outcome {
        let range = self.jobs[job].parts[part].copies.clone();
        let copies = self.jobs[job].copies[range].to_vec();
        let from_device = copies.iter().any(|copy| copy.from.0 == Tier::Device);
        if from_device && self.missing != Some(Missing::CopiesAfterKernels) {
            self.run_stream(self.jobs[job].behind)?;
        }
        if on_disk(&copies[0]).is_some() {
            let outcome = self.transfer(&copies)?;
            self.tally.see("copies: parts to or from disk", 1);
            if again {
                self.tally.see("copies: made again", 1);
            } else {
                self.jobs[job].parts[part].outcome = Some(outcome);
            }
            return Ok(());
        }
        let mut at = self.jobs[job].parts[part].copied;
        if again && at > 0 {
            self.tally.see("copies: made again", 1);
            at = self.random.below(at / WORD) * WORD;
        }
        let end = at + bytes;
        let mut start = 0;
        for copy in &copies {
            let whole = copy.bytes as usize;
            let (from, until) = (at.clamp(start, start + whole), end.clamp(start, start + whole));
            self.memory.copy(source(copy), target(copy), from - start..until - start);
            start += whole;
        }
        self.tally.see("copies: pieces in memory", 1);
        let part = &mut self.jobs[job].parts[part];
        part.copied = part.copied.max(end.min(start));
        if part.copied == start {
            part.outcome = Some(Ok(()));
        }
        Ok(())
    }

    /// Ends a job and reports that to the core: when everything is copied or, if the link fails, with what has been copied so
    /// far.
    pub(crate) fn report(&mut self, job: usize, link_fails: bool) -> Outcome {
        for part in 0..self.jobs[job].parts.len() {
            while !link_fails && self.jobs[job].parts[part].outcome.is_none() {
                self.advance_part(job, part, usize::MAX / 2, false)?;
            }
        }
        let Job { id, completion, copies, parts, age, .. } = self.jobs.swap_remove(job);
        self.tally.see("faults of links: copies that take 50 operations and more", u64::from(age > 50));
        let mut copied = 0;
        let mut failure = None;
        for part in parts {
            match part.outcome {
                Some(Ok(())) => copied += part.copies.len(),
                Some(Err(why)) => {
                    failure = Some(why);
                    break;
                }
                None => {
                    let done = |at: &usize| {
                        let bytes: u64 = copies[part.copies.start..=*at].iter().map(|copy| copy.bytes).sum();
                        bytes <= part.copied as u64
                    };
                    copied += part.copies.clone().take_while(done).count();
                    self.tally.see("faults of links: copies that end half way", 1);
                    failure = Some(Failure::Io("the link is gone".into()));
                    break;
                }
            }
        }
        let copied = copied as u32;
        match failure {
            None => completion.finish(copied),
            Some(failure) => {
                let corrupt = matches!(failure, Failure::Corrupt(_));
                self.owed.push(Owed { id, copied, corrupt });
                completion.fail(copied, failure);
            }
        }
        self.tally.see("copies: jobs", 1);
        Ok(())
    }

    /// The core reports each failure once, and nothing else.
    pub(crate) fn hear_failures(&mut self) -> Outcome {
        while let Some(error) = self.cache.take_failure() {
            let (ticket, said, holders, corrupt) = match &error {
                Error::CopyFailed { ticket, copied, sequences, .. } => (*ticket, *copied, sequences, false),
                Error::CorruptPage { ticket, copied, sequences, .. } => (*ticket, *copied, sequences, true),
                other => return Err(format!("{other} is no failure of a copy")),
            };
            let Some(at) = self.owed.iter().position(|owed| owed.id == ticket) else {
                return Err(format!("nothing failed, but {error}"));
            };
            let owed = self.owed.swap_remove(at);
            ensure!(
                (owed.copied, owed.corrupt) == (said, corrupt),
                "{} had arrived, but {error}",
                owed.copied
            );
            self.tally.see(if corrupt { "told: corrupt pages" } else { "told: failed copies" }, 1);
            if corrupt {
                self.doomed.extend(holders);
            }
        }
        Ok(())
    }

    /// Time passes for jobs on which nothing is done.
    pub(crate) fn age_jobs(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.age += 1);
    }

    /// Runs the kernels of the steps up to `epoch`.
    pub(crate) fn run_stream(&mut self, epoch: u64) -> Outcome {
        while self.retired < epoch {
            match self.stream.pop_front() {
                None => return Err(format!("epoch {epoch} has no end")),
                Some(Kernel::Copy(copy)) => {
                    self.memory.copy(source(&copy), target(&copy), 0..copy.bytes as usize);
                }
                Some(Kernel::Append { at, row, token }) => {
                    self.shape.group(at.1).write(self.memory.block_mut(at), row, token);
                }
                Some(Kernel::Read { at, row, token }) => {
                    let right = self.shape.group(at.1).holds(self.memory.block(at), row, token);
                    ensure!(right, "row {row} of {at:?} is not that of token {token}");
                    self.tally.see("checked: rows in memory", 1);
                }
                Some(Kernel::Retired(epoch)) => self.retired = epoch.0,
            }
        }
        Ok(())
    }
}
