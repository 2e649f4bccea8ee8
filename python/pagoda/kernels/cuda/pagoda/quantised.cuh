// Quantised row formats as attention reads them. A row is codes and, stored apart from them, scales that some of its elements share.
//
// Codes are small numbers that 16-bit elements hold exactly. A product is taken with the codes, and its factor or its result is
// multiplied by the scale; or with the element itself, where that is exact in 16 bits. Keys become f16, which takes the fewest
// instructions; values become bf16, because weights times scales have the range of float.
//
// Tensor cores may take the elements of a K row in any order, if those of queries are in the same one, and columns of V in any order
// if results are sorted afterwards. So a word of codes is taken as it lies in shared memory: of the 4 bytes that ldmatrix gives a
// lane, bytes 0 and 2 are one pair and bytes 1 and 3 another. Elements are counted in steps of 16, one such word for each of 4
// lanes; where bytes hold two codes the lower ones are a step and the upper ones the next.
#pragma once

#include <pagoda/formats.cuh>
#include <pagoda/shared_rows.cuh>

namespace pagoda {

/// Elements of a step.
constexpr int STEP = 16;

/// The element of a row that is in place `place` of the order above, and the column of V that place `place` of a result has where codes
/// are transposed as they are stored.
__device__ constexpr int element_at(int place) { return place / 16 * 16 + place % 8 / 2 * 4 + place % 2 * 2 + place % 16 / 8; }
__device__ constexpr int column_at(int place) { return place / 16 * 16 + place % 8 * 2 + place % 16 / 8; }

/// The place of an element in that order.
__device__ constexpr int place_of(int element) { return element / 16 * 16 + element % 2 * 8 + element % 16 / 4 * 2 + element % 4 / 2; }

/// What all quantised formats have. Each also has:
/// BITS: of a row for each element. PARTS: codes, or parts of codes, that a byte holds. BLOCK: elements that share a scale; 0 where all of
/// a row do.
/// Word: what a decoder takes. along(codes, rows, row, chunk, lane) makes it of word `lane` of a chunk of 16 bytes of a row of DIM elements,
/// and across(codes, rows, row, chunk, lane) of bytes 2 * lane and the next of such chunks of that row and the next.
/// Decoder<Element>: pair(word, step, odd) is what the word stands for in that step, without the scale; any codes are finite.
/// SCALE_BYTES: of a scale; scale_of(bits) is what those stand for that end in it.
/// FOLDS: whether any code times any scale is exact in Keys, in units of theirs, and in Values.
/// Codes come in units of unit(), a power of two, which queries make up for, and results.
struct Quantised {
    using Keys = F16;
    using Values = BF16;
    using Word = uint32;
    static constexpr bool QUANTISED = true, FOLDS = false;

    template <class Rows, int DIM>
    __device__ static Word along(uint32 codes, const uint8*, int, int, int) {
        return codes;
    }
    template <class Rows, int DIM>
    __device__ static Word across(uint32 codes, const uint8*, int, int, int) {
        return codes;
    }
};

/// What values are multiplied with while they are summed: the unit of codes, or what their weights are.
template <class Format>
__device__ float unit_of_values() {
    if constexpr (Format::QUANTISED) {
        return Format::template Decoder<typename Format::Values::Element>::unit();
    } else {
        return 1 << Format::Values::LIFT;
    }
}

/// A scale of a row.
template <class Format>
__device__ float scale_at(const uint8* scales, int block) {
    const uint8* const source = scales + block * Format::SCALE_BYTES;
    if constexpr (Format::SCALE_BYTES == 4) {
        return Format::scale_of(*reinterpret_cast<const uint32*>(source));
    } else if constexpr (Format::SCALE_BYTES == 2) {
        return Format::scale_of(*reinterpret_cast<const unsigned short*>(source));
    } else {
        return Format::scale_of(*source);
    }
}

/// What an E4M3 code that has no sign stands for. By way of f16, which has it 2^8 times too small, subnormal ones as well.
__device__ inline float from_e4m3(uint32 code) { return Pair<__half>::low(code == 0x7f ? 0x7e00 : code << 7) * 256.0f; }

/// The smallest f16 above 0: integers up to 1023 are as many of it, bit for bit.
constexpr float F16_LEAST = 5.9604644775390625e-8f;

/// Two elements that are alike.
__device__ constexpr uint32 twice(uint32 element) { return element << 16 | element; }

/// A row has one scale, a binary32.
struct RowScale : Quantised {
    static constexpr int BLOCK = 0, UNIT = 16, SCALE_BYTES = 4;
    __device__ static constexpr int scale_bytes(int) { return SCALE_BYTES; }
    __device__ static float scale_of(uint32 bits) { return __uint_as_float(bits); }
};

/// Each 32 elements have a scale, a binary16.
struct BlockScales : Quantised {
    static constexpr int BLOCK = 32, UNIT = 32, SCALE_BYTES = 2;
    __device__ static constexpr int scale_bytes(int dim) { return dim / BLOCK * SCALE_BYTES; }
    __device__ static float scale_of(uint32 bits) { return Pair<__half>::low(bits); }
};

/// Bytes that are integers from -128 to 127.
template <class Element>
struct IntegerDecoder;

template <>
struct IntegerDecoder<__half> {
    const uint32 offset = held(twice(0x8080));

    __device__ static float unit() { return F16_LEAST; }
    __device__ uint32 pair(uint32 word, int, int odd) const {
        // With its sign turned over a byte is 128 more than its number; by itself it is so many of the smallest f16.
        return add_pair(__byte_perm(word ^ 0x80808080u, 0, odd ? 0x4341 : 0x4240), offset, __half());
    }
};

template <>
struct IntegerDecoder<__nv_bfloat16> {
    const uint32 scale = held(twice(0x7f00)), offset = held(twice(0xc000));

    __device__ static float unit() { return 0.015625f; }
    __device__ uint32 pair(uint32 word, int, int odd) const {
        // So many of the smallest bf16, 2^-133. 0x7f00 is 2^127, 0xc000 is -128 units.
        return fuse_pair(__byte_perm(word ^ 0x80808080u, 0, odd ? 0x4341 : 0x4240), scale, offset, __nv_bfloat16());
    }
};

/// Halves of bytes, of which each is 8 more than its number.
template <class Element>
struct NibbleDecoder;

template <>
struct NibbleDecoder<__half> {
    const uint32 offset = held(twice(0x8008)), sixteenth = held(twice(0x2c00));

    __device__ static float unit() { return F16_LEAST; }
    __device__ uint32 pair(uint32 word, int step, int odd) const {
        if (odd) word >>= 8;
        if (step == 0) return add_pair(word & twice(0x000f), offset, __half());
        // 16 times so many: 0x2c00 is 1/16.
        return fuse_pair(word & twice(0x00f0), sixteenth, offset, __half());
    }
};

template <>
struct NibbleDecoder<__nv_bfloat16> {
    const uint32 scale = held(twice(0x7f00)), sixteenth = held(twice(0x7d00)), offset = held(twice(0xbe00));

    __device__ static float unit() { return 0.015625f; }
    __device__ uint32 pair(uint32 word, int step, int odd) const {
        if (odd) word >>= 8;
        // 0x7d00 is 2^123, 0xbe00 is -8 units.
        return fuse_pair(word & twice(step == 0 ? 0x000f : 0x00f0), step == 0 ? scale : sixteenth, offset, __nv_bfloat16());
    }
};

/// Bytes that are 16 more than their numbers: 4 bits of each lie together with those of the next step, and the fifth apart.
struct FiveBits {
    uint32 steps[2];

    FiveBits() = default;
    /// The fifth bits of the first step are the 4 lowest of `fifths`, those of the second 4 from bit 16 on.
    __device__ FiveBits(uint32 halves, uint32 fifths) : steps{join(halves, fifths), join(halves >> 4, fifths >> 16)} {}

    /// Bit i of `fifths` becomes bit 4 of byte i: there, no other bit and power of two meet.
    __device__ static uint32 join(uint32 halves, uint32 fifths) {
        return (halves & 0x0f0f0f0fu) | ((fifths & 0xf) * 0x02040810u & 0x10101010u);
    }
    __device__ uint32 pair(int step, int odd) const { return __byte_perm(steps[step], 0, odd ? 0x4341 : 0x4240); }
};

template <class Element>
struct FiveBitDecoder;

template <>
struct FiveBitDecoder<__half> {
    const uint32 offset = held(twice(0x8010));

    __device__ static float unit() { return F16_LEAST; }
    __device__ uint32 pair(const FiveBits& word, int step, int odd) const { return add_pair(word.pair(step, odd), offset, __half()); }
};

template <>
struct FiveBitDecoder<__nv_bfloat16> {
    const uint32 scale = held(twice(0x7f00)), offset = held(twice(0xbe80));

    __device__ static float unit() { return 0.015625f; }
    __device__ uint32 pair(const FiveBits& word, int step, int odd) const {
        // 0xbe80 is -16 units.
        return fuse_pair(word.pair(step, odd), scale, offset, __nv_bfloat16());
    }
};

/// Bytes that are E4M3. Exponent and fraction are moved to where the element has them, which gives the number times a power of
/// two; subnormal ones come out right. NaN is 480 then: a row with one has a scale that is NaN.
template <class Element>
struct E4m3Decoder;

template <>
struct E4m3Decoder<__half> {
    const uint32 sign = held(twice(0x8000));

    __device__ static float unit() { return 0.00390625f; }
    __device__ uint32 pair(uint32 word, int, int odd) const {
        if (!odd) word <<= 8;
        return (word & sign) | (word >> 1 & twice(0x3f80));
    }
};

template <>
struct E4m3Decoder<__nv_bfloat16> {
    const uint32 sign = held(twice(0x8000)), scale = held(twice(0x7b80));

    __device__ static float unit() { return 1.0f; }
    __device__ uint32 pair(uint32 word, int, int odd) const {
        if (!odd) word <<= 8;
        // 0x7b80 is 2^120.
        return fuse_pair((word & sign) | (word >> 4 & twice(0x07f0)), scale, 0, __nv_bfloat16());
    }
};

/// Halves of bytes that are E2M1, moved in the same way: the sign to bit 15, exponent and fraction to bit `place` and above.
__device__ inline uint32 spread_e2m1(uint32 word, int step, int odd, int place) {
    const int first = 8 * odd + 4 * step;
    const uint32 rest = first > place ? word >> (first - place) : word << (place - first);
    return (word << (12 - first) & twice(0x8000)) | (rest & twice(7u << place));
}

template <class Element>
struct E2m1Decoder;

template <>
struct E2m1Decoder<__half> {
    __device__ static float unit() { return 6.103515625e-5f; }
    __device__ uint32 pair(uint32 word, int step, int odd) const { return spread_e2m1(word, step, odd, 9); }
};

template <>
struct E2m1Decoder<__nv_bfloat16> {
    __device__ static float unit() { return 1.0f; }
    __device__ uint32 pair(uint32 word, int step, int odd) const {
        // 0x7e80 is 2^126.
        return fuse_pair(spread_e2m1(word, step, odd, 6), twice(0x7e80), 0, __nv_bfloat16());
    }
};

struct Fp8E4m3 : RowScale {
    static constexpr int BITS = 8, PARTS = 1;
    template <class Element>
    using Decoder = E4m3Decoder<Element>;
};

struct Int8 : RowScale {
    static constexpr int BITS = 8, PARTS = 1;
    template <class Element>
    using Decoder = IntegerDecoder<Element>;
};

struct Q8_0 : BlockScales {
    static constexpr int BITS = 8, PARTS = 1;
    template <class Element>
    using Decoder = IntegerDecoder<Element>;
};

/// The fifth bits of a row follow its halves of bytes: 32 bits for each 32 elements, in their order.
struct Q5_0 : BlockScales {
    using Word = FiveBits;
    static constexpr int BITS = 5, PARTS = 2;
    template <class Element>
    using Decoder = FiveBitDecoder<Element>;

    template <class Rows, int DIM>
    __device__ static Word along(uint32 codes, const uint8* rows, int row, int chunk, int lane) {
        return {codes, fifths<Rows, DIM>(rows, row, chunk) >> 4 * lane};
    }
    template <class Rows, int DIM>
    __device__ static Word across(uint32 codes, const uint8* rows, int row, int chunk, int lane) {
        const uint32 low = fifths<Rows, DIM>(rows, row, chunk) >> 2 * lane, high = fifths<Rows, DIM>(rows, row + 1, chunk) >> 2 * lane;
        return {codes, (low & twice(3)) | (high & twice(3)) << 2};
    }
    template <class Rows, int DIM>
    __device__ static uint32 fifths(const uint8* rows, int row, int chunk) {
        return *reinterpret_cast<const uint32*>(rows + Rows::place_of_byte(row, DIM / 2 + chunk * 4));
    }
};

struct Q4_0 : BlockScales {
    static constexpr int BITS = 4, PARTS = 2;
    template <class Element>
    using Decoder = NibbleDecoder<Element>;
};

struct E2m1 : Quantised {
    static constexpr int BITS = 4, PARTS = 2, UNIT = 32;
    template <class Element>
    using Decoder = E2m1Decoder<Element>;
};

/// Each 32 elements have a scale, an E8M0: the exponent of a binary32, but for NaN.
struct Mxfp4 : E2m1 {
    static constexpr int BLOCK = 32, SCALE_BYTES = 1;
    __device__ static constexpr int scale_bytes(int dim) { return dim / BLOCK; }
    __device__ static float scale_of(uint32 bits) {
        const uint32 code = bits & 0xff;
        // 2^-127 becomes 0, as it would in a product.
        return __uint_as_float(code << 23 | (code == 255 ? 0x7fc00000u : 0));
    }
};

/// Each 16 elements have a scale, an E4M3. Of a product 6 bits count, and it is a multiple of 2^-10 up to 2688: in units of keys of 2^-24.
struct Nvfp4 : E2m1 {
    static constexpr bool FOLDS = true;
    static constexpr int BLOCK = 16, SCALE_BYTES = 1;
    __device__ static constexpr int scale_bytes(int dim) { return dim / BLOCK; }
    __device__ static float scale_of(uint32 bits) { return from_e4m3(bits & 0xff); }
};

/// Rows of a format as products take them: codes as elements of type `As`, in the order above, and behind all rows the scales as floats, of
/// each block of elements those of all rows; or times their scales, where these fold. What is not quantised is taken as it is stored.
/// SCALED: whether there are scales.
template <class Format, class As, int DIM, int ROWS, bool QUANTISED = Format::QUANTISED>
struct DecodedRows {
    static constexpr bool SCALED = false;
    static constexpr int BLOCKS = 1, BYTES = 0;
    __device__ static float2 scales(const uint8*, int, int) { return {1.0f, 1.0f}; }
};

template <class Format, class As, int DIM, int ROWS>
struct DecodedRows<Format, As, DIM, ROWS, true> {
    static constexpr bool SCALED = !Format::FOLDS;
    static constexpr int BLOCKS = Format::BLOCK == 0 || !SCALED ? 1 : DIM / Format::BLOCK;
    using Rows = SharedRows<DIM * 2>;
    static constexpr int SCALES = Rows::bytes(ROWS), BYTES = SCALES + (SCALED ? BLOCKS * ROWS * 4 : 0);

    /// By THREADS threads. Rows lie as Stored has them, with scales of STORED elements.
    template <int THREADS, class Stored, int STORED>
    __device__ static void decode(uint8* target, const uint8* rows, const uint8* scales) {
        constexpr int STEPS = Format::PARTS, PIECES = DIM / STEP / STEPS;
        using Element = typename As::Element;
        const typename Format::template Decoder<Element> decoder;
#pragma unroll 1
        for (int i = thread_here() % THREADS; i < ROWS * PIECES; i += THREADS) {
            // Eight threads at a time have eight rows.
            const int row = i / 8 / PIECES * 8 + i % 8, piece = i / 8 % PIECES;
            const uint4 codes = *reinterpret_cast<const uint4*>(rows + Stored::place(row, piece));
            const auto word = [=](uint32 four, int lane) { return Format::template along<Stored, STORED>(four, rows, row, piece, lane); };
            const typename Format::Word words[4] = {word(codes.x, 0), word(codes.y, 1), word(codes.z, 2), word(codes.w, 3)};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    uint4 four = make_uint4(decoder.pair(words[0], step, odd), decoder.pair(words[1], step, odd),
                                            decoder.pair(words[2], step, odd), decoder.pair(words[3], step, odd));
                    if constexpr (!SCALED) {
                        static_assert(Format::BLOCK == STEP, "a step has one scale");
                        const float scale = scale_at<Format>(scales + row * Format::scale_bytes(STORED), piece * STEPS + step);
                        const uint32 both = Pair<Element>::pack(scale, scale);
                        four = make_uint4(fuse_pair(four.x, both, 0, Element()), fuse_pair(four.y, both, 0, Element()),
                                          fuse_pair(four.z, both, 0, Element()), fuse_pair(four.w, both, 0, Element()));
                    }
                    *reinterpret_cast<uint4*>(target + Rows::place(row, (piece * STEPS + step) * 2 + odd)) = four;
                }
            }
        }
        if constexpr (SCALED) {
            float* const floats = reinterpret_cast<float*>(target + SCALES);
#pragma unroll 1
            for (int i = thread_here() % THREADS; i < ROWS * BLOCKS; i += THREADS) {
                floats[i] = scale_at<Format>(scales + i % ROWS * Format::scale_bytes(STORED), i / ROWS);
            }
        }
    }

    /// The scale of a block of elements of a row.
    __device__ static float scale(const uint8* decoded, int block, int row) {
        if (!SCALED) return 1.0f;
        return *reinterpret_cast<const float*>(decoded + SCALES + (block * ROWS + row) * 4);
    }

    /// The scales of a block of elements of `row`, which is even, and of the next row.
    __device__ static float2 scales(const uint8* decoded, int block, int row) {
        if (!SCALED) return {1.0f, 1.0f};
        return *reinterpret_cast<const float2*>(decoded + SCALES + (block * ROWS + row) * 4);
    }
};

}  // namespace pagoda
