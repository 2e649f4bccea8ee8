//! One vector type per instruction set behind one small trait, and the table of kernels compiled for each.
//!
//! The kernels are written once, generic over [`Simd`] and always inlined. `kernels!` instantiates them inside
//! functions that enable the features of an instruction set, so the intrinsics below them inline too. Only the
//! table knows which functions those are: a [`Kernels`] is handed out for instruction sets this CPU has.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16;
pub(crate) mod dot;
#[cfg(target_arch = "x86_64")]
mod e4m3;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod scalar;

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

use pagoda_core::layout::RowFormat;

use crate::decoded::{self, Decode, Decoders, Multiply};
use crate::derived::{self, Derive, Turn};
use crate::integers::{self, QueryStep, STEP};
use crate::kernel::{self, ALIGN, Accumulate, Score};
use crate::rows::Element;
use crate::softmax::{self, Fold, Softmax};
use crate::transform;

/// An instruction set that attention can run on. Those with dot products of integers use them for rows that are stored as
/// integers (docs/adr/0013); everything else is as in the one that they add to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// [`Avx512Vnni`](Self::Avx512Vnni) with the dot products of BF16, for rows of fp8_e4m3: AMD's cores multiply two numbers
    /// in the time of one, Intel's in more than the time of two.
    Avx512Bf16,
    /// [`Avx512`](Self::Avx512) with the dot products of VNNI, which VBMI, BITALG and GFNI prepare.
    Avx512Vnni,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// [`Avx2`](Self::Avx2) with the dot products of AVX-VNNI.
    AvxVnni,
    /// [`Avx2`](Self::Avx2) with its own dot products.
    Avx2Madd,
    /// AVX2, FMA and F16C.
    Avx2,
    /// [`Neon`](Self::Neon) with dot products (FEAT_DotProd).
    NeonDot,
    /// Advanced SIMD of arm64.
    Neon,
    /// Portable Rust.
    Scalar,
}

impl Isa {
    /// Every instruction set, best first.
    pub const ALL: [Self; 9] = [
        Self::Avx512Bf16,
        Self::Avx512Vnni,
        Self::Avx512,
        Self::AvxVnni,
        Self::Avx2Madd,
        Self::Avx2,
        Self::NeonDot,
        Self::Neon,
        Self::Scalar,
    ];

    /// The best instruction set of this CPU.
    pub fn detect() -> Self {
        let pays = |isa| isa != Self::Avx512Bf16 || Cpu::detect() != Cpu::Intel;
        Self::ALL.into_iter().find(|&isa| isa.is_supported() && pays(isa)).unwrap_or(Self::Scalar)
    }

    /// Whether this CPU has it.
    pub fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => is_x86_feature_detected!("avx512bf16") && Self::Avx512Vnni.is_supported(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512bitalg")
                    && is_x86_feature_detected!("gfni")
                    && Self::Avx512.is_supported()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Self::Avx2.is_supported()
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => is_x86_feature_detected!("avxvnni") && Self::Avx2.is_supported(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 | Self::Avx2Madd => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod") && Self::Neon.is_supported(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Scalar => true,
            _ => false,
        }
    }

    /// Whether int8, q8_0, q5_0, q4_0, mxfp4 and nvfp4 rows are multiplied as integers.
    pub fn multiplies_integers(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Avx512Vnni | Self::AvxVnni | Self::Avx2Madd | Self::NeonDot)
    }

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

/// What a CPU's instruction sets do not tell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cpu {
    Intel,
    /// AMD, from Zen 5 on.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "never found there"))]
    Zen5,
    Other,
}

impl Cpu {
    /// The CPU that this runs on.
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::__cpuid;
            // Cached: a virtual machine takes a microsecond to answer.
            static CPU: LazyLock<Cpu> = LazyLock::new(|| {
                let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
                let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
                match [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat().as_slice() {
                    b"GenuineIntel" => Cpu::Intel,
                    b"AuthenticAMD" if family >= 26 => Cpu::Zen5,
                    _ => Cpu::Other,
                }
            });
            *CPU
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::Other
    }
}

/// Whether lines of rows in pages of whole tiles are prefetched in order, from one place: see docs/adr/0025. Integer products
/// heed it only for bytes.
pub(crate) fn asks_in_order(format: RowFormat) -> bool {
    match Cpu::detect() {
        Cpu::Intel => false,
        Cpu::Zen5 => !matches!(format, RowFormat::Int8 | RowFormat::Q8_0),
        Cpu::Other => true,
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512Bf16 => "avx512bf16",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512 => "avx512",
            Self::AvxVnni => "avxvnni",
            Self::Avx2Madd => "avx2madd",
            Self::Avx2 => "avx2",
            Self::NeonDot => "neondot",
            Self::Neon => "neon",
            Self::Scalar => "scalar",
        })
    }
}

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
const PRODUCT_ROWS: usize = 16;

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

/// A vector of f32 lanes. Every method may only run on a CPU that has the instruction set.
pub(crate) trait Simd {
    /// Lanes of a vector: 4, 8 or 16.
    const LANES: usize;
    /// Vectors that are in registers at once: 16 or 32.
    const REGISTERS: usize;
    /// The most query rows that share one conversion of a K or V vector in registers: 4 or 6.
    const ROWS: usize;
    /// The vector.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` if either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Nearest integers, ties to even.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `v * 2^n` for integers `n` in -64..=8.
    unsafe fn scale(v: Self::V, n: Self::V) -> Self::V;
    /// Swaps lanes whose numbers differ in `H` alone, 1 to half of the lanes.
    unsafe fn swap<const H: usize>(v: Self::V) -> Self::V;
    /// Transposes `LANES` vectors: lane `i` of vector `j` goes to lane `j` of vector `i`. Vectors after these are left alone.
    unsafe fn transpose(v: &mut [Self::V; ALIGN]);
    /// Writes the largest lanes of four vectors.
    unsafe fn max_quad(v: [Self::V; 4], out: *mut f32);
    /// Writes the lane sums of `v[r][0..4]` to `out + r * stride`, added in an order that does not depend on `R`.
    unsafe fn sum_quads<const R: usize>(v: [[Self::V; 4]; R], out: *mut f32, stride: usize);
    /// Whether every lane has a magnitude below `bound`.
    unsafe fn all_below(v: Self::V, bound: f32) -> bool;

    unsafe fn load_f16(p: *const u8) -> Self::V;
    unsafe fn load_bf16(p: *const u8) -> Self::V;
    /// Rounds to nearest even.
    unsafe fn store_f16(p: *mut u8, v: Self::V);
    /// Rounds to nearest even.
    unsafe fn store_bf16(p: *mut u8, v: Self::V);

    /// 8-bit integers.
    unsafe fn load_i8(p: *const u8) -> Self::V;
    /// E4M3, times 2^-8: as binary16 with the same bits of exponent, whose bias is 15 where that of E4M3 is 7.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// One binary16, in all lanes.
    unsafe fn splat_f16(p: *const u8) -> Self::V;
    /// The lower (or `high`) nibble of each of LANES bytes, as an entry of a table.
    unsafe fn lookup(p: *const u8, high: bool, table: &[f32; 16]) -> Self::V;
    /// Lane `i` where bit `i` is set, else 0.
    unsafe fn masked(bits: u32, v: Self::V) -> Self::V;

    /// Loads 8 elements where a vector has 16 lanes; the other lanes are zero.
    unsafe fn half_f32(p: *const u8) -> Self::V;
    unsafe fn half_f16(p: *const u8) -> Self::V;
    unsafe fn half_bf16(p: *const u8) -> Self::V;

    /// Prefetches the cache line of `p`, which need not be mapped; on x86 into L2, because L1 cannot have enough misses under
    /// way to keep memory busy.
    unsafe fn prefetch(p: *const u8);
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
