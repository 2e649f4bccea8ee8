//! What attention needs to know about a layer, its sequences and where blocks lie.

use std::ops::Range;

use pagoda_core::ids::{BlockRef, Tier};
use pagoda_core::layout::{LayerGeometry, LayerLayout, RowFormat};
use pagoda_core::table::SpanView;
use pagoda_core::work::pieces;

use crate::derived::DerivedKeys;
use crate::rope::Rope;
use crate::transform::Transform;

/// The largest row, in elements.
pub const HEAD_DIM_MAX: u32 = 1024;
/// Query heads that may share a K/V head.
pub const GROUP_MAX: u32 = 128;
/// The smallest page, in tokens.
pub const PAGE_SIZE_MIN: u32 = 8;
/// The largest page, in tokens.
pub const PAGE_SIZE_MAX: u32 = 4096;

/// Where the blocks of each tier lie. A tier without memory is null and never referred to.
#[derive(Clone, Copy, Debug)]
pub struct Arenas {
    /// The first byte of block 0, by [`Tier::index`].
    pub base: [*mut u8; Tier::COUNT],
    disk_stride: usize,
}

impl Arenas {
    /// Of the tiers that are memory.
    pub fn new(device: *mut u8, host: *mut u8) -> Self {
        Self { base: [device, host, std::ptr::null_mut()], disk_stride: 0 }
    }

    /// With a disk tier that is partly in memory: the same `stride` bytes of each of its blocks, one block after the other.
    /// `base` is where block 0 would begin if all of it were there.
    pub fn with_disk(mut self, base: *mut u8, stride: usize) -> Self {
        (self.base[Tier::Disk.index()], self.disk_stride) = (base, stride);
        self
    }

    /// The first byte of a block.
    pub(crate) fn block(&self, block: BlockRef, block_bytes: usize) -> *mut u8 {
        let tier = block.tier();
        let base = self.base[tier.index()];
        debug_assert!(!base.is_null(), "{block:?} has no arena");
        let stride = if tier == Tier::Disk { self.disk_stride } else { block_bytes };
        base.wrapping_add(block.block().index() as usize * stride)
    }
}

// SAFETY: these are addresses; the unsafe functions that take them ask for memory that other threads may access.
unsafe impl Send for Arenas {}
// SAFETY: as above.
unsafe impl Sync for Arenas {}

/// One attention layer: shape, place inside a block, and arithmetic. Checked by [`Layer::check`].
#[derive(Clone, Debug)]
pub struct Layer {
    /// What is stored for each token.
    pub geometry: LayerGeometry,
    /// Where it lies inside a block.
    pub layout: LayerLayout,
    /// Bytes from one block to the next.
    pub block_bytes: u64,
    /// Tokens of a page.
    pub page_size: u32,
    /// Query heads, a multiple of the K/V heads.
    pub num_q_heads: u32,
    /// What dot products are multiplied by.
    pub scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`; above 0.
    pub softcap: Option<f32>,
    /// How many tokens a query sees, itself included; all if `None`.
    pub window: Option<u32>,
    /// How queries were rotated, for spans that have moved.
    pub rope: Option<Rope>,
    /// What happens to rows before they are stored. Not if V is part of K.
    pub transform: Transform,
    /// How keys are derived from values, if only these are stored: in place of K, with V as part of K.
    pub derived: Option<DerivedKeys>,
}

impl Layer {
    /// Whether this layer is within the limits of the kernels.
    pub fn check(&self) -> Result<(), LayerError> {
        let LayerGeometry { num_kv_heads, head_dim, v_head_dim, k_format, .. } = self.geometry;
        for (what, dim, format) in
            [("head_dim", head_dim, k_format), ("v_head_dim", v_head_dim, self.geometry.v_rows())]
        {
            if dim == 0 || dim > HEAD_DIM_MAX || !dim.is_multiple_of(format.unit()) {
                return Err(LayerError::Dim { what, dim, format });
            }
        }
        if self.geometry.v_format.is_none() && v_head_dim > head_dim {
            return Err(LayerError::PartOfK { v_head_dim, head_dim });
        }
        if num_kv_heads == 0
            || self.num_q_heads == 0
            || !self.num_q_heads.is_multiple_of(num_kv_heads)
            || self.num_q_heads / num_kv_heads > GROUP_MAX
        {
            return Err(LayerError::Heads { num_q_heads: self.num_q_heads, num_kv_heads });
        }
        if !self.page_size.is_power_of_two() || !(PAGE_SIZE_MIN..=PAGE_SIZE_MAX).contains(&self.page_size) {
            return Err(LayerError::PageSize(self.page_size));
        }
        if let Some(rope) = &self.rope
            && rope.inv_freq.len() * 2 > head_dim as usize
        {
            return Err(LayerError::Rope { pairs: rope.inv_freq.len(), head_dim });
        }
        if let Some(derived) = &self.derived
            && (self.geometry.v_format.is_some() || [head_dim, v_head_dim] != [derived.dim() as u32; 2])
        {
            return Err(LayerError::Derived { weights: derived.dim(), head_dim, v_head_dim });
        }
        Ok(())
    }

    /// The tokens of a sequence that some of its new tokens see.
    pub fn seen(&self, sequence: &SequenceTable<'_>) -> Range<usize> {
        let (len, new) = (sequence.len(), sequence.new_tokens as usize);
        if new == 0 { len..len } else { self.visible(len - new..len) }
    }

    /// The tokens that some of the queries at these places see.
    pub(crate) fn visible(&self, queries: Range<usize>) -> Range<usize> {
        let low = self.window.map_or(0, |window| (queries.start + 1).saturating_sub(window as usize));
        low..queries.end
    }

    /// Bytes of the rows, scales included, that attention over a sequence has to read at least once.
    pub fn seen_bytes(&self, sequence: &SequenceTable<'_>) -> u64 {
        self.seen_bytes_before(sequence, usize::MAX)
    }

    /// The same of the tokens before `end`.
    pub fn seen_bytes_before(&self, sequence: &SequenceTable<'_>, end: usize) -> u64 {
        let seen = self.seen(sequence);
        let pieces = pieces(sequence.spans, seen.start..seen.end.min(end));
        let rows: usize = pieces.map(|piece| piece.rows.len()).sum();
        rows as u64 * self.token_bytes()
    }

    /// Bytes of the rows of one token, scales included.
    pub fn token_bytes(&self) -> u64 {
        let LayerGeometry { num_kv_heads, head_dim, v_head_dim, k_format, v_format } = self.geometry;
        let row = |format: RowFormat, dim| format.row_bytes(dim) + format.scale_bytes(dim);
        let token = row(k_format, head_dim) + v_format.map_or(0, |format| row(format, v_head_dim));
        token * u64::from(num_kv_heads)
    }

    /// Query heads per K/V head.
    pub(crate) fn group(&self) -> usize {
        (self.num_q_heads / self.geometry.num_kv_heads) as usize
    }
}

/// A layer that the kernels do not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// A head dimension.
    #[error(
        "{what} is {dim}; {format} rows have a multiple of {unit} from {unit} to {HEAD_DIM_MAX}", unit = format.unit()
    )]
    Dim {
        /// Which one.
        what: &'static str,
        /// Its value.
        dim: u32,
        /// How rows are stored.
        format: RowFormat,
    },
    /// More elements of V than the K row has that V is part of.
    #[error("v_head_dim is {v_head_dim}; V is part of a K row of {head_dim}")]
    PartOfK {
        /// Elements of V.
        v_head_dim: u32,
        /// Elements of a K row.
        head_dim: u32,
    },
    /// The number of heads.
    #[error(
        "num_q_heads is {num_q_heads} with num_kv_heads {num_kv_heads}; it has to be a multiple, 1 to {GROUP_MAX} times"
    )]
    Heads {
        /// Query heads.
        num_q_heads: u32,
        /// K/V heads.
        num_kv_heads: u32,
    },
    /// The page size.
    #[error("page_size is {0}; it has to be a power of two from {PAGE_SIZE_MIN} to {PAGE_SIZE_MAX}")]
    PageSize(u32),
    /// More rotated elements than the row has.
    #[error("rope rotates {pairs} pairs; head_dim {head_dim} has {}", head_dim / 2)]
    Rope {
        /// Rotated pairs.
        pairs: usize,
        /// Elements of a K row.
        head_dim: u32,
    },
    /// Derived keys that do not match the stored values.
    #[error(
        "keys come from values of {weights} elements; head_dim {head_dim} and v_head_dim {v_head_dim} have to be as many, \
         stored once"
    )]
    Derived {
        /// Weights that values are multiplied by.
        weights: usize,
        /// Elements of a K row.
        head_dim: u32,
        /// Elements of V.
        v_head_dim: u32,
    },
}

/// One sequence of a step: its page-table row, its spans, and how many of its last tokens are new.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTable<'a> {
    /// The pages. Entries past the last span are never read.
    pub row: &'a [BlockRef],
    /// The token axis, piece by piece, new tokens included.
    pub spans: &'a [SpanView],
    /// The last tokens of the axis, which `append` writes and whose queries `attend` answers.
    pub new_tokens: u32,
}

impl SequenceTable<'_> {
    /// Tokens on the axis.
    pub(crate) fn len(&self) -> usize {
        self.spans.iter().map(|span| span.count as usize).sum()
    }

    /// Whether the spans lie within the row and the new tokens within the spans.
    pub(crate) fn check(&self, sequence: usize, page_size: u32) -> Result<(), TableError> {
        for span in self.spans {
            let rows = u64::from(span.skip) + u64::from(span.count);
            let pages = u64::from(span.first_page) + rows.div_ceil(u64::from(page_size));
            if pages > self.row.len() as u64 {
                return Err(TableError { sequence, needs: pages, has: self.row.len() as u64, what: "pages" });
            }
        }
        let (needs, has) = (u64::from(self.new_tokens), self.len() as u64);
        if needs > has { Err(TableError { sequence, needs, has, what: "tokens" }) } else { Ok(()) }
    }
}

/// K and V of one layer of a batch, where they lie.
#[derive(Clone, Copy, Debug)]
pub struct PagedKv<'a> {
    /// The memory of the tiers.
    pub arenas: &'a Arenas,
    /// The layer.
    pub layer: &'a Layer,
    /// The sequences of the batch.
    pub sequences: &'a [SequenceTable<'a>],
}

/// A sequence table that contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sequence {sequence} of the batch needs {needs} {what} and has {has}")]
pub struct TableError {
    /// Which sequence of the batch.
    pub sequence: usize,
    /// How many pages its spans need, or how many tokens are new.
    pub needs: u64,
    /// How many pages its row has, or how many tokens its spans.
    pub has: u64,
    /// Pages or tokens.
    pub what: &'static str,
}
