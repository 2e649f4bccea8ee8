//! The instruction sets of a CPU, and what else of it decides which kernels are best.

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

use pagoda_core::layout::RowFormat;

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
