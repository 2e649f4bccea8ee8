//! Attention over pages: running the items of a plan.

use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pagoda_core::layout::LayerGeometry;
use pagoda_core::table::Sight;
use pagoda_core::work::{Piece, TILE};

use self::batch::cells;
use self::pass::Pass;
use crate::backend::Backend;
use crate::common::Shared;
use crate::integers::{QueryStep, STEP};
use crate::kernel::ALIGN;
use crate::layer::{Layer, PagedKv};
use crate::plan::{Group, Item, Plan, Scope, state_floats, value_stride};
use crate::rows::{Element, Rows, RowsMut};
use crate::simd::{Kernels, Many, RowKernels, asks_in_order};
use crate::softmax::Fold;

mod batch;
mod pass;

/// Memory for floats, aligned to vectors, that only grows.
#[derive(Default)]
pub(crate) struct Floats(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read as floats")] [f32; ALIGN]);

impl Floats {
    /// The first `n` floats, whatever they hold.
    pub(crate) fn take(&mut self, n: usize) -> &mut [f32] {
        let lines = n.div_ceil(ALIGN);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; ALIGN]));
        }
        // SAFETY: a line is an array of floats without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), n) }
    }
}

/// Scratch memory of one thread.
#[derive(Default)]
struct Worker {
    /// Query rows, scaled and rotated.
    queries: Floats,
    /// The same as integers.
    codes: Vec<QueryStep>,
    /// Scores, then weights, of one head.
    scores: Floats,
    /// What is added to the scores of a query row.
    biases: Floats,
    /// One factor a query row.
    decay: Floats,
    /// The result so far.
    state: Floats,
    /// The result of the current run, if it is not the first.
    run: Floats,
    /// Rows of a tile as floats or codes; or derived keys, and queries turned for them.
    unpacked: Floats,
    /// Cosines and sines.
    angles: Vec<(f32, f32)>,
}

/// The memory of a backend, grown to what its calls needed.
#[derive(Default)]
pub(crate) struct Scratch {
    plan: Plan,
    parts: Floats,
    /// The results over common pages.
    kept: Floats,
    workers: Vec<Mutex<Worker>>,
}

/// Results of a batch that is attended to part by part, carried from one part to the next. Grows as needed.
#[derive(Default)]
pub struct Carried(Floats);

/// The runs of a batch to attend to, of how many, and the results of earlier ones.
pub(crate) struct Part<'a> {
    pub(crate) runs: Range<usize>,
    pub(crate) of: usize,
    pub(crate) carried: &'a mut Carried,
}

/// One call of attention: what it reads, and where results are written.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The pages.
    pub kv: PagedKv<'a>,
    /// The queries of the new tokens, `[sum(new_tokens), num_q_heads, head_dim]`.
    pub queries: Rows,
    /// A logit for each query head, which joins the sums of weights that outputs are divided by, but not the log-sum-exps.
    pub sinks: Option<&'a [f32]>,
    /// The results, `[sum(new_tokens), num_q_heads, v_head_dim]`.
    pub out: RowsMut,
    /// Natural-log-sum-exps, `[sum(new_tokens), num_q_heads]`.
    pub lse: Option<*mut f32>,
    /// Pages that sequences have in common, which are read once. Deterministic backends and layers with a window ignore it.
    pub shared: Option<&'a Shared>,
}

impl<'a> Attention<'a> {
    /// The same call for some sequences of the batch.
    pub fn part(self, sequences: Range<usize>) -> Self {
        let tables = self.kv.sequences;
        let token: usize = tables[..sequences.start].iter().map(|table| table.new_tokens as usize).sum();
        let heads = self.kv.layer.num_q_heads as usize;
        Self {
            kv: PagedKv { sequences: &tables[sequences], ..self.kv },
            queries: self.queries.skip(token),
            sinks: self.sinks,
            out: self.out.skip(token),
            lse: self.lse.map(|lse| lse.wrapping_add(token * heads)),
            shared: None,
        }
    }

    pub(crate) fn results(&self) -> Target<'a> {
        Target::Results { sinks: self.sinks, out: self.out, lse: self.lse, shared: self.shared }
    }
}

/// Where the results of a batch are written.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a> {
    /// Results, and log-sum-exps. `sinks`: a logit for each query head; `shared`: pages in common.
    Results { sinks: Option<&'a [f32]>, out: RowsMut, lse: Option<*mut f32>, shared: Option<&'a Shared> },
    /// Parts of results, over the tokens before `ends` of each sequence.
    Parts { ends: &'a [usize], parts: *mut f32 },
}

/// The values of some query rows, what their weights are relative to, and the sums of the weights.
struct State<'a> {
    values: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<'a> State<'a> {
    fn new(floats: &'a mut [f32], rows: usize, layer: &Layer) -> Self {
        let (values, rest) = floats.split_at_mut(rows * value_stride(layer));
        let (max, sum) = rest.split_at_mut(rows.next_multiple_of(ALIGN));
        Self { values, max: &mut max[..rows], sum: &mut sum[..rows] }
    }

    /// Nothing seen yet.
    fn reset(&mut self) {
        self.values.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }
}

/// One call of `attend`.
struct Call<'a> {
    kernels: &'static Kernels,
    /// The kernels for rows of K, and of V.
    keys: &'static RowKernels,
    values: &'static RowKernels,
    /// How tiles of K, and of V, are read if a head has many query rows.
    many: [Many; 2],
    /// See [`Chunk::in_order`]: of K, and of V.
    in_order: [bool; 2],
    deterministic: bool,
    kv: PagedKv<'a>,
    queries: Rows,
    target: Target<'a>,
    scope: Scope<'a>,
    plan: &'a Plan,
    /// The results of queries over common pages in earlier passes: values, maximum and sum for each query and head.
    kept: *mut f32,
    /// The partial results, disjoint by item.
    parts: *mut f32,
    /// Where the results of a part go, disjoint by group.
    carried: Option<*mut f32>,
    next: AtomicUsize,
}

// SAFETY: the addresses are shared by the threads of the pool; items write disjoint rows and partial results, and a
// partial result is read after the last item of its group has been counted (`Group::pending`), what is kept in a later pass.
unsafe impl Sync for Call<'_> {}

/// See [`Backend::attend`](crate::Backend::attend).
///
/// # Safety
/// As there; and the layer and the tables are checked, and the kernels are for this CPU.
pub(crate) unsafe fn attend(
    backend: &Backend,
    kv: &PagedKv<'_>,
    queries: Rows,
    target: Target<'_>,
    mut part: Option<Part<'_>>,
) {
    let &Backend { ref pool, kernels, deterministic, ref scratch, .. } = backend;
    // The next call overwrites whatever a panic has left in the scratch memory.
    let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
    let Scratch { plan, parts, kept, workers } = &mut *scratch;
    if workers.is_empty() {
        workers.resize_with(pool.threads(), Mutex::default);
    }
    let (first, last) =
        part.as_ref().map_or((false, false), |part| (part.runs.start == 0, part.runs.end == part.of));
    let layer = kv.layer;
    let shared = match target {
        Target::Results { shared, .. } if !deterministic && layer.window.is_none() && part.is_none() => {
            shared
        }
        _ => None,
    };
    let levels = shared.map_or(0, Shared::levels);
    let rows: usize =
        if levels == 0 { 0 } else { kv.sequences.iter().map(|table| table.new_tokens as usize).sum() };
    let kept = kept.take(rows * layer.num_q_heads as usize * kept_floats(layer)).as_mut_ptr();
    let LayerGeometry { head_dim, v_head_dim, k_format, .. } = layer.geometry;
    let v_format = layer.geometry.v_rows();
    let keys = match layer.derived {
        Some(_) => kernels.float_rows(k_format),
        None => kernels.rows(k_format, head_dim, head_dim, layer.page_size),
    };
    let values = kernels.rows(v_format, v_head_dim, layer.geometry.v_row_dim(), layer.page_size);
    let many = [
        if layer.derived.is_some() { Many::AsFew } else { keys.many.with_same_bits(deterministic) },
        values.many.with_same_bits(deterministic),
    ];
    let in_order =
        [k_format, v_format].map(|format| layer.page_size as usize >= TILE && asks_in_order(format));
    // Common pages, level by level, then each sequence's own.
    for level in 0..=levels {
        let scope = match (target, shared) {
            (Target::Parts { ends, .. }, _) => Scope::Before(ends),
            (_, Some(shared)) if level < levels => Scope::Common(shared, level),
            (_, Some(shared)) if levels > 0 => Scope::From(&shared.ends),
            _ => Scope::All,
        };
        plan.make(kv, scope, pool.threads(), deterministic, part.as_ref().map(|part| &part.runs));
        let call = Call {
            kernels,
            keys,
            values,
            many,
            in_order,
            deterministic,
            kv: *kv,
            queries,
            target,
            scope,
            plan,
            kept,
            parts: parts.take(plan.floats).as_mut_ptr(),
            carried: part.as_mut().map(|part| part.carried.0.take(plan.carried).as_mut_ptr()),
            next: AtomicUsize::new(0),
        };
        if first {
            call.plan.groups.iter().for_each(|group| call.carried_of(group).reset());
        }
        pool.run(plan.workers.min(plan.items.len()), &|index| {
            let mut worker = workers[index].lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(item) = call.plan.items.get(call.next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: as the caller promises.
                unsafe { call.item(item, &mut worker) };
            }
        });
        if last {
            // SAFETY: as the caller promises; groups have disjoint rows.
            call.plan
                .groups
                .iter()
                .for_each(|group| unsafe { call.finish(group, &mut call.carried_of(group)) });
        }
    }
}

/// Floats of the kept result of one query and head.
fn kept_floats(layer: &Layer) -> usize {
    value_stride(layer) + 2
}

impl Call<'_> {
    /// Computes an item, and the output of its group if it is the last.
    unsafe fn item(&self, item: &Item, worker: &mut Worker) {
        let (group, layer) = (&self.plan.groups[item.group], self.kv.layer);
        let (rows, floats) = self.size(group);
        let Worker { queries, codes, scores, biases, decay, state, run, unpacked, angles } = worker;
        let is_part = group.parts > 1 || self.carried.is_some();
        let mut state = if is_part {
            // SAFETY: it is this item's.
            unsafe { self.part(group, item.part) }
        } else {
            State::new(state.take(floats), rows, layer)
        };
        state.reset();
        let mut run = State::new(run.take(floats), rows, layer);
        let dim = layer.geometry.head_dim as usize;
        if self.keys.quantise.is_some() && codes.len() < rows * (dim / STEP) {
            codes.resize(rows * (dim / STEP), QueryStep::default());
        }
        let head_rows = group.queries * layer.group();
        let mut pass = Pass {
            call: self,
            group,
            queries: queries.take(rows * dim.next_multiple_of(ALIGN)),
            codes,
            scores: scores.take(cells(group.queries) * head_rows * TILE),
            biases: biases.take(rows),
            decay: decay.take(cells(group.queries) * head_rows),
            unpacked: unpacked.take(self.unpacked(head_rows)),
        };
        // SAFETY: as the caller promises.
        unsafe { pass.runs(&item.tiles, &mut state, &mut run, angles) };
        if is_part {
            if group.pending.fetch_sub(1, Ordering::AcqRel) > 1 {
                return;
            }
            // SAFETY: every item of the group is finished, and nobody else sees that it is the last.
            state = unsafe { self.merged(group) };
        }
        if group.continues {
            // SAFETY: the pass before has kept all of it.
            unsafe { self.recall(group, &mut run) };
            self.fold(&mut run, &state);
            state = run;
        }
        // SAFETY: as the caller promises; groups have disjoint rows.
        unsafe {
            match self.scope {
                Scope::Common(..) => self.keep(group, &state),
                _ if self.carried.is_none() => self.finish(group, &mut state),
                _ => {}
            }
        }
    }

    /// Where the result of each row of a group is kept.
    fn kept(&self, group: &Group) -> impl Iterator<Item = *mut f32> {
        let (layer, kept) = (self.kv.layer, self.kept);
        let place = move |token: usize, head: usize| token * layer.num_q_heads as usize + head;
        self.rows(group)
            .map(move |(_, token, head)| kept.wrapping_add(place(token, head) * kept_floats(layer)))
    }

    /// Keeps the result of a group for the next pass.
    ///
    /// # Safety
    /// Nobody else has the same rows.
    unsafe fn keep(&self, group: &Group, state: &State<'_>) {
        let stride = value_stride(self.kv.layer);
        for (r, kept) in self.kept(group).enumerate() {
            // SAFETY: as the caller promises; there is room for every query and head.
            unsafe {
                kept.copy_from_nonoverlapping(state.values[r * stride..][..stride].as_ptr(), stride);
                kept.add(stride).copy_from_nonoverlapping([state.max[r], state.sum[r]].as_ptr(), 2);
            }
        }
    }

    /// Reads back what was kept of a group.
    ///
    /// # Safety
    /// All of it was kept.
    unsafe fn recall(&self, group: &Group, state: &mut State<'_>) {
        let stride = value_stride(self.kv.layer);
        for (r, kept) in self.kept(group).enumerate() {
            // SAFETY: as the caller promises.
            unsafe {
                state.values[r * stride..][..stride].as_mut_ptr().copy_from_nonoverlapping(kept, stride);
                (state.max[r], state.sum[r]) = (*kept.add(stride), *kept.add(stride + 1));
            }
        }
    }

    /// How this many query rows of a head read K, and V.
    fn many(&self, rows: usize) -> [Many; 2] {
        self.many.map(|many| many.of(rows))
    }

    /// Floats of scratch memory for a tile with this many query rows of a head.
    fn unpacked(&self, rows: usize) -> usize {
        let LayerGeometry { head_dim, v_head_dim, .. } = self.kv.layer.geometry;
        let derived = self.kv.layer.derived.as_ref().map_or(0, |derived| derived.scratch(rows));
        let [keys, values] = self.many(rows);
        derived.max(keys.scratch(head_dim)).max(values.scratch(v_head_dim))
    }

    /// Query rows of a group, and floats of their state.
    fn size(&self, group: &Group) -> (usize, usize) {
        let rows = group.queries * self.kv.layer.group() * group.heads.len();
        (rows, state_floats(rows, self.kv.layer))
    }

    /// The carried result of a group, in a call for a part.
    fn carried_of(&self, group: &Group) -> State<'_> {
        let (rows, floats) = self.size(group);
        let first = self.carried.expect("a call for a part").wrapping_add(group.carried);
        // SAFETY: groups have disjoint results, and one thread at a time uses that of a group: the caller's, and in between
        // the one that finishes the group's last item.
        State::new(unsafe { std::slice::from_raw_parts_mut(first, floats) }, rows, self.kv.layer)
    }

    /// A partial result of a group.
    ///
    /// # Safety
    /// Nobody else has it.
    unsafe fn part(&self, group: &Group, part: usize) -> State<'_> {
        let (rows, floats) = self.size(group);
        let first = self.parts.wrapping_add(group.offset + part * floats);
        // SAFETY: the parts of all items are disjoint and lie within `parts`.
        State::new(unsafe { std::slice::from_raw_parts_mut(first, floats) }, rows, self.kv.layer)
    }

    /// Merges the partial results of a group in page order, after what is carried.
    ///
    /// # Safety
    /// Nobody else has them.
    unsafe fn merged(&self, group: &Group) -> State<'_> {
        // SAFETY: as the caller promises.
        let mut parts = (0..group.parts).map(|part| unsafe { self.part(group, part) });
        let first = if self.carried.is_some() { Some(self.carried_of(group)) } else { parts.next() };
        let mut whole = first.expect("an item has a part");
        parts.for_each(|part| self.fold(&mut whole, &part));
        whole
    }

    /// Merges a later partial result into an earlier one.
    fn fold(&self, into: &mut State<'_>, later: &State<'_>) {
        let mut args = Fold {
            stride: value_stride(self.kv.layer),
            values: into.values,
            max: into.max,
            sum: into.sum,
            later_values: later.values,
            later_max: later.max,
            later_sum: later.sum,
        };
        // SAFETY: the kernels are for this CPU, and both states have the same rows.
        unsafe { (self.kernels.fold)(&mut args) }
    }

    /// The rows of a tile that a query of a group sees.
    fn seen(&self, group: &Group, piece: &Piece<'_>, tile: usize, query: usize) -> Range<usize> {
        let first = piece.origin + (tile * TILE) as isize;
        let stored = piece.rows.start.saturating_sub(tile * TILE)..(piece.rows.end - tile * TILE).min(TILE);
        let end = (group.position + query + 1) as isize - first;
        let high = end.min(stored.end as isize);
        let window = self.kv.layer.window.filter(|_| piece.span.sight == Sight::Window);
        let start = window.map_or(isize::MIN, |window| end - window as isize);
        start.max(stored.start as isize) as usize..high.max(0) as usize
    }

    /// The query rows of a group for one head, with the rows of a tile that they see: query by query, or together if all see
    /// the same. Queries that see none are left out.
    fn sights(
        &self,
        group: &Group,
        piece: &Piece<'_>,
        tile: usize,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let queries = group.queries;
        let seen = move |query| self.seen(group, piece, tile, query);
        // At the diagonal every query has its own rows, so that later tokens do not even count as 0.
        let step = if seen(0) == seen(queries - 1) { queries } else { 1 };
        let size = self.kv.layer.group();
        let sights =
            (0..queries).step_by(step).map(move |query| (query * size..(query + step) * size, seen(query)));
        sights.filter(|(_, seen)| !seen.is_empty())
    }

    /// For each row of a group, its query, its row in the batch and its query head. K/V heads are outermost, then queries,
    /// then the query heads that share the K/V head.
    fn rows(&self, group: &Group) -> impl Iterator<Item = (usize, usize, usize)> {
        let (first, queries, size) = (group.token, group.queries, self.kv.layer.group());
        let listed = if let Scope::Common(shared, _) = self.scope { Some(&shared.rows[..]) } else { None };
        let token = move |query: usize| listed.map_or(first + query, |rows| rows[first + query] as usize);
        group.heads.clone().flat_map(move |kv_head| {
            (0..queries)
                .flat_map(move |query| (0..size).map(move |i| (query, token(query), kv_head * size + i)))
        })
    }

    /// Writes the results of a group.
    unsafe fn finish(&self, group: &Group, state: &mut State<'_>) {
        let stride = value_stride(self.kv.layer);
        let dim = self.kv.layer.geometry.v_head_dim as usize;
        let heads = self.kv.layer.num_q_heads as usize;
        for (r, (_, token, head)) in self.rows(group).enumerate() {
            let values = &mut state.values[r * stride..][..dim];
            let (max, sum) = (state.max[r], state.sum[r]);
            if let Target::Results { sinks, .. } = self.target
                // A row that saw nothing has values of 0 already.
                && sum != 0.0
            {
                let inverse = 1.0 / (sum + sinks.map_or(0.0, |sinks| sink_weight(sinks[head], max)));
                // SAFETY: the kernels are for this CPU.
                unsafe { (self.kernels.scale)(values, inverse) };
            }
            if self.kv.layer.transform.rotate_v {
                // SAFETY: the kernels are for this CPU.
                unsafe { (self.kernels.rotate_back)(values) };
            }
            match self.target {
                Target::Results { out, lse, .. } => {
                    let store = self.kernels.convert(Element::F32, out.0.element);
                    // SAFETY: `out` has a row for every query and head, and `lse` a number.
                    unsafe {
                        store(values.as_ptr().cast(), out.row(token, head), dim);
                        if let Some(lse) = lse {
                            lse.add(token * heads + head).write_unaligned(log_sum_exp(max, sum));
                        }
                    }
                }
                Target::Parts { parts, .. } => {
                    // SAFETY: `parts` has so many floats for every query and head.
                    unsafe {
                        let part = parts.add((token * heads + head) * (dim + 2));
                        part.copy_from_nonoverlapping(values.as_ptr(), dim);
                        part.add(dim).copy_from_nonoverlapping([max, sum].as_ptr(), 2);
                    }
                }
            }
        }
    }
}

/// The natural logarithm of a sum of weights that are relative to `2^max`.
fn log_sum_exp(max: f32, sum: f32) -> f32 {
    if sum == 0.0 { f32::NEG_INFINITY } else { (f64::from(max) * LN_2 + f64::from(sum.ln())) as f32 }
}

/// The weight of a sink, relative to `2^max` like the others.
fn sink_weight(logit: f32, max: f32) -> f32 {
    (f64::from(logit) * LOG2_E - f64::from(max)).exp2() as f32
}
