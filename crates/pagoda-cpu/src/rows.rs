//! Arrays of rows that belong to the caller: K, V, queries and outputs.

/// The element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl Element {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// `[token][head][dim]` with any strides and a contiguous last dimension.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first element. Aligned to the element at best: vectors are loaded unaligned.
    pub ptr: *const u8,
    /// The element type.
    pub element: Element,
    /// Bytes from one token to the next.
    pub token_stride: isize,
    /// Bytes from one head to the next.
    pub head_stride: isize,
}

/// [`Rows`] to write to, at an address that came from a `*mut`. No two rows may overlap.
#[derive(Clone, Copy, Debug)]
pub struct RowsMut(pub Rows);

impl Rows {
    /// The same without the first `tokens` tokens.
    pub(crate) fn skip(self, tokens: usize) -> Self {
        Self { ptr: self.row(tokens, 0), ..self }
    }

    /// The row of `token` and `head`.
    pub(crate) fn row(&self, token: usize, head: usize) -> *const u8 {
        let offset = self.token_stride * token as isize + self.head_stride * head as isize;
        self.ptr.wrapping_offset(offset)
    }
}

impl RowsMut {
    /// The same without the first `tokens` tokens.
    pub(crate) fn skip(self, tokens: usize) -> Self {
        Self(self.0.skip(tokens))
    }

    /// The row of `token` and `head`.
    pub(crate) fn row(&self, token: usize, head: usize) -> *mut u8 {
        self.0.row(token, head).cast_mut()
    }
}

// SAFETY: these are addresses; the unsafe functions that take them ask for arrays that other threads may access.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}
