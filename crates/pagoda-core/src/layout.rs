//! The bytes of a block, as arithmetic: `docs/layout.md` draws them.
//!
//! A block stores one page of one layer group. Within it layers follow each other, each as `[K data][V data]`,
//! and K or V data is `[kv_head][token][row]`: one head of one page is one contiguous run.

/// How one K or V row (one token, one head) is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl RowFormat {
    /// Bytes of a row of `dim` elements.
    pub const fn row_bytes(self, dim: u32) -> u64 {
        match self {
            Self::F32 => dim as u64 * 4,
            Self::F16 | Self::Bf16 => dim as u64 * 2,
        }
    }
}

/// What one layer stores for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerGeometry {
    /// K/V heads.
    pub num_kv_heads: u32,
    /// Elements of a K row; a multiple of 8.
    pub head_dim: u32,
    /// Elements of a V row; a multiple of 8.
    pub v_head_dim: u32,
    /// Row format of K.
    pub k_format: RowFormat,
    /// Row format of V; without one V is the first elements of the K row.
    pub v_format: Option<RowFormat>,
}

impl LayerGeometry {
    /// The format of the rows that V is read from.
    pub fn v_rows(&self) -> RowFormat {
        self.v_format.unwrap_or(self.k_format)
    }
}

/// One plane of one layer inside a block: `[kv_head][token][row]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Bytes from the start of the block.
    pub offset: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// Bytes from one token to the next.
    pub row_stride: u64,
}

/// The K and V planes of one layer inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    /// Where K lies.
    pub k: Plane,
    /// Where V lies, which may be where K does.
    pub v: Plane,
}

/// Where everything lies inside the blocks of one layer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Tokens a block holds.
    pub page_size: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// One entry per layer of the group, in model order.
    pub layers: Vec<LayerLayout>,
}

impl BlockLayout {
    /// Lays out `layers` for pages of `page_size` tokens.
    pub fn new(layers: &[LayerGeometry], page_size: u32) -> Self {
        let mut offset = 0;
        let mut plane = |heads: u32, row_stride: u64| {
            let head_stride = row_stride * u64::from(page_size);
            let plane = Plane { offset, head_stride, row_stride };
            offset += head_stride * u64::from(heads);
            plane
        };
        let layers = layers
            .iter()
            .map(|layer| {
                let k = plane(layer.num_kv_heads, layer.k_format.row_bytes(layer.head_dim));
                let v = layer.v_format.map(|v| plane(layer.num_kv_heads, v.row_bytes(layer.v_head_dim)));
                LayerLayout { k, v: v.unwrap_or(k) }
            })
            .collect();
        Self { page_size, block_bytes: offset, layers }
    }
}
