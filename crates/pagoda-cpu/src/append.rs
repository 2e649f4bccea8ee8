//! Writing the K and V rows of new tokens into their slots.

use std::iter;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::convert::F16_MAX;
use crate::layer::{HEAD_DIM_MAX, PagedKv, SequenceTable};
use crate::pool::Pool;
use crate::rows::{Element, Rows};
use crate::simd::Kernels;
use pagoda_core::layout::{RowFormat, Strip};

/// Tokens that a thread takes at a time.
const TOKENS: usize = 16;
/// Bytes for which it pays to wake a thread.
const WAKE_BYTES: usize = 128 << 10;

/// A number that does not fit the row format: too large, infinite or not a number. Only in checked mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}[{token}, {head}] has a number that its row format cannot hold", if *value { "v" } else { "k" })]
pub struct Overflow {
    /// The token, counted over the new tokens of the batch.
    pub token: usize,
    /// The K/V head.
    pub head: usize,
    /// Whether it is V and not K.
    pub value: bool,
}

/// See [`Backend::append`](crate::Backend::append).
///
/// # Safety
/// As there; and the layer and the tables are checked, and the kernels are for this CPU.
pub(crate) unsafe fn append(
    pool: &Pool,
    kernels: &'static Kernels,
    kv: &PagedKv<'_>,
    keys: Rows,
    values: Option<Rows>,
    checked: bool,
) -> Result<(), Overflow> {
    let layer = kv.layer;
    let (geometry, transform) = (&layer.geometry, &layer.transform);
    let heads = geometry.num_kv_heads as usize;
    let planes = [
        Some((keys, layer.layout.k, geometry.head_dim as usize, geometry.k_format)),
        values.map(|rows| (rows, layer.layout.v, geometry.v_head_dim as usize, geometry.v_rows())),
    ];
    let total: usize = kv.sequences.iter().map(|table| table.new_tokens as usize).sum();
    let token_bytes: usize =
        planes.iter().flatten().map(|(_, plane, ..)| plane.rows.row_stride as usize * heads).sum();
    // The first overflow, as (token, head, value) in one number.
    let overflow = AtomicU64::new(u64::MAX);
    let write = |token: usize, block: *mut u8, row: usize| {
        for (i, (source, plane, dim, format)) in planes.iter().flatten().enumerate() {
            for head in 0..heads {
                let place = |strip: &Strip| {
                    let offset = strip.offset as usize
                        + head * strip.head_stride as usize
                        + row * strip.row_stride as usize;
                    block.wrapping_add(offset)
                };
                let target = Target {
                    format: *format,
                    row: place(&plane.rows),
                    scales: place(&plane.scales),
                    center: if i == 0 { transform.center(head, *dim) } else { None },
                    rotate: if i == 0 { transform.rotate_k } else { transform.rotate_v },
                };
                // SAFETY: the caller has a row for every token and head, and the block has a slot for it.
                let fits = unsafe { store(kernels, source.row(token, head), source.element, *dim, &target) };
                if checked && !fits {
                    let value = usize::from(i == 1 || layer.derived.is_some());
                    overflow.fetch_min(((token * heads + head) * 2 + value) as u64, Ordering::Relaxed);
                }
            }
        }
    };
    let next = AtomicUsize::new(0);
    pool.run((total * token_bytes).div_ceil(WAKE_BYTES).min(total.div_ceil(TOKENS)), &|_| {
        let mut cursor = Cursor { sequence: 0, first_token: 0 };
        loop {
            let first = next.fetch_add(TOKENS, Ordering::Relaxed);
            if first >= total {
                break;
            }
            cursor.slots(kv, first..first + TOKENS, write);
        }
    });
    match overflow.into_inner() {
        u64::MAX => Ok(()),
        n => {
            let (n, value) = (n as usize / 2, n % 2 == 1);
            Err(Overflow { token: n / heads, head: n % heads, value })
        }
    }
}

/// The fewest rows from which the centre of K is taken.
const CENTER_TOKENS_MIN: usize = 8;

/// The centre of rows: for each element of each head its mean where that is at least twice the standard deviation, else 0.
/// With fewer rows, the centre `before` (empty for zeros) where that is nearer to their mean than 0 is, else 0. None if a
/// mean is NaN or larger than any f16: no model has such an offset, and other rows would be lost in rounding.
///
/// # Safety
/// There are `tokens` rows for each head; the kernels are for this CPU.
pub(crate) unsafe fn center_of(
    kernels: &Kernels,
    rows: Rows,
    tokens: usize,
    heads: usize,
    dim: usize,
    before: &[f32],
) -> Option<Vec<f32>> {
    // Sums of the numbers and of their squares, which f64 holds exactly.
    let mut sums = vec![[0.0f64; 2]; heads * dim];
    let mut numbers = [0.0f32; HEAD_DIM_MAX as usize];
    for token in 0..tokens {
        for (head, sums) in sums.chunks_exact_mut(dim).enumerate() {
            // SAFETY: as the caller promises; a row has at most HEAD_DIM_MAX elements.
            unsafe {
                let convert = kernels.convert(rows.element, Element::F32);
                convert(rows.row(token, head), numbers.as_mut_ptr().cast(), dim);
            }
            for ([sum, squares], x) in sums.iter_mut().zip(&numbers) {
                let x = f64::from(*x);
                *sum += x;
                *squares += x * x;
            }
        }
    }
    let (enough, tokens) = (tokens >= CENTER_TOKENS_MIN, tokens as f64);
    sums.iter()
        .zip(before.iter().copied().chain(iter::repeat(0.0)))
        .map(|([sum, squares], before)| {
            let mean = sum / tokens;
            let (center, holds) = if enough {
                // mean^2 >= 4 (squares / tokens - mean^2)
                (mean as f32, 5.0 * sum * sum >= 4.0 * tokens * squares)
            } else {
                (before, (mean - f64::from(before)).abs() < mean.abs())
            };
            ((mean as f32).abs() <= F16_MAX).then_some(if holds { center } else { 0.0 })
        })
        .collect()
}

/// Where a row is stored, and how.
struct Target<'a> {
    format: RowFormat,
    row: *mut u8,
    scales: *mut u8,
    center: Option<&'a [f32]>,
    rotate: bool,
}

/// Stores a row; false if it does not fit its format.
///
/// # Safety
/// There are `dim` elements at `source` and room for them at the target; the kernels are for this CPU.
unsafe fn store(
    kernels: &Kernels,
    source: *const u8,
    element: Element,
    dim: usize,
    target: &Target<'_>,
) -> bool {
    let plain = match target.format {
        RowFormat::F32 => Some(Element::F32),
        RowFormat::F16 => Some(Element::F16),
        RowFormat::Bf16 => Some(Element::Bf16),
        _ => None,
    };
    // SAFETY: as the caller promises; a row has at most HEAD_DIM_MAX elements.
    unsafe {
        if let Some(to) = plain.filter(|_| target.center.is_none() && !target.rotate) {
            return kernels.convert(element, to)(source, target.row, dim);
        }
        let mut numbers = [MaybeUninit::<f32>::uninit(); HEAD_DIM_MAX as usize];
        kernels.convert(element, Element::F32)(source, numbers.as_mut_ptr().cast(), dim);
        let numbers = std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<f32>(), dim);
        if let Some(center) = target.center {
            numbers.iter_mut().zip(center).for_each(|(x, c)| *x -= c);
        }
        let fits = !target.rotate || (kernels.rotate_stored)(numbers);
        if let Some(to) = plain {
            return kernels.convert(Element::F32, to)(numbers.as_ptr().cast(), target.row, dim) && fits;
        }
        let (rows, scales) = (target.format.row_bytes(dim as u32), target.format.scale_bytes(dim as u32));
        let rows = std::slice::from_raw_parts_mut(target.row, rows as usize);
        let scales = std::slice::from_raw_parts_mut(target.scales, scales as usize);
        (kernels.encode)(target.format, numbers, rows, scales) && fits
    }
}

/// Goes through the new tokens of a batch, forwards only, so that each sequence is looked up once, not once a piece.
struct Cursor {
    sequence: usize,
    /// The first new token of this sequence, counted over the new tokens of the batch.
    first_token: usize,
}

impl Cursor {
    /// Calls `each` with the number, block and row of the new tokens `tokens`, which come after those of the previous call.
    fn slots(
        &mut self,
        &PagedKv { arenas, layer, sequences }: &PagedKv<'_>,
        tokens: Range<usize>,
        each: impl Fn(usize, *mut u8, usize),
    ) {
        while let Some(table) = sequences.get(self.sequence) {
            let first = self.first_token;
            let end = first + table.new_tokens as usize;
            let (low, high) = (tokens.start.max(first), tokens.end.min(end));
            if low < high {
                slots(table, low - first..high - first, layer.page_size as usize, |token, page, row| {
                    let block = arenas.block(table.row[page], layer.block_bytes as usize);
                    each(first + token, block, row);
                });
            }
            if end > tokens.end {
                break;
            }
            *self = Self { sequence: self.sequence + 1, first_token: end };
        }
    }
}

/// Calls `each` with the number, page and row of the new tokens `tokens` of a sequence.
fn slots(
    table: &SequenceTable<'_>,
    tokens: Range<usize>,
    page_size: usize,
    mut each: impl FnMut(usize, usize, usize),
) {
    let first_new = table.len() - table.new_tokens as usize;
    let mut span_start = 0;
    for span in table.spans {
        let end = span_start + span.count as usize;
        let low = (first_new + tokens.start).max(span_start);
        for axis in low..end.min(first_new + tokens.end) {
            let row = axis - span_start + span.skip as usize;
            each(axis - first_new, span.first_page as usize + row / page_size, row % page_size);
        }
        span_start = end;
    }
}
