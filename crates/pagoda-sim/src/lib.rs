//! Simulates one whole cache, from sequences to the bytes on disk: the real `pagoda-core` and the real disk tier of
//! `pagoda-store` over simulated memory, kernels, copies and a simulated drive.
//!
//! A seed decides everything: the shape of the cache, every operation, when kernels run, when copies arrive and in which
//! pieces, what the drive does wrong, when the process dies and when the power fails. Stored bytes identify themselves: every
//! word of every row names its token, layer and place. A naive model keeps a list of tokens for each sequence and each key.
//! Wherever a row is read, it must be the model's. A read may fail only with a typed error, and only if there was a cause.
//!
//! Everything runs in one thread, so that a seed is a schedule: [`simulate`] repeats itself for the same arguments.

mod copies;
mod drive;
mod machine;
mod memory;
mod random;
mod sessions;
mod shape;
mod streaming;
mod tally;

pub use tally::{Fate, Tally};

use machine::Machine;
use pagoda_core::fence::Fence;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What is taken away, to show that its absence is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// A fence of the core.
    Fence(Fence),
    /// The order of kernels and copies: copies read blocks before the kernels that write them have run.
    CopiesAfterKernels,
    /// Checksums: some pages come from the drive with a flipped bit, and nothing objects.
    Checksums,
    /// What was read ahead in one step is used in the next without checking that its pages are still there.
    Generations,
    /// Slots of the ring are handed out before their reads have ended.
    EndOfReads,
    /// Steps retire although reads that they began are still under way.
    FenceOfReads,
    /// Steps retire although copies are still under way for which an earlier step did not wait.
    FenceOfLateCopies,
}

/// Why a simulation failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Simulate this seed again to reproduce it.
    pub seed: u64,
    /// How many operations had been done.
    pub operations: usize,
    /// What was wrong.
    pub what: String,
    /// The last operations, including the one that failed.
    pub trace: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "PAGODA_SIM_SEED={} failed after {} operations: {}",
            self.seed, self.operations, self.what
        )?;
        self.trace.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

/// Simulates `operations` operations, then ends everything, after which nothing may be left.
///
/// # Errors
/// Describes what was wrong, and how to reproduce it.
pub fn simulate(seed: u64, operations: usize, missing: Option<Missing>) -> Result<Tally, Failure> {
    let mut machine = Machine::new(seed, missing);
    let mut done = 0;
    let run = || {
        while done < operations {
            done += 1;
            machine.operate()?;
        }
        machine.wind_up()
    };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into()));
        Err(format!("a panic: {}", message.unwrap_or_default()))
    });
    match result {
        Ok(()) => Ok(machine.tally),
        Err(what) => Err(Failure { seed, operations: done, what, trace: machine.trace.into() }),
    }
}
