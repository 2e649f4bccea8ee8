//! The kernels of each instruction set.
//!
//! `kernels!` instantiates them inside functions that enable the features of an instruction set, so that the intrinsics
//! inline too. Only the table knows which functions those are: a [`Kernels`] is handed out for instruction sets this CPU has.

use pagoda_core::layout::RowFormat;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{Isa, dot, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, bf16, e4m3};
use crate::decoded::{self, Decode, Decoders, Multiply};
use crate::derived::{self, Derive, Turn};
use crate::integers::{self, QueryStep, STEP};
use crate::kernel::{self, Accumulate, Score};
use crate::rows::Element;
use crate::softmax::{self, Fold, Softmax};
use crate::transform;

/// Converts `n` elements (a multiple of 8) from `source` to `target`; false if one is not below the largest
/// magnitude of the target, infinite or NaN.
pub(crate) type Convert = unsafe fn(source: *const u8, target: *mut u8, n: usize) -> bool;

/// Writes a row and its scales in a format; see [`encode_row`](crate::encode_row).
pub(crate) type Encode = unsafe fn(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) -> bool;

/// Converts a query row to the form that rows are multiplied with.
pub(crate) type Quantise = unsafe fn(row: &[f32], steps: &mut [QueryStep]);

/// Kernels that read stored rows of one format.
pub(crate) struct RowKernels {
    pub(crate) score: unsafe fn(&Score<'_>),
    pub(crate) accumulate: unsafe fn(&Accumulate<'_>),
    /// For `score`, if it takes steps.
    pub(crate) quantise: Option<Quantise>,
    pub(crate) many: Many,
}

/// How tiles are read if a head has many query rows.
#[derive(Clone, Copy)]
pub(crate) enum Many {
    /// As for few.
    AsFew,
    /// From this many rows on, [decoded] once for all of them.
    Decoded(usize),
    /// From [`integers::MANY`] on, codes are unpacked to scratch memory once for all of them.
    Unpacked { score: unsafe fn(&Score<'_>, &mut [f32]), accumulate: unsafe fn(&Accumulate<'_>, &mut [f32]) },
}

impl Many {
    /// If `deterministic`, the way that gives the same bits as for few.
    pub(crate) fn with_same_bits(self, deterministic: bool) -> Self {
        match self {
            Self::Decoded(_) if deterministic => Self::AsFew,
            _ => self,
        }
    }

    /// The way for this many query rows.
    pub(crate) fn of(self, rows: usize) -> Self {
        match self {
            Self::Decoded(least) if rows < least => Self::AsFew,
            Self::Unpacked { .. } if rows < integers::MANY => Self::AsFew,
            _ => self,
        }
    }

    /// Floats of scratch memory for rows of `dim` elements.
    pub(crate) fn scratch(self, dim: u32) -> usize {
        match self {
            Self::AsFew => 0,
            Self::Decoded(_) => decoded::scratch(dim as usize),
            Self::Unpacked { .. } => integers::scratch(dim as usize),
        }
    }
}

/// Kernels that multiply codes, for a format, the elements to read and the elements of a stored row; None if there are none.
/// They take [`PRODUCT_ROWS`] rows of a page at once.
type ProductKernels = fn(RowFormat, usize, usize) -> Option<&'static RowKernels>;
/// See [`ProductKernels`].
pub(super) const PRODUCT_ROWS: usize = 16;

/// Kernels that read stored rows of one format as floats.
struct FloatKernels {
    rows: RowKernels,
    derive: unsafe fn(&Derive<'_>),
    decoders: Decoders,
}

/// The kernels of one instruction set.
pub(crate) struct Kernels {
    convert: [[Convert; 3]; 3],
    floats: [FloatKernels; RowFormat::ALL.len()],
    products: ProductKernels,
    pub(crate) encode: Encode,
    pub(crate) scale: unsafe fn(&mut [f32], f32),
    pub(crate) product: unsafe fn(&[f32], &[f32]) -> f32,
    pub(crate) rotate: unsafe fn(&mut [f32]),
    pub(crate) rotate_stored: unsafe fn(&mut [f32]) -> bool,
    pub(crate) rotate_back: unsafe fn(&mut [f32]),
    pub(crate) softmax: unsafe fn(&mut Softmax<'_>),
    pub(crate) fold: unsafe fn(&mut Fold<'_>),
    pub(crate) turn: unsafe fn(&Turn),
    pub(crate) multiply: unsafe fn(&Multiply<'_>),
}

impl Kernels {
    /// Converts elements.
    pub(crate) fn convert(&self, from: Element, to: Element) -> Convert {
        self.convert[from as usize][to as usize]
    }

    /// Reads `dim` elements of rows of `stored` elements.
    pub(crate) fn rows(&self, format: RowFormat, dim: u32, stored: u32, page_size: u32) -> &RowKernels {
        let products = (page_size as usize >= PRODUCT_ROWS)
            .then(|| (self.products)(format, dim as usize, stored as usize))
            .flatten();
        products.unwrap_or(self.float_rows(format))
    }

    /// Reads rows as floats.
    pub(crate) fn float_rows(&self, format: RowFormat) -> &RowKernels {
        &self.floats[format as usize].rows
    }

    /// Makes keys of rows.
    pub(crate) fn derive(&self, format: RowFormat) -> unsafe fn(&Derive<'_>) {
        self.floats[format as usize].derive
    }

    /// Decodes rows.
    pub(crate) fn decoders(&self, format: RowFormat) -> &Decoders {
        &self.floats[format as usize].decoders
    }
}

impl Isa {
    /// The kernels for this instruction set, if this CPU has it.
    pub(crate) fn kernels(self) -> Option<&'static Kernels> {
        if !self.is_supported() {
            return None;
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Some(const { &Kernels { products: bf16_products, ..avx512_kernels::TABLE } }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Some(const { &Kernels { products: vnni_products, ..avx512_kernels::TABLE } }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Some(const { &avx512_kernels::TABLE }),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => {
                Some(const { &Kernels { products: avxvnni_products::rows, ..avx2_kernels::TABLE } })
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Madd => {
                Some(const { &Kernels { products: avx2madd_products::rows, ..avx2_kernels::TABLE } })
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Some(const { &avx2_kernels::TABLE }),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => {
                Some(const { &Kernels { products: neondot_products::rows, ..neon_kernels::TABLE } })
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Some(const { &neon_kernels::TABLE }),
            Self::Scalar => Some(const { &scalar_kernels::TABLE }),
            _ => None,
        }
    }
}

/// Instantiates the kernels for one instruction set.
macro_rules! kernels {
    ($(#[$cfg:meta])* mod $name:ident, $simd:ty $(, $features:literal)?) => {
        $(#[$cfg])*
        mod $name {
            use super::*;
            use crate::codec;
            use crate::convert::{self, Bf16, F16, F32, Format};
            use crate::stored::{Fp8E4m3, Int8, Mxfp4, Nvfp4, Q4_0, Q5_0, Q8_0, Stored};

            $(#[target_feature(enable = $features)])?
            unsafe fn convert<A: Format, B: Format>(source: *const u8, target: *mut u8, n: usize) -> bool {
                // SAFETY: as the caller promises.
                unsafe { convert::convert::<$simd, A, B>(source, target, n) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn encode(format: RowFormat, x: &[f32], rows: &mut [u8], scales: &mut [u8]) -> bool {
                codec::encode(format, x, rows, scales)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn scale(row: &mut [f32], factor: f32) {
                transform::scale(row, factor);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn product(a: &[f32], b: &[f32]) -> f32 {
                transform::product(a, b)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(row: &mut [f32]) {
                // SAFETY: as the caller promises.
                unsafe { transform::rotate::<$simd>(row) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate_stored(row: &mut [f32]) -> bool {
                // SAFETY: as the caller promises.
                unsafe { transform::rotate_stored::<$simd>(row) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate_back(row: &mut [f32]) {
                // SAFETY: as the caller promises.
                unsafe { transform::rotate_back::<$simd>(row) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn score<F: Stored>(args: &Score<'_>) {
                // SAFETY: as the caller promises.
                unsafe { kernel::score::<$simd, F>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn softmax(args: &mut Softmax<'_>) {
                // SAFETY: as the caller promises.
                unsafe { softmax::softmax::<$simd>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn accumulate<F: Stored>(args: &Accumulate<'_>) {
                // SAFETY: as the caller promises.
                unsafe { kernel::accumulate::<$simd, F>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn derive<F: Stored>(args: &Derive<'_>) {
                // SAFETY: as the caller promises.
                unsafe { derived::derive::<$simd, F>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn columns<F: Stored>(args: &Decode<'_>) {
                // SAFETY: as the caller promises.
                unsafe { decoded::columns::<$simd, F>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rows<F: Stored>(args: &Decode<'_>) {
                // SAFETY: as the caller promises.
                unsafe { decoded::rows::<$simd, F>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply(args: &Multiply<'_>) {
                // SAFETY: as the caller promises.
                unsafe { decoded::multiply::<$simd>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn turn(args: &Turn) {
                // SAFETY: as the caller promises.
                unsafe { derived::turn::<$simd>(args) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn fold(args: &mut Fold<'_>) {
                // SAFETY: as the caller promises.
                unsafe { softmax::fold::<$simd>(args) }
            }

            pub(super) const TABLE: Kernels = Kernels {
                convert: [
                    [convert::<F32, F32>, convert::<F32, F16>, convert::<F32, Bf16>],
                    [convert::<F16, F32>, convert::<F16, F16>, convert::<F16, Bf16>],
                    [convert::<Bf16, F32>, convert::<Bf16, F16>, convert::<Bf16, Bf16>],
                ],
                floats: [
                    floats::<F32>(),
                    floats::<F16>(),
                    floats::<Bf16>(),
                    floats::<Fp8E4m3>(),
                    floats::<Int8>(),
                    floats::<Q8_0>(),
                    floats::<Q5_0>(),
                    floats::<Q4_0>(),
                    floats::<Mxfp4>(),
                    floats::<Nvfp4>(),
                ],
                products: |_, _, _| None,
                encode,
                scale,
                product,
                rotate,
                rotate_stored,
                rotate_back,
                softmax,
                fold,
                turn,
                multiply,
            };

            const fn floats<F: Stored>() -> FloatKernels {
                FloatKernels {
                    rows: RowKernels {
                        score: score::<F>,
                        accumulate: accumulate::<F>,
                        quantise: None,
                        many: Many::Decoded(F::MANY),
                    },
                    derive: derive::<F>,
                    decoders: Decoders { columns: columns::<F>, rows: rows::<F> },
                }
            }
        }
    };
}

kernels!(#[cfg(target_arch = "x86_64")] mod avx512_kernels, avx512::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
kernels!(#[cfg(target_arch = "x86_64")] mod avx2_kernels, avx2::Avx2, "avx2,fma,f16c");
kernels!(#[cfg(target_arch = "aarch64")] mod neon_kernels, neon::Neon, "neon");
kernels!(mod scalar_kernels, scalar::Scalar);

/// Instantiates the products of integers for one instruction set.
macro_rules! products {
    ($(#[$cfg:meta])* mod $name:ident, $dot:ty, $features:literal) => {
        $(#[$cfg])*
        mod $name {
            use super::*;
            use crate::integers::{Codes, Int8, Mxfp4, Nvfp4, Q4_0, Q5_0, Q8_0, kernel};

            #[target_feature(enable = $features)]
            unsafe fn quantise<C: Codes>(row: &[f32], steps: &mut [QueryStep]) {
                kernel::quantise::<$dot, C>(row, steps);
            }
            #[target_feature(enable = $features)]
            unsafe fn score<C: Codes, const STEPS: usize>(args: &Score<'_>) {
                // SAFETY: as the caller promises.
                unsafe { kernel::score::<$dot, C, STEPS>(args) }
            }
            #[target_feature(enable = $features)]
            unsafe fn accumulate<C: Codes, const STEPS: usize>(args: &Accumulate<'_>) {
                // SAFETY: as the caller promises.
                unsafe { kernel::accumulate::<$dot, C, STEPS>(args) }
            }
            #[target_feature(enable = $features)]
            unsafe fn score_many<C: Codes>(args: &Score<'_>, scratch: &mut [f32]) {
                // SAFETY: as the caller promises.
                unsafe { kernel::score_many::<$dot, C>(args, scratch) }
            }
            #[target_feature(enable = $features)]
            unsafe fn accumulate_many<C: Codes>(args: &Accumulate<'_>, scratch: &mut [f32]) {
                // SAFETY: as the caller promises.
                unsafe { kernel::accumulate_many::<$dot, C>(args, scratch) }
            }

            const fn kernels<C: Codes, const STEPS: usize>() -> RowKernels {
                RowKernels {
                    score: score::<C, STEPS>,
                    accumulate: accumulate::<C, STEPS>,
                    quantise: Some(quantise::<C>),
                    many: Many::Unpacked { score: score_many::<C>, accumulate: accumulate_many::<C> },
                }
            }

            fn of<C: Codes>(dim: usize, stored: usize) -> &'static RowKernels {
                if const { <$dot as dot::Dot>::MANY_REGISTERS } && dim == stored {
                    match dim / STEP {
                        2 => return const { &kernels::<C, 2>() },
                        4 => return const { &kernels::<C, 4>() },
                        8 => return const { &kernels::<C, 8>() },
                        _ => {}
                    }
                }
                const { &kernels::<C, 0>() }
            }

            pub(super) fn rows(format: RowFormat, dim: usize, stored: usize) -> Option<&'static RowKernels> {
                match format {
                    _ if !dim.is_multiple_of(STEP) => None,
                    RowFormat::Int8 => Some(of::<Int8>(dim, stored)),
                    RowFormat::Q8_0 => Some(of::<Q8_0>(dim, stored)),
                    RowFormat::Q5_0 => Some(of::<Q5_0>(dim, stored)),
                    RowFormat::Q4_0 => Some(of::<Q4_0>(dim, stored)),
                    RowFormat::Mxfp4 => Some(of::<Mxfp4>(dim, stored)),
                    RowFormat::Nvfp4 => Some(of::<Nvfp4>(dim, stored)),
                    _ => None,
                }
            }
        }
    };
}

products!(#[cfg(target_arch = "x86_64")] mod avx512vnni_products, dot::avx512::Vnni512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bitalg,gfni,avx2,fma");
products!(#[cfg(target_arch = "x86_64")] mod avxvnni_products, dot::avx2::Dot256<true>, "avxvnni,avx2,fma,f16c");
products!(#[cfg(target_arch = "x86_64")] mod avx2madd_products, dot::avx2::Dot256<false>, "avx2,fma,f16c");
products!(#[cfg(target_arch = "aarch64")] mod neondot_products, dot::neon::NeonDot, "neon,dotprod");

/// Integer products, and products of floats from a table.
#[cfg(target_arch = "x86_64")]
fn vnni_products(format: RowFormat, dim: usize, stored: usize) -> Option<&'static RowKernels> {
    const KERNELS: RowKernels = RowKernels {
        score: e4m3::score,
        accumulate: e4m3::accumulate,
        quantise: None,
        // More rows than for arithmetic on the bits of codes, which takes longer than the table (docs/adr/0026).
        many: Many::Decoded(16),
    };
    if format == RowFormat::Fp8E4m3 && dim.is_multiple_of(e4m3::CODES) {
        Some(&KERNELS)
    } else {
        avx512vnni_products::rows(format, dim, stored)
    }
}

/// Bfloat16 products for the rows that they suit, integer products for the rest.
#[cfg(target_arch = "x86_64")]
fn bf16_products(format: RowFormat, dim: usize, stored: usize) -> Option<&'static RowKernels> {
    const KERNELS: RowKernels = RowKernels {
        score: bf16::score,
        accumulate: bf16::accumulate,
        quantise: Some(bf16::quantise),
        // Products of pairs are faster than those of floats, however many rows there are.
        many: Many::AsFew,
    };
    if format == RowFormat::Fp8E4m3 && dim.is_multiple_of(e4m3::CODES) {
        Some(&KERNELS)
    } else {
        vnni_products(format, dim, stored)
    }
}
