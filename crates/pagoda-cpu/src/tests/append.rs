//! What `append` stores: every bit, and nowhere else.

use super::samples::Random;
use super::world::{self, ELEMENTS, rows};
use crate::{
    Arenas, Backend, Element, Error, F16_MAX, Isa, Layer, Overflow, PagedKv, Rows, SequenceTable, Transform,
    bf16_to_f32, decode_row, f16_to_f32, f32_to_bf16, f32_to_f16,
};
use half::{bf16, f16};
use pagoda_core::ids::{BlockId, BlockRef, Tier};
use pagoda_core::layout::{BlockLayout, LayerGeometry, RowFormat};
use pagoda_core::table::{Sight, SpanView};

const PAGE: usize = 16;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// A layer and memory of `pages` pages, full of `0xff`.
fn layer(geometry: LayerGeometry, pages: usize) -> (Layer, Vec<u64>, Vec<BlockRef>) {
    let layout = BlockLayout::new(&[geometry], PAGE as u32);
    let layer = Layer {
        geometry,
        layout: layout.layers[0],
        block_bytes: layout.block_bytes,
        page_size: PAGE as u32,
        num_q_heads: geometry.num_kv_heads,
        scale: 1.0,
        softcap: None,
        window: None,
        rope: None,
        derived: None,
        transform: Transform::default(),
    };
    let row = (0..pages as u32).rev().map(|i| BlockRef::new(Tier::Host, BlockId::new(i))).collect();
    (layer, vec![!0; (layout.block_bytes as usize * pages).div_ceil(8)], row)
}

fn geometry(heads: u32, k: (u32, RowFormat), v: (u32, RowFormat)) -> LayerGeometry {
    LayerGeometry { num_kv_heads: heads, head_dim: k.0, v_head_dim: v.0, k_format: k.1, v_format: Some(v.1) }
}

fn host(memory: &mut [u64]) -> Arenas {
    Arenas::new(std::ptr::null_mut(), memory.as_mut_ptr().cast())
}

fn bytes(memory: &[u64]) -> &[u8] {
    // SAFETY: words are bytes.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), memory.len() * 8) }
}

/// Rows of `dim` elements through `append` as K, as they are.
fn stored(
    isa: Isa,
    dim: usize,
    from: Element,
    to: RowFormat,
    input: &[u8],
    checked: bool,
) -> Result<Vec<u8>, Error> {
    stored_by(isa, dim, from, to, input, checked, false)
}

/// The same, perhaps rotated; each row is followed by its scales.
fn stored_by(
    isa: Isa,
    dim: usize,
    from: Element,
    to: RowFormat,
    input: &[u8],
    checked: bool,
    rotate_k: bool,
) -> Result<Vec<u8>, Error> {
    let tokens = input.len() / (from.bytes() * dim);
    let pages = tokens.div_ceil(PAGE);
    let (mut layer, mut memory, row) = layer(geometry(1, (dim as u32, to), (8, RowFormat::F16)), pages);
    layer.transform.rotate_k = rotate_k;
    let spans = [SpanView {
        first_page: 0,
        skip: 0,
        count: tokens as u32,
        position: 99,
        offset: 0,
        sight: Sight::Window,
    }];
    let table = SequenceTable { row: &row, spans: &spans, new_tokens: tokens as u32 };
    let zeros = vec![0u8; tokens * 16];
    let backend = Backend::new(2, false, Some(isa))?;
    let arenas = host(&mut memory);
    // SAFETY: the table names blocks of `memory`, and the arrays have a row for every token.
    unsafe {
        let (keys, values) = (rows(input, from, 1, dim), rows(&zeros, Element::F16, 1, 8));
        let kv = PagedKv { arenas: &arenas, layer: &layer, sequences: &[table] };
        backend.append(&kv, keys, Some(values), checked)?;
    }
    let plane = layer.layout.k;
    Ok((0..tokens)
        .flat_map(|t| {
            let block = row[t / PAGE].block().index() as usize * layer.block_bytes as usize;
            [plane.rows, plane.scales].map(|strip| {
                let size = strip.row_stride as usize;
                let start = block + strip.offset as usize + t % PAGE * size;
                bytes(&memory)[start..start + size].to_vec()
            })
        })
        .flatten()
        .collect())
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The same number, or NaN both.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Numbers around everything that can go wrong, and many others.
fn edges() -> Vec<f32> {
    let mut numbers =
        vec![f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::from_bits(1)];
    numbers.extend([f32::from_bits(0x7f80_0001), f32::from_bits(0x7f7f_8000), f32::from_bits(0x7f7f_7fff)]);
    for bits in (0..=u16::MAX).step_by(7) {
        let f = f16::from_bits(bits).to_f32();
        let half = f32::from_bits(f.to_bits().wrapping_add(0x1000));
        numbers.extend([f, half, half.next_up(), half.next_down(), bf16::from_bits(bits).to_f32()]);
        numbers.push(f32::from_bits(u32::from(bits) << 16 | 0x8000));
    }
    numbers.extend([65504.0, 65519.996, 65520.0, 65536.0, 5.96e-8, 2.98e-8, 2.9802326e-8]);
    let mut random = Random(1);
    numbers.extend((0..50_000).map(|_| f32::from_bits(random.next() as u32)));
    numbers.resize(numbers.len().next_multiple_of(72), -0.0);
    numbers
}

#[test]
fn numbers_convert_as_in_half() {
    for bits in 0..=u16::MAX {
        assert!(same(f16_to_f32(bits), f16::from_bits(bits).to_f32()), "{bits:#x}");
        assert!(same(bf16_to_f32(bits), bf16::from_bits(bits).to_f32()), "{bits:#x}");
    }
    for x in edges() {
        assert!(same(f16_to_f32(f32_to_f16(x)), f16::from_f32(x).to_f32()), "{x:e}");
        assert!(same(bf16_to_f32(f32_to_bf16(x)), bf16::from_f32(x).to_f32()), "{x:e}");
    }
}

#[test]
fn rows_convert_as_in_half() {
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let edges = edges();
    let edge_bytes: Vec<u8> = edges.iter().flat_map(|x| x.to_ne_bytes()).collect();
    for isa in isas() {
        let wide = floats(&stored(isa, 512, ELEMENTS[1], RowFormat::F32, &every, false).expect("append"));
        assert!((0..=u16::MAX).zip(&wide).all(|(bits, &x)| same(x, f16::from_bits(bits).to_f32())), "{isa}");
        let wide = floats(&stored(isa, 8, ELEMENTS[2], RowFormat::F32, &every, false).expect("append"));
        assert!((0..=u16::MAX).zip(&wide).all(|(bits, &x)| same(x, bf16::from_bits(bits).to_f32())), "{isa}");
        // 72 elements are four and a half vectors of 16.
        let f16s = words(&stored(isa, 72, ELEMENTS[0], RowFormat::F16, &edge_bytes, false).expect("append"));
        let bf16s =
            words(&stored(isa, 72, ELEMENTS[0], RowFormat::Bf16, &edge_bytes, false).expect("append"));
        for ((&x, a), b) in edges.iter().zip(f16s).zip(bf16s) {
            let limited = if x.is_nan() { x } else { x.clamp(-F16_MAX, F16_MAX) };
            assert!(same(f16::from_bits(a).to_f32(), f16::from_f32(limited).to_f32()), "{isa} {x:e} {a:#x}");
            assert!(same(bf16::from_bits(b).to_f32(), bf16::from_f32(x).to_f32()), "{isa} {x:e} {b:#x}");
        }
    }
}

#[test]
fn checked_names_what_does_not_fit() {
    for isa in isas() {
        for (to, largest, too_large) in [
            (RowFormat::F16, 65519.0, 65520.0),
            (RowFormat::Bf16, 3.389e38, 3.3961776e38),
            (RowFormat::F32, f32::MAX, f32::INFINITY),
        ] {
            for bad in [too_large, -too_large, f32::NAN, f32::NEG_INFINITY] {
                let mut numbers = vec![largest; 40 * 24];
                let encode =
                    |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
                assert!(stored(isa, 24, ELEMENTS[0], to, &encode(&numbers), true).is_ok(), "{isa} {to:?}");
                numbers[33 * 24 + 23] = bad;
                numbers[35 * 24] = bad;
                let error = stored(isa, 24, ELEMENTS[0], to, &encode(&numbers), true).expect_err("too large");
                assert_eq!(
                    error,
                    Error::Overflow(Overflow { token: 33, head: 0, value: false }),
                    "{isa} {to:?} {bad}"
                );
                assert!(stored(isa, 24, ELEMENTS[0], to, &encode(&numbers), false).is_ok());
            }
        }
    }
    let error = Overflow { token: 3, head: 1, value: true };
    assert_eq!(error.to_string(), "v[3, 1] has a number that its row format cannot hold");
}

#[test]
fn what_is_out_of_range_is_limited_before_it_is_rotated() {
    const LIMIT: f32 = 8_388_608.0;
    let dim = 160;
    let rotated = |isa, format, row: &[f32], checked| {
        let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_ne_bytes()).collect();
        stored_by(isa, dim, ELEMENTS[0], format, &bytes, checked, true)
    };
    let mut random = Random(3);
    for format in [RowFormat::Int8, RowFormat::Q8_0, RowFormat::Q5_0, RowFormat::Q4_0, RowFormat::Fp8E4m3] {
        let row = random.normals(dim);
        for bad in [f32::INFINITY, f32::NEG_INFINITY, 3e38, LIMIT.next_up()] {
            for count in [1, 2, dim] {
                let (mut given, mut limited) = (row.clone(), row.clone());
                for i in 0..count {
                    let sign = if i % 3 == 1 { -1.0 } else { 1.0 };
                    (given[i * 7 % dim], limited[i * 7 % dim]) =
                        (sign * bad, (sign * bad).clamp(-LIMIT, LIMIT));
                }
                let mut first = None;
                for isa in isas() {
                    let is = rotated(isa, format, &given, false).expect("append");
                    assert_eq!(
                        is,
                        rotated(isa, format, &limited, false).expect("append"),
                        "{isa} {format:?} {bad}"
                    );
                    assert_eq!(*first.get_or_insert(is.clone()), is, "{isa} {format:?} {bad}");
                    let (codes, scales) = is.split_at(format.row_bytes(dim as u32) as usize);
                    let mut numbers = vec![0.0; dim];
                    decode_row(format, codes, scales, &mut numbers);
                    assert!(numbers.iter().all(|x| x.is_finite()), "{isa} {format:?} {bad}");
                    let error = rotated(isa, format, &given, true).expect_err("out of range");
                    assert_eq!(error, Error::Overflow(Overflow { token: 0, head: 0, value: false }));
                }
                // 160 elements are five blocks of 32: one row with NaN is NaN in one of them, or in all.
                given[0] = f32::NAN;
                for isa in isas() {
                    let is = rotated(isa, format, &given, false).expect("append");
                    let (codes, scales) = is.split_at(format.row_bytes(dim as u32) as usize);
                    let mut numbers = vec![0.0; dim];
                    decode_row(format, codes, scales, &mut numbers);
                    assert!(numbers[..32].iter().all(|x| x.is_nan()), "{isa} {format:?} {bad}");
                    assert!(rotated(isa, format, &given, true).is_err());
                }
            }
        }
        // Small enough for the scales of all of them, once it is spread.
        let mut largest = row;
        largest[5] = 1000.0;
        for isa in isas() {
            assert!(rotated(isa, format, &largest, true).is_ok(), "{isa} {format:?}");
        }
    }
}

/// A batch of sequences with strided, interleaved inputs: every slot gets its row, nothing else changes.
#[test]
fn rows_go_to_their_slots_and_nowhere_else() {
    let (heads, k_dim, v_dim) = (3usize, 24usize, 40usize);
    for isa in isas() {
        for threads in [1, 3] {
            let geometry = geometry(3, (24, RowFormat::F32), (40, RowFormat::Bf16));
            let (layer, mut memory, row) = layer(geometry, 60);
            // Old and new tokens: a span that begins inside a page, one that shares its last page, a prefill.
            let spans_a = [
                SpanView { first_page: 0, skip: 5, count: 20, position: 99, offset: 7, sight: Sight::Window },
                SpanView { first_page: 1, skip: 9, count: 4, position: 99, offset: 0, sight: Sight::Window },
            ];
            let spans_b = [SpanView {
                first_page: 0,
                skip: 0,
                count: 500,
                position: 99,
                offset: 0,
                sight: Sight::Window,
            }];
            let tables = [
                SequenceTable { row: &row[..2], spans: &spans_a, new_tokens: 6 },
                SequenceTable { row: &[], spans: &[], new_tokens: 0 },
                SequenceTable { row: &row[10..], spans: &spans_b, new_tokens: 471 },
            ];
            // The page and row of every new token.
            let slots: Vec<(BlockRef, usize)> = [(1, 7), (1, 8), (1, 9), (1, 10), (1, 11), (1, 12)]
                .into_iter()
                .map(|(page, r)| (row[page], r))
                .chain((29..500).map(|t| (row[10 + t / PAGE], t % PAGE)))
                .collect();
            // One fused array: [token][K heads, V heads], heads apart.
            let stride = heads * (k_dim + v_dim) + 5;
            let mut random = Random(2);
            let fused: Vec<f32> = random.normals(slots.len() * stride);
            let part = |offset: usize, dim: usize| Rows {
                ptr: fused[offset..].as_ptr().cast(),
                element: Element::F32,
                token_stride: stride as isize * 4,
                head_stride: dim as isize * 4,
            };
            let backend = Backend::new(threads, false, Some(isa)).expect("supported");
            let arenas = host(&mut memory);
            // SAFETY: the tables name blocks of `memory`, and `fused` has a row for every token and head.
            unsafe {
                let (keys, values) = (part(0, k_dim), part(heads * k_dim, v_dim));
                let kv = PagedKv { arenas: &arenas, layer: &layer, sequences: &tables };
                backend.append(&kv, keys, Some(values), true).expect("append");
            }
            let mut expected = vec![0xffu8; memory.len() * 8];
            for (token, &(block, r)) in slots.iter().enumerate() {
                let base = block.block().index() as usize * layer.block_bytes as usize;
                let input = &fused[token * stride..];
                for head in 0..heads {
                    let mut put = |plane: pagoda_core::layout::Plane, bytes: Vec<u8>| {
                        let at = base as u64
                            + plane.rows.offset
                            + head as u64 * plane.rows.head_stride
                            + r as u64 * plane.rows.row_stride;
                        expected[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                    };
                    put(layer.layout.k, world::encode(&input[head * k_dim..][..k_dim], Element::F32));
                    let v = &input[heads * k_dim + head * v_dim..][..v_dim];
                    put(layer.layout.v, world::encode(v, Element::Bf16));
                }
            }
            assert!(bytes(&memory) == expected, "{isa} {threads}");
        }
    }
}

#[test]
fn contradictions_are_refused() {
    let backend = Backend::new(1, false, None).expect("supported");
    let good = geometry(2, (16, RowFormat::F16), (16, RowFormat::F16));
    let (layer, mut memory, row) = layer(good, 2);
    let attempt = |layer: &Layer, row: &[BlockRef], span: SpanView, new_tokens: u32, arenas: &Arenas| {
        let table = SequenceTable { row, spans: &[span], new_tokens };
        let nothing = rows(&[], Element::F16, 2, 16);
        let kv = PagedKv { arenas, layer, sequences: &[table] };
        // SAFETY: refused before anything is read.
        unsafe { backend.append(&kv, nothing, Some(nothing), true) }.expect_err("refused").to_string()
    };
    let arenas = host(&mut memory);
    let span =
        |skip, count| SpanView { first_page: 1, skip, count, position: 99, offset: 0, sight: Sight::Window };
    assert_eq!(
        attempt(&layer, &row, span(1, 16), 1, &arenas),
        "sequence 0 of the batch needs 3 pages and has 2"
    );
    assert_eq!(
        attempt(&layer, &row, span(0, 3), 4, &arenas),
        "sequence 0 of the batch needs 4 tokens and has 3"
    );
    let with = |change: fn(&mut Layer)| {
        let mut layer = layer.clone();
        change(&mut layer);
        attempt(&layer, &row, span(0, 3), 3, &arenas)
    };
    assert!(with(|l| l.geometry.head_dim = 20).starts_with("head_dim is 20;"));
    assert!(with(|l| l.geometry.v_head_dim = 1032).starts_with("v_head_dim is 1032;"));
    assert!(
        with(|l| (l.geometry.v_format, l.geometry.v_head_dim) = (None, 24)).starts_with("v_head_dim is 24;")
    );
    assert!(with(|l| l.num_q_heads = 3).starts_with("num_q_heads is 3 with num_kv_heads 2;"));
    assert!(with(|l| l.page_size = 24).starts_with("page_size is 24;"));
    assert!(
        with(|l| l.rope = Some(crate::Rope { inv_freq: vec![1.0; 9], interleaved: false }))
            .starts_with("rope")
    );
    let missing = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    assert_eq!(Backend::new(1, false, Some(missing)).err(), Some(Error::Unsupported(missing)));
}
