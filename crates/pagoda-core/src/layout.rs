//! The bytes of a block, as arithmetic: `docs/layout.md` draws them.
//!
//! A block stores one page of one layer group. Within it layers follow each other, each as
//! `[K rows][K scales][V rows][V scales]`, and each of these is `[kv_head][token][row]`: one head of one page is one
//! contiguous run.

use std::fmt;

/// How one K or V row (one token, one head) is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// OCP E4M3 with a binary32 scale a row.
    Fp8E4m3,
    /// 8-bit integers with a binary32 scale a row.
    Int8,
    /// ggml's blocks of 32 8-bit integers with a binary16 scale.
    Q8_0,
    /// ggml's blocks of 32 5-bit integers with a binary16 scale.
    Q5_0,
    /// ggml's blocks of 32 4-bit integers with a binary16 scale.
    Q4_0,
    /// OCP blocks of 32 E2M1 with an E8M0 scale.
    Mxfp4,
    /// Blocks of 16 E2M1 with an E4M3 scale.
    Nvfp4,
}

impl RowFormat {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Fp8E4m3,
        Self::Int8,
        Self::Q8_0,
        Self::Q5_0,
        Self::Q4_0,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    /// A row has a multiple of this many elements: whole blocks, and a multiple of 16 bytes except for q5_0, whose blocks
    /// have 20.
    pub const fn unit(self) -> u32 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 8,
            Self::Fp8E4m3 | Self::Int8 => 16,
            Self::Q8_0 | Self::Q5_0 | Self::Q4_0 | Self::Mxfp4 | Self::Nvfp4 => 32,
        }
    }

    /// Bits of an element.
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Fp8E4m3 | Self::Int8 | Self::Q8_0 => 8,
            Self::Q5_0 => 5,
            Self::Q4_0 | Self::Mxfp4 | Self::Nvfp4 => 4,
        }
    }

    /// Bytes of a scale (0 if there is none), and how many elements share it: the whole row if `None`.
    pub const fn scale(self) -> (u32, Option<u32>) {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => (0, None),
            Self::Fp8E4m3 | Self::Int8 => (4, None),
            Self::Q8_0 | Self::Q5_0 | Self::Q4_0 => (2, Some(32)),
            Self::Mxfp4 => (1, Some(32)),
            Self::Nvfp4 => (1, Some(16)),
        }
    }

    /// Bytes of a row of `dim` elements, without scales.
    pub const fn row_bytes(self, dim: u32) -> u64 {
        dim as u64 * self.bits() as u64 / 8
    }

    /// Bytes of the scales of a row of `dim` elements.
    pub const fn scale_bytes(self, dim: u32) -> u64 {
        let (bytes, block) = self.scale();
        let scales = match block {
            Some(block) => dim / block,
            None => 1,
        };
        bytes as u64 * scales as u64
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Int8 => "int8",
            Self::Q8_0 => "q8_0",
            Self::Q5_0 => "q5_0",
            Self::Q4_0 => "q4_0",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
        })
    }
}

/// What one layer stores for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGeometry {
    /// K/V heads.
    pub num_kv_heads: u32,
    /// Elements of a K row; a multiple of the format's unit.
    pub head_dim: u32,
    /// Elements of a V row; likewise.
    pub v_head_dim: u32,
    /// Row format of K.
    pub k_format: RowFormat,
    /// Row format of V; if `None`, V is the first elements of the K row.
    pub v_format: Option<RowFormat>,
}

impl LayerGeometry {
    /// The format of the rows that V is read from.
    pub fn v_rows(&self) -> RowFormat {
        self.v_format.unwrap_or(self.k_format)
    }

    /// Elements of the rows that V is read from.
    pub fn v_row_dim(&self) -> u32 {
        if self.v_format.is_some() { self.v_head_dim } else { self.head_dim }
    }
}

/// Rows of equal size inside a block: `[kv_head][token][row]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    /// Bytes from the start of the block.
    pub offset: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// Bytes from one token to the next.
    pub row_stride: u64,
}

/// K or V of one layer inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// The rows.
    pub rows: Strip,
    /// Their scales; empty for formats without scales.
    pub scales: Strip,
}

/// The K and V planes of one layer inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    /// Where K lies.
    pub k: Plane,
    /// Where V lies; this may be where K lies.
    pub v: Plane,
}

/// Where everything lies inside the blocks of one layer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Tokens a block holds.
    pub page_size: u32,
    /// Bytes of a block. Saturates at `u64::MAX`, which fits no arena.
    pub block_bytes: u64,
    /// One entry per layer of the group, in model order.
    pub layers: Vec<LayerLayout>,
}

impl BlockLayout {
    /// Strips and blocks begin at multiples of this.
    pub const ALIGN: u64 = 16;

    /// Lays out `layers` for pages of `page_size` tokens.
    pub fn new(layers: &[LayerGeometry], page_size: u32) -> Self {
        let mut end = 0u64;
        let mut strip = |heads: u32, row_stride: u64| {
            let head_stride = row_stride.saturating_mul(page_size.into());
            let strip = Strip { offset: end, head_stride, row_stride };
            end = end.saturating_add(head_stride.saturating_mul(heads.into()));
            end = end.checked_next_multiple_of(Self::ALIGN).unwrap_or(u64::MAX);
            strip
        };
        let mut plane = |heads: u32, format: RowFormat, dim: u32| Plane {
            rows: strip(heads, format.row_bytes(dim)),
            scales: strip(heads, format.scale_bytes(dim)),
        };
        let layers = layers
            .iter()
            .map(|layer| {
                let k = plane(layer.num_kv_heads, layer.k_format, layer.head_dim);
                let v = layer.v_format.map(|format| plane(layer.num_kv_heads, format, layer.v_head_dim));
                LayerLayout { k, v: v.unwrap_or(k) }
            })
            .collect();
        Self { page_size, block_bytes: end, layers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Group, GroupKind, TierMemory};
    use crate::{Cache, Error};

    /// Without saturation, this many heads and layers would wrap around to a block size that fits.
    #[test]
    fn blocks_beyond_what_integers_count_fit_no_arena() {
        let layer = LayerGeometry {
            num_kv_heads: 1 << 31,
            head_dim: 1024,
            v_head_dim: 1024,
            k_format: RowFormat::F32,
            v_format: None,
        };
        let mut layers = vec![layer; 512];
        layers.push(LayerGeometry { num_kv_heads: 1, ..layer });
        let BlockLayout { block_bytes, .. } = BlockLayout::new(&layers, 1 << 12);
        let kind = GroupKind::Paged { page_size: 1 << 12 };
        let memory = TierMemory { bytes: 1 << 48, extent_bytes: 1 << 48 };
        let refused = Cache::new(&[Group { block_bytes, kind, window: None }], [memory; 3]).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { argument: "block_bytes", .. }), "{refused}");
    }
}
