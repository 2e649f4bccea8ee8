//! The backend: threads, kernels and scratch memory behind two calls.

use std::ops::Range;
use std::sync::Mutex;

use pagoda_core::work;

use crate::append::{self, Overflow};
use crate::attend::{self, Attention, Carried, Part, Scratch, Target};
use crate::layer::{LayerError, PagedKv, TableError};
use crate::plan::state_floats;
use crate::pool::Pool;
use crate::rows::Rows;
use crate::simd::{Isa, Kernels};

/// About how many floats of run results `attend_runs` holds at once: 64 MiB. In this crate's unit tests so few that there are
/// several passes.
const PARTS_FLOATS: usize = if cfg!(test) { 1 << 12 } else { 16 << 20 };

/// Attention on the CPU.
pub struct Backend {
    isa: Isa,
    pub(crate) kernels: &'static Kernels,
    pub(crate) pool: Pool,
    pub(crate) deterministic: bool,
    pub(crate) scratch: Mutex<Scratch>,
}

/// Why the backend refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// This CPU does not have the instruction set.
    #[error("this CPU does not have {0}; the best it has is {best}", best = Isa::detect())]
    Unsupported(Isa),
    /// The layer is beyond the limits of the kernels.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A sequence table contradicts itself.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A number does not fit its row format.
    #[error(transparent)]
    Overflow(#[from] Overflow),
    /// The system does not start that many threads.
    #[error("threads = {wanted}: the system starts at most {most} ({why})")]
    Threads {
        /// How many were asked for, the caller's included.
        wanted: usize,
        /// How many it would have had.
        most: usize,
        /// Why no more.
        why: String,
    },
}

impl Backend {
    /// A backend of `threads` threads, the caller's included, for `isa` or the best that this CPU has.
    ///
    /// With `deterministic` the bits of a result depend on the sequence alone: not on the other sequences of the batch,
    /// the chunks it was prefilled in, where its pages lie or how many threads there are.
    pub fn new(threads: usize, deterministic: bool, isa: Option<Isa>) -> Result<Self, Error> {
        let isa = isa.unwrap_or_else(Isa::detect);
        let kernels = isa.kernels().ok_or(Error::Unsupported(isa))?;
        let pool = Pool::new(threads);
        let pool =
            pool.map_err(|(most, why)| Error::Threads { wanted: threads, most, why: why.to_string() })?;
        Ok(Self { isa, kernels, pool, deterministic, scratch: Mutex::default() })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Whether results depend on the sequence alone.
    pub fn deterministic(&self) -> bool {
        self.deterministic
    }

    /// Writes K and V rows `[sum(new_tokens), num_kv_heads, dim]` of the new tokens into their slots; there are no values
    /// where V is part of K.
    ///
    /// Conversions round to nearest even; magnitudes beyond f16 are stored as 65504. With `checked`, they and anything
    /// infinite or NaN are errors, and what has been written is garbage in slots that no token uses.
    ///
    /// # Safety
    /// - The block of every page that holds a new token lies in its arena, which is valid for writes; no two new tokens
    ///   share a slot, and nobody else accesses those slots during the call.
    /// - `keys` and `values` have a readable row for every new token and K/V head.
    pub unsafe fn append(
        &self,
        kv: &PagedKv<'_>,
        keys: Rows,
        values: Option<Rows>,
        checked: bool,
    ) -> Result<(), Error> {
        check(kv)?;
        assert_eq!(
            values.is_some(),
            kv.layer.geometry.v_format.is_some(),
            "values of a layer that stores them"
        );
        // SAFETY: as the caller promises; layer and tables are checked, and the kernels are for this CPU.
        unsafe { append::append(&self.pool, self.kernels, kv, keys, values, checked)? };
        Ok(())
    }

    /// The centre of rows `[tokens, heads, dim]`, for [`Transform::center`](crate::Transform): for each element the mean over
    /// the tokens where it is at least twice the standard deviation, else 0. With fewer than 8 rows, the centre `before`
    /// where that is nearer to the mean than 0 is, else 0. None if a mean is NaN or larger than [`F16_MAX`](crate::F16_MAX).
    ///
    /// # Safety
    /// There is a readable row for every token and head; `dim` is at most [`HEAD_DIM_MAX`](crate::HEAD_DIM_MAX).
    pub unsafe fn center_of(
        &self,
        rows: Rows,
        tokens: usize,
        heads: usize,
        dim: usize,
        before: &[f32],
    ) -> Option<Vec<f32>> {
        // SAFETY: as the caller promises; the kernels are for this CPU.
        unsafe { append::center_of(self.kernels, rows, tokens, heads, dim, before) }
    }

    /// Attention of the new tokens, causal in the order of tokens. Where a query sees nothing the output is 0 and the log-sum-exp
    /// `-inf`.
    ///
    /// # Safety
    /// - The block of every page that the spans refer to lies in its arena, which is readable and not written to during
    ///   the call.
    /// - `queries` has a readable row for every new token and query head, `out` a writable one that overlaps nothing, and
    ///   `lse` a writable f32.
    /// - `shared` was filled for this batch: sequences that take part in a node have its pages in their first span, before
    ///   all new tokens.
    pub unsafe fn attend(&self, attention: &Attention<'_>) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.attend_to(&attention.kv, attention.queries, attention.results(), None) }
    }

    /// As [`attend`](Self::attend), but over the tokens before `ends[i]` of sequence i, and leaves partial results from which
    /// the rest can be continued: floats `[sum(new_tokens), num_q_heads, v_head_dim + 2]`. With scores in base 2, these are
    /// the sum of the values weighted by 2^(score - base), that base, which no score is far above, and the sum of the
    /// weights. A query that sees nothing has 0, `-inf` and 0. Blocks without pages before the ends are not read.
    ///
    /// # Safety
    /// As for `attend`, of the pages before the ends; `parts` has the floats, which overlap nothing.
    pub unsafe fn attend_before(
        &self,
        kv: &PagedKv<'_>,
        queries: Rows,
        ends: &[usize],
        parts: *mut f32,
    ) -> Result<(), Error> {
        assert_eq!(ends.len(), kv.sequences.len(), "an end for each sequence");
        // SAFETY: as the caller promises.
        unsafe { self.attend_to(kv, queries, Target::Parts { ends, parts }, None) }
    }

    /// As [`attend`](Self::attend) of one sequence, but over some of its runs only, as
    /// [`run_count`](pagoda_core::work::run_count) counts them: blocks without pages of these runs are not read. Results pass
    /// from call to call in `carried`; the call with the last run writes them. With `deterministic` they have the same bits
    /// as those of `attend`. Runs of a query row have results of their own until they are merged, for many rows every few
    /// runs.
    ///
    /// # Safety
    /// As for `attend`, of the blocks of these runs. Calls for the runs before have been made in order, with the same
    /// arguments except for where pages lie.
    pub unsafe fn attend_runs(
        &self,
        attention: &Attention<'_>,
        runs: Range<usize>,
        carried: &mut Carried,
    ) -> Result<(), Error> {
        let [sequence] = attention.kv.sequences else { panic!("one sequence, not a batch") };
        if runs.is_empty() {
            return Ok(());
        }
        let layer = attention.kv.layer;
        let rows = sequence.new_tokens as usize * layer.num_q_heads as usize;
        let at_once = (PARTS_FLOATS / state_floats(rows.max(1), layer)).max(1);
        let of = work::run_count(sequence.spans);
        for start in runs.clone().step_by(at_once) {
            let part = Part { runs: start..runs.end.min(start + at_once), of, carried: &mut *carried };
            // SAFETY: as the caller promises.
            unsafe { self.attend_to(&attention.kv, attention.queries, attention.results(), Some(part))? };
        }
        Ok(())
    }

    unsafe fn attend_to(
        &self,
        kv: &PagedKv<'_>,
        queries: Rows,
        target: Target<'_>,
        part: Option<Part<'_>>,
    ) -> Result<(), Error> {
        check(kv)?;
        if let Target::Results { sinks: Some(sinks), .. } = target {
            assert_eq!(sinks.len(), kv.layer.num_q_heads as usize, "a sink for each query head");
        }
        if let Target::Results { shared: Some(shared), .. } = target {
            assert!(shared.is_of(kv.sequences.len()), "pages in common of another batch");
        }
        // SAFETY: as the caller promises; layer and tables are checked, and the kernels are for this CPU.
        unsafe { attend::attend(self, kv, queries, target, part) };
        Ok(())
    }
}

/// Whether the kernels can do this call.
fn check(kv: &PagedKv<'_>) -> Result<(), Error> {
    kv.layer.check()?;
    for (i, table) in kv.sequences.iter().enumerate() {
        table.check(i, kv.layer.page_size)?;
    }
    Ok(())
}
