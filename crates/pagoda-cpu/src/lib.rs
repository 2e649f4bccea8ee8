//! Row formats and SIMD attention over the pages of a Pagoda cache.
//!
//! A [`Backend`] is a pool of threads with the kernels for one instruction set. [`Backend::append`] writes new K and V rows
//! into their slots; [`Backend::attend`] computes exact attention over the pages where they lie. Nothing is allocated per
//! call once the scratch memory has grown, and at most 64 rows of a head are decoded at a time.

mod append;
mod attend;
mod backend;
mod chunk;
mod codec;
mod common;
mod convert;
mod decoded;
mod derived;
mod integers;
mod kernel;
mod layer;
mod plan;
mod pool;
mod rope;
mod rows;
mod simd;
mod softmax;
mod stored;
#[cfg(test)]
mod tests;
mod transform;

pub use append::Overflow;
pub use attend::{Attention, Carried};
pub use backend::{Backend, Error};
pub use codec::{decode_row, encode_row};
pub use common::Shared;
pub use convert::{F16_MAX, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use derived::DerivedKeys;
pub use layer::{
    Arenas, GROUP_MAX, HEAD_DIM_MAX, Layer, LayerError, PAGE_SIZE_MAX, PAGE_SIZE_MIN, PagedKv, SequenceTable,
    TableError,
};
pub use rope::Rope;
pub use rows::{Element, Rows, RowsMut};
pub use simd::Isa;
pub use transform::Transform;
