//! Attention over pages: running the items of a plan.

use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pagoda_core::layout::{LayerGeometry, Plane};
use pagoda_core::table::{Sight, SpanView};
use pagoda_core::work::{Piece, RUN_TILES, TILE, pieces};

use crate::backend::Backend;
use crate::common::Shared;
use crate::decoded;
use crate::integers::{QueryStep, STEP};
use crate::kernel::{ALIGN, Accumulate, Chunk, Fold, Lines, PIECES, RowSize, STREAMS, Score, Softmax};
use crate::layer::{Layer, PagedKv};
use crate::plan::{Group, Item, Plan, Scope, state_floats, value_stride};
use crate::rows::{Element, Rows, RowsMut};
use crate::simd::{Kernels, Many, RowKernels, asks_in_order};

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

/// What one thread computes in.
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
    /// That of the present run, if it is not the first.
    run: Floats,
    /// Rows of a tile as floats or codes, or keys that are not stored and queries turned for them.
    unpacked: Floats,
    /// Cosines and sines.
    angles: Vec<(f32, f32)>,
}

/// The memory of a backend, grown to what its calls needed.
#[derive(Default)]
pub(crate) struct Scratch {
    plan: Plan,
    parts: Floats,
    /// What pages in common have come to.
    kept: Floats,
    workers: Vec<Mutex<Worker>>,
}

/// Results of a batch that is gone over part by part, on their way from one part to the next. Grows to what was needed.
#[derive(Default)]
pub struct Carried(Floats);

/// The runs of a batch to go over, of how many, and what earlier ones came to.
pub(crate) struct Part<'a> {
    pub(crate) runs: Range<usize>,
    pub(crate) of: usize,
    pub(crate) carried: &'a mut Carried,
}

/// One call of attention: what it goes over, and where results are written.
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
    /// Pages that sequences have in common, which are gone over once. Neither deterministic backends nor layers with a window look
    /// at it.
    pub shared: Option<&'a Shared>,
}

impl<'a> Attention<'a> {
    /// That of some sequences of the batch.
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

/// Where what a batch comes to is written.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a> {
    /// Results, and log-sum-exps. `sinks`: a logit for each query head; `shared`: pages in common.
    Results { sinks: Option<&'a [f32]>, out: RowsMut, lse: Option<*mut f32>, shared: Option<&'a Shared> },
    /// Parts of results, over the tokens before `ends` of each sequence.
    Parts { ends: &'a [usize], parts: *mut f32 },
}

/// The values of some query rows, what their weights are relative to, and the sums of these.
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
    /// Those that read rows of K, and of V.
    keys: &'static RowKernels,
    values: &'static RowKernels,
    /// How tiles of K, and of V, are taken by many query rows of a head.
    many: [Many; 2],
    /// See [`Chunk::in_order`]: of K, and of V.
    in_order: [bool; 2],
    deterministic: bool,
    kv: PagedKv<'a>,
    queries: Rows,
    target: Target<'a>,
    scope: Scope<'a>,
    plan: &'a Plan,
    /// What queries have come to in passes over pages in common: values, maximum and sum of each query and head.
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
    // A panic left nothing in the scratch memory that the next call does not overwrite.
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
    // Pages in common, level by level, then what is each sequence's own.
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

/// Floats that are kept of what a query and head have come to.
fn kept_floats(layer: &Layer) -> usize {
    value_stride(layer) + 2
}

/// Tiles, of whatever heads, that are scored before the first of them is weighed: one long stream of K and one of V is
/// read faster than short ones by turns.
const CELLS: usize = 8;

/// A batch and those after it that are asked for meanwhile: with two cells each, they are as many as streams.
const BATCHES: usize = 3;

/// Cells of a batch: fewer where there are more queries, so that scores stay in the cache.
fn cells(queries: usize) -> usize {
    (CELLS / queries).max(1)
}

/// The blocks that a tile lies in, and the row in them at which it begins.
#[derive(Clone, Copy)]
struct TilePages {
    blocks: [*const u8; PIECES],
    first: usize,
}

impl TilePages {
    const NONE: Self = Self { blocks: [std::ptr::null(); PIECES], first: 0 };

    /// Where the rows of a head begin, and their scales.
    fn begin(&self, plane: &Plane, head: usize) -> [usize; 2] {
        [&plane.rows, &plane.scales].map(|strip| {
            strip.offset as usize + head * strip.head_stride as usize + self.first * strip.row_stride as usize
        })
    }
}

/// A tile of a head.
#[derive(Clone, Copy)]
struct Cell {
    head: usize,
    tile: usize,
    /// Where its rows of K and V begin in its blocks, and their scales.
    keys: [usize; 2],
    values: [usize; 2],
}

/// Tiles of one page and some heads whose K is read in one go, and then their V.
struct Batch {
    tiles: Range<usize>,
    heads: Range<usize>,
    /// Of each tile.
    pages: [TilePages; CELLS],
    /// Tiles inside heads: so they lie in memory.
    cells: [Cell; CELLS],
}

impl Batch {
    const NONE: Self = Self {
        tiles: 0..0,
        heads: 0..0,
        pages: [TilePages::NONE; CELLS],
        cells: [Cell { head: 0, tile: 0, keys: [0; 2], values: [0; 2] }; CELLS],
    };

    fn cells(&self) -> &[Cell] {
        &self.cells[..self.heads.len() * self.tiles.len()]
    }

    /// Where rows of a cell lie that begin there.
    fn lines(&self, cell: &Cell, [rows, scales]: [usize; 2]) -> Lines<'_> {
        Lines { blocks: &self.pages[cell.tile - self.tiles.start].blocks, rows, scales }
    }
}

/// Elements and bytes of the rows of a plane.
fn row_size(plane: &Plane, dim: u32) -> RowSize {
    RowSize {
        dim: dim as usize,
        bytes: plane.rows.row_stride as usize,
        scale_bytes: plane.scales.row_stride as usize,
    }
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

    /// What was kept of a group.
    ///
    /// # Safety
    /// All of it was.
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

    /// How so many query rows of a head take K, and V.
    fn many(&self, rows: usize) -> [Many; 2] {
        self.many.map(|many| many.of(rows))
    }

    /// Floats that a tile becomes for so many query rows of a head.
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

    /// The result of a group so far, where there are parts.
    fn carried_of(&self, group: &Group) -> State<'_> {
        let (rows, floats) = self.size(group);
        let first = self.carried.expect("a call for a part").wrapping_add(group.carried);
        // SAFETY: groups have disjoint results, and one thread at a time comes to that of a group: the caller's, and in
        // between whoever finishes the group's last item.
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

    /// The partial results of a group in page order, behind what is carried.
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

    /// The query rows of a group for one head, query by query, or together if they see the same rows of a tile; and those that they
    /// see, if there are any.
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

    /// Which query of a group it is, the batch row and the query head of every row of it: K/V heads outside, then queries, then the
    /// query heads that share the K/V head.
    fn rows(&self, group: &Group) -> impl Iterator<Item = (usize, usize, usize)> {
        let (first, queries, size) = (group.token, group.queries, self.kv.layer.group());
        let listed = if let Scope::Common(shared, _) = self.scope { Some(&shared.rows[..]) } else { None };
        let token = move |query: usize| listed.map_or(first + query, |rows| rows[first + query] as usize);
        group.heads.clone().flat_map(move |kv_head| {
            (0..queries)
                .flat_map(move |query| (0..size).map(move |i| (query, token(query), kv_head * size + i)))
        })
    }

    /// Writes the rows of a group.
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
                    let store = self.kernels.convert(Element::F32, out.element);
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

/// The weight of a sink beside weights that are relative to `2^max`.
fn sink_weight(logit: f32, max: f32) -> f32 {
    (f64::from(logit) * LOG2_E - f64::from(max)).exp2() as f32
}

/// The query rows of an item on their way over its tiles.
struct Pass<'a> {
    call: &'a Call<'a>,
    group: &'a Group,
    queries: &'a mut [f32],
    codes: &'a mut [QueryStep],
    scores: &'a mut [f32],
    biases: &'a mut [f32],
    decay: &'a mut [f32],
    unpacked: &'a mut [f32],
}

impl Pass<'_> {
    /// Loads the queries, rotated back for a span and by `more` positions, and scaled for base-2 exponentials.
    unsafe fn prepare(&mut self, span: &SpanView, more: u64, angles: &mut Vec<(f32, f32)>) {
        let Call { kernels, queries: source, kv: PagedKv { layer, .. }, .. } = *self.call;
        let dim = layer.geometry.head_dim as usize;
        let load = kernels.convert(source.element, Element::F32);
        // The base of exponentials is 2; a cap multiplies with the logarithm itself.
        let factor = layer.softcap.map_or(layer.scale * LOG2_E as f32, |cap| layer.scale / cap);
        let mut offset = 0;
        let rows = self.queries.chunks_exact_mut(dim.next_multiple_of(ALIGN));
        let rows = rows.zip(&mut *self.biases);
        let mut codes = self.codes.chunks_exact_mut((dim / STEP).max(1));
        let [keys, _] = self.call.many(self.group.queries * layer.group());
        let quantise = self.call.keys.quantise.filter(|_| !matches!(keys, Many::Decoded(_)));
        for ((row, bias), (query, token, head)) in rows.zip(self.call.rows(self.group)) {
            // SAFETY: `queries` has a row for every query and head.
            unsafe { load(source.row(token, head), row.as_mut_ptr().cast(), dim) };
            row[dim..].fill(0.0);
            if let Some(rope) = &layer.rope {
                let wanted = span.offset_for(self.group.position + query) + more;
                if wanted != offset {
                    offset = wanted;
                    rope.angles(offset, angles);
                }
                if offset != 0 {
                    rope.rotate_back(angles, row);
                }
            }
            let center = layer.transform.center(head / layer.group(), dim);
            // SAFETY: the kernels are for this CPU.
            unsafe {
                (kernels.scale)(row, factor);
                *bias = center.map_or(0.0, |center| (kernels.product)(row, center));
                if layer.transform.rotate_k {
                    (kernels.rotate)(&mut row[..dim]);
                }
                if let Some(quantise) = quantise {
                    quantise(&row[..dim], codes.next().expect("integers of every row"));
                }
            }
        }
    }

    /// Goes over tiles, counted over all pieces of the group, run by run; `run` is for all runs but the first. Where bits need not
    /// be the same, short pieces share one.
    unsafe fn runs<'s>(
        &mut self,
        tiles: &Range<usize>,
        state: &mut State<'s>,
        run: &mut State<'s>,
        angles: &mut Vec<(f32, f32)>,
    ) {
        let (call, layer) = (self.call, self.call.kv.layer);
        let (mut prepared, mut counted) = (None, 0);
        // Runs so far, the present one included, and the tiles that it has.
        let (mut runs, mut has) = (0, 0);
        let spans = call.kv.sequences[self.group.sequence].spans;
        for piece in pieces(spans, self.group.visible.clone()) {
            let base = counted;
            counted += piece.tiles.len();
            let (first, last) = (tiles.start.max(base), tiles.end.min(counted));
            if first >= last {
                continue;
            }
            let mut tiles = piece.tiles.start + first - base..piece.tiles.start + last - base;
            let from = if let Sight::Trailing { from } = piece.span.sight { Some(from) } else { None };
            while !tiles.is_empty() {
                // Keys that are derived are turned by their place in the run.
                let derived = layer.derived.is_some();
                let run_position = if derived { piece.span.run_position(tiles.start / RUN_TILES) } else { 0 };
                let turn = layer.rope.as_ref().map(|_| (piece.span.offset, from, run_position));
                if prepared != Some(turn) {
                    prepared = Some(turn);
                    // SAFETY: as the caller promises.
                    unsafe { self.prepare(piece.span, run_position, angles) };
                }
                // Also where bits need not be the same: many small terms would be lost beside one large sum.
                let end = tiles.end.min((tiles.start / RUN_TILES + 1) * RUN_TILES);
                if runs == 0 || call.deterministic || has + end - tiles.start > RUN_TILES {
                    if runs > 1 {
                        call.fold(state, run);
                    }
                    if runs > 0 {
                        run.reset();
                    }
                    (runs, has) = (runs + 1, 0);
                }
                has += end - tiles.start;
                let into = if runs == 1 { &mut *state } else { &mut *run };
                // SAFETY: as the caller promises.
                unsafe { self.tiles(&piece, tiles.start..end, into) };
                tiles.start = end;
            }
        }
        if runs > 1 {
            call.fold(state, run);
        }
    }

    /// Goes over a run of tiles in batches, pages outside: the K of a batch is one stream, then its V is.
    unsafe fn tiles(&mut self, piece: &Piece<'_>, tiles: Range<usize>, state: &mut State<'_>) {
        let mut batches = [const { Batch::NONE }; BATCHES];
        let [mut here, mut next, mut later] = batches.each_mut();
        self.fill(here, piece, tiles.clone(), self.group.heads.start);
        self.follow(next, here, piece, tiles.end);
        while !here.tiles.is_empty() {
            self.follow(later, next, piece, tiles.end);
            // SAFETY: as the caller promises.
            unsafe { self.batch(piece, [here, next, later], state) };
            (here, next, later) = (next, later, here);
        }
    }

    /// What comes after a batch: nothing, if it was the last.
    fn follow(&self, batch: &mut Batch, before: &Batch, piece: &Piece<'_>, end: usize) {
        let heads = &self.group.heads;
        if before.heads.end < heads.end {
            self.fill(batch, piece, before.tiles.start..end, before.heads.end);
        } else if before.tiles.end < end {
            self.fill(batch, piece, before.tiles.end..end, heads.start);
        } else {
            (batch.tiles, batch.heads) = (end..end, heads.end..heads.end);
        }
    }

    /// As many of the tiles, all of one page, and of the heads from `head` on as a batch takes.
    fn fill(&self, batch: &mut Batch, piece: &Piece<'_>, tiles: Range<usize>, head: usize) {
        let page_tiles = (self.call.kv.layer.page_size as usize / TILE).max(1);
        let cells = cells(self.group.queries);
        let end = tiles.end.min((tiles.start / page_tiles + 1) * page_tiles).min(tiles.start + cells);
        batch.tiles = tiles.start..end;
        batch.heads = head..self.group.heads.end.min(head + (cells / batch.tiles.len()).max(1));
        for (pages, tile) in batch.pages.iter_mut().zip(batch.tiles.clone()) {
            *pages = self.pages(piece, tile);
        }
        let layout = &self.call.kv.layer.layout;
        let mut cells = batch.cells.iter_mut();
        for head in batch.heads.clone() {
            for (pages, tile) in batch.pages.iter().zip(batch.tiles.clone()) {
                if let Some(cell) = cells.next() {
                    let (keys, values) = (pages.begin(&layout.k, head), pages.begin(&layout.v, head));
                    *cell = Cell { head, tile, keys, values };
                }
            }
        }
    }

    /// The first of some batches that follow each other.
    unsafe fn batch(&mut self, piece: &Piece<'_>, batches: [&Batch; BATCHES], state: &mut State<'_>) {
        let Call { in_order: [keys_in_order, values_in_order], kv: PagedKv { layer, .. }, .. } = *self.call;
        let piece_shift = TILE.min(layer.page_size as usize).ilog2();
        let batch = batches[0];
        let cells = batch.cells();
        // In the order in which memory is read; values that are part of K are read with it.
        let mut reads = [Lines::NOWHERE; 2 * CELLS + STREAMS];
        let mut last = Lines::NOWHERE;
        let mut rest = reads[..2 * cells.len() + STREAMS].iter_mut();
        let mut push = |lines| {
            last = lines;
            if let Some(next) = rest.next() {
                *next = lines;
            }
        };
        for batch in batches {
            batch.cells().iter().for_each(|cell| push(batch.lines(cell, cell.keys)));
            if layer.geometry.v_format.is_some() {
                batch.cells().iter().for_each(|cell| push(batch.lines(cell, cell.values)));
            }
        }
        // Nothing comes after the last: it is asked for again.
        rest.for_each(|next| *next = last);
        let ahead =
            |index: usize| reads[index + 1..].first_chunk().expect("as many as streams come after it");
        for (index, cell) in cells.iter().enumerate() {
            let chunk =
                Chunk { here: reads[index], ahead: ahead(index), in_order: keys_in_order, piece_shift };
            // SAFETY: as the caller promises.
            unsafe { self.score(piece, cell.tile, cell.head, index, &chunk) };
        }
        // All of them before the first value: the CPU goes on with the next while a sum is added up.
        for (index, cell) in cells.iter().enumerate() {
            // SAFETY: as the caller promises.
            unsafe { self.weigh(piece, cell.tile, cell.head, index, state) };
        }
        for (index, cell) in cells.iter().enumerate() {
            let here = batch.lines(cell, cell.values);
            let ahead = ahead(cells.len() + index);
            let chunk = Chunk { here, ahead, in_order: values_in_order, piece_shift };
            // SAFETY: as the caller promises.
            unsafe { self.accumulate(piece, cell.tile, cell.head, index, &chunk, state) };
        }
    }

    /// The blocks of a tile. Pages outside the piece are not looked up.
    fn pages(&self, piece: &Piece<'_>, tile: usize) -> TilePages {
        let PagedKv { arenas, layer, sequences } = self.call.kv;
        let page_size = layer.page_size as usize;
        let row = &sequences[self.group.sequence].row[piece.span.first_page as usize..];
        let first = tile * TILE;
        let mut pages = TilePages { first: first % page_size, ..TilePages::NONE };
        for i in 0..TILE / TILE.min(page_size) {
            let start = first + i * page_size;
            if start < piece.rows.end && start + page_size > piece.rows.start {
                let block = arenas.block(row[start / page_size], layer.block_bytes as usize);
                pages.blocks[i] = block.cast_const();
            }
        }
        pages
    }

    /// The scores of one tile and head, into cell `cell` of the scratch.
    unsafe fn score(&mut self, piece: &Piece<'_>, tile: usize, head: usize, cell: usize, keys: &Chunk<'_>) {
        let layer = self.call.kv.layer;
        let rows = self.group.queries * layer.group();
        let stride = (layer.geometry.head_dim as usize).next_multiple_of(ALIGN);
        let score = Score {
            queries: self.queries[(head - self.group.heads.start) * rows * stride..][..rows * stride]
                .as_ptr(),
            stride,
            codes: self.codes.as_ptr().wrapping_add(
                (head - self.group.heads.start) * rows * (layer.geometry.head_dim as usize / STEP),
            ),
            count: rows,
            size: row_size(&layer.layout.k, layer.geometry.head_dim),
            keys,
            low: self.call.seen(self.group, piece, tile, 0).start,
            high: self.call.seen(self.group, piece, tile, self.group.queries - 1).end,
            scores: self.scores[cell * rows * TILE..][..rows * TILE].as_mut_ptr(),
        };
        let (kernels, format) = (self.call.kernels, layer.geometry.k_format);
        let scratch = &mut *self.unpacked;
        // SAFETY: the tile holds the rows `low..high`, and the scratch is as large as the kernel wants.
        unsafe {
            match (&layer.derived, self.call.many(rows)[0]) {
                (Some(derived), _) => derived.score(kernels, format, &score, tile, scratch),
                (None, Many::AsFew) => (self.call.keys.score)(&score),
                (None, Many::Decoded(_)) => decoded::score(kernels, format, &score, scratch),
                (None, Many::Unpacked { score: many, .. }) => many(&score, scratch),
            }
        }
    }

    /// The softmax of one tile and head, in cell `cell` of the scratch.
    unsafe fn weigh(
        &mut self,
        piece: &Piece<'_>,
        tile: usize,
        head: usize,
        cell: usize,
        state: &mut State<'_>,
    ) {
        let (call, group, layer) = (self.call, self.group, self.call.kv.layer);
        let rows = group.queries * layer.group();
        for (part, seen) in call.sights(group, piece, tile) {
            let first = (head - group.heads.start) * rows;
            let state_part = first + part.start..first + part.end;
            let part = cell * rows + part.start..cell * rows + part.end;
            let mut softmax = Softmax {
                scores: &mut self.scores[part.start * TILE..part.end * TILE],
                cap: layer.softcap.map(|cap| cap * LOG2_E as f32),
                low: seen.start,
                high: seen.end,
                bias: &self.biases[state_part.clone()],
                max: &mut state.max[state_part.clone()],
                sum: &mut state.sum[state_part],
                decay: &mut self.decay[part],
            };
            // SAFETY: the kernels are for this CPU.
            unsafe { (call.kernels.softmax)(&mut softmax) };
        }
    }

    /// Adds the values of one tile and head, with the weights in cell `cell` of the scratch.
    unsafe fn accumulate(
        &mut self,
        piece: &Piece<'_>,
        tile: usize,
        head: usize,
        cell: usize,
        values: &Chunk<'_>,
        state: &mut State<'_>,
    ) {
        let (call, group, layer) = (self.call, self.group, self.call.kv.layer);
        let rows = group.queries * layer.group();
        let stride = value_stride(layer);
        let LayerGeometry { v_head_dim, v_format, .. } = layer.geometry;
        for (part, seen) in call.sights(group, piece, tile) {
            let first = (head - group.heads.start) * rows;
            let state_part = first + part.start..first + part.end;
            let accumulate = Accumulate {
                weights: self.scores[(cell * rows + part.start) * TILE..(cell * rows + part.end) * TILE]
                    .as_mut_ptr(),
                decay: Some(self.decay[cell * rows + part.start..].as_ptr()),
                values: state.values[state_part.start * stride..state_part.end * stride].as_mut_ptr(),
                stride,
                count: part.len(),
                dim: v_head_dim as usize,
                size: row_size(&layer.layout.v, layer.geometry.v_row_dim()),
                chunk: values,
                low: seen.start,
                high: seen.end,
                prefetch: part.start == 0 && v_format.is_some(),
            };
            let (format, scratch) = (layer.geometry.v_rows(), &mut *self.unpacked);
            // SAFETY: the tile holds the rows `low..high`, and the state has the rows of the part.
            unsafe {
                match call.many(part.len())[1] {
                    Many::AsFew => (call.values.accumulate)(&accumulate),
                    Many::Decoded(_) => decoded::accumulate(call.kernels, format, &accumulate, scratch),
                    Many::Unpacked { accumulate: many, .. } => many(&accumulate, scratch),
                }
            };
        }
    }
}
