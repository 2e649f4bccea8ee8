//! The query rows of an item on their way over its tiles: scores, softmax, values.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use pagoda_core::layout::{LayerGeometry, Plane};
use pagoda_core::table::{Sight, SpanView};
use pagoda_core::work::{Piece, RUN_TILES, TILE, pieces};

use super::batch::{BATCHES, Batch, CELLS};
use super::{Call, State};
use crate::chunk::{Chunk, Lines, RowSize, STREAMS};
use crate::decoded;
use crate::integers::{QueryStep, STEP};
use crate::kernel::{ALIGN, Accumulate, Score};
use crate::layer::PagedKv;
use crate::plan::{Group, value_stride};
use crate::rows::Element;
use crate::simd::Many;
use crate::softmax::Softmax;

/// The query rows of an item on their way over its tiles.
pub(super) struct Pass<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) group: &'a Group,
    pub(super) queries: &'a mut [f32],
    pub(super) codes: &'a mut [QueryStep],
    pub(super) scores: &'a mut [f32],
    pub(super) biases: &'a mut [f32],
    pub(super) decay: &'a mut [f32],
    pub(super) unpacked: &'a mut [f32],
}

impl Pass<'_> {
    /// Loads the queries, rotated back for a span and by `more` positions, and scaled for base-2 exponentials.
    unsafe fn prepare(&mut self, span: &SpanView, more: u64, angles: &mut Vec<(f32, f32)>) {
        let Call { kernels, queries: source, kv: PagedKv { layer, .. }, .. } = *self.call;
        let dim = layer.geometry.head_dim as usize;
        let load = kernels.convert(source.element, Element::F32);
        // Exponentials have base 2. With a softcap, the cap itself is multiplied by log2(e) later.
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

    /// Goes over tiles, counted over all pieces of the group, run by run. The first run goes to `state`, the others to `run`
    /// first. If not deterministic, short pieces share a run.
    pub(super) unsafe fn runs<'s>(
        &mut self,
        tiles: &Range<usize>,
        state: &mut State<'s>,
        run: &mut State<'s>,
        angles: &mut Vec<(f32, f32)>,
    ) {
        let (call, layer) = (self.call, self.call.kv.layer);
        let (mut prepared, mut counted) = (None, 0);
        // Runs so far, with the current one, and the tiles in that.
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
                // Derived keys are turned by their place in the run.
                let derived = layer.derived.is_some();
                let run_position = if derived { piece.span.run_position(tiles.start / RUN_TILES) } else { 0 };
                let turn = layer.rope.as_ref().map(|_| (piece.span.offset, from, run_position));
                if prepared != Some(turn) {
                    prepared = Some(turn);
                    // SAFETY: as the caller promises.
                    unsafe { self.prepare(piece.span, run_position, angles) };
                }
                // Also if not deterministic: adding many small terms to one large sum would lose precision.
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

    /// Goes over a run of tiles in batches, page by page: the K of a batch is one stream, then its V.
    unsafe fn tiles(&mut self, piece: &Piece<'_>, tiles: Range<usize>, state: &mut State<'_>) {
        let mut batches = [const { Batch::NONE }; BATCHES];
        let [mut here, mut next, mut later] = batches.each_mut();
        let (kv, group) = (&self.call.kv, self.group);
        here.fill(kv, group, piece, tiles.clone(), group.heads.start);
        next.follow(here, kv, group, piece, tiles.end);
        while !here.tiles.is_empty() {
            later.follow(next, kv, group, piece, tiles.end);
            // SAFETY: as the caller promises.
            unsafe { self.batch(piece, [here, next, later], state) };
            (here, next, later) = (next, later, here);
        }
    }

    /// Attends to the first of some consecutive batches.
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
        // Nothing comes after the last: it is prefetched again.
        rest.for_each(|next| *next = last);
        let ahead =
            |index: usize| reads[index + 1..].first_chunk().expect("as many as streams come after it");
        for (index, cell) in cells.iter().enumerate() {
            let chunk =
                Chunk { here: reads[index], ahead: ahead(index), in_order: keys_in_order, piece_shift };
            // SAFETY: as the caller promises.
            unsafe { self.score(piece, cell.tile, cell.head, index, &chunk) };
        }
        // All weights before the first value: the CPU starts on the next ones while a sum is added up.
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

/// Elements and bytes of the rows of a plane.
fn row_size(plane: &Plane, dim: u32) -> RowSize {
    RowSize {
        dim: dim as usize,
        bytes: plane.rows.row_stride as usize,
        scale_bytes: plane.scales.row_stride as usize,
    }
}
