//! Attention against the plain reference, over random shapes.

use super::samples::Random;
use super::world::{Cut, ELEMENTS, World};
use crate::{Backend, Isa, Rope, Transform};
use pagoda_core::layout::{LayerGeometry, RowFormat};
use pagoda_core::table::Sight;
use proptest::prelude::*;

/// A random length that likes the edges of pages.
fn length(random: &mut Random, page: usize) -> usize {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => page - 1,
        3 => page,
        4 => page + 1,
        _ => random.below(300),
    }
}

/// A format that rows of `dim` elements may have.
fn format(random: &mut Random, dim: u32) -> RowFormat {
    let fitting: Vec<_> = RowFormat::ALL.into_iter().filter(|f| dim.is_multiple_of(f.unit())).collect();
    random.pick(&fitting)
}

fn random_world(random: &mut Random) -> World {
    let dims = [8, 16, 24, 32, 40, 64, 72, 80, 104, 128, 136, 192, 256];
    let num_kv_heads = 1 + random.below(3) as u32;
    let group = random.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33]);
    let head_dim = random.pick(&dims);
    let v_head_dim = if random.below(3) == 0 { random.pick(&dims) } else { head_dim };
    let mut geometry = LayerGeometry {
        num_kv_heads,
        head_dim,
        v_head_dim,
        k_format: format(random, head_dim),
        v_format: Some(format(random, v_head_dim)),
    };
    if random.below(3) == 0 {
        geometry.v_format = None;
        geometry.v_head_dim = head_dim.min(v_head_dim).next_multiple_of(geometry.k_format.unit());
    }
    let page = random.pick(&[8, 16, 32, 64, 128, 256]);
    let blocks = 8 * (300 / page + 3);
    let mut world = World::new(random, geometry, num_kv_heads * group, page, blocks);
    if random.below(2) == 0 {
        world.layer.window = Some(random.pick(&[1, 2, 7, 63, 64, 65, 130, 1000]));
    }
    if geometry.v_format.is_some() && random.below(3) == 0 {
        let centered = random.below(2) == 0;
        let center: Vec<f32> = random.normals((num_kv_heads * head_dim) as usize);
        world.layer.transform = Transform {
            center: if centered { center.iter().map(|c| c * 20.0).collect() } else { Vec::new() },
            rotate_k: random.below(2) == 0,
            rotate_v: random.below(2) == 0,
        };
    }
    if random.below(2) == 0 {
        let pairs = 1 + random.below(head_dim as usize / 2);
        let inv_freq = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        world.layer.rope = Some(Rope { inv_freq, interleaved: random.below(2) == 0 });
    }
    if geometry.v_format.is_none() && geometry.v_head_dim == head_dim && random.below(2) == 0 {
        world.derive_keys(random);
    }
    if random.below(3) == 0 {
        world.layer.softcap = Some(random.pick(&[0.1, 1.0, 30.0]));
    }
    if random.below(3) == 0 {
        let sink = |_| random.pick(&[f32::NEG_INFINITY, -3.0, 0.0, 1.5, 200.0]);
        world.sinks = Some((0..world.layer.num_q_heads).map(sink).collect());
    }
    for _ in 0..1 + random.below(3) {
        let mut cuts = Vec::new();
        let spans = random.below(4);
        let sinks = random.below(spans + 1);
        let from = random.below(400) as i64 - 100;
        let pinned = random.pick(&[Sight::Always, Sight::Trailing { from }]);
        for span in 0..=spans {
            cuts.push(Cut {
                shared: random.below(2) == 0,
                skip: random.below(page as usize),
                count: length(random, page as usize),
                offset: if span == spans { 0 } else { random.below(100_000) as u64 },
                sight: if span < sinks { pinned } else { Sight::Window },
            });
        }
        world.add(random, &cuts);
    }
    world
}

/// Compares with the reference, to the precision of the output's type, or to that of the products if it is lower.
fn compare(world: &mut World, backend: &Backend, batch: &[(usize, usize, usize)], element: crate::Element) {
    let found = world.attend(backend, batch, element);
    let right = world.expect(batch, element);
    hold(world, backend, batch, element, found, right);
}

/// Compares outputs and log-sum-exps of an element type with the reference.
fn hold(
    world: &World,
    backend: &Backend,
    batch: &[(usize, usize, usize)],
    element: crate::Element,
    (out, lse): (Vec<f32>, Vec<f32>),
    (expected_out, expected_lse): (Vec<f64>, Vec<f64>),
) {
    let rounding: f64 = match element {
        crate::Element::F32 => 1e-5,
        crate::Element::F16 => 1e-3,
        crate::Element::Bf16 => 6e-3,
    };
    // Integer products: elements of queries are rounded to 2^-16 of the largest of 32, weights to that of a tile; with rows
    // of 4 or 5 bits to 2^-8. Bfloat16 products: each factor is rounded by up to 2^-8 of itself. The largest of many errors are
    // several times as large as most.
    let LayerGeometry { k_format, v_format, .. } = world.layer.geometry;
    let formats = || [Some(k_format), v_format].into_iter().flatten();
    let integers = backend.isa().multiplies_integers() && formats().any(|format| format != RowFormat::F32);
    let one_byte = integers
        && formats().any(|format| {
            matches!(format, RowFormat::Q5_0 | RowFormat::Q4_0 | RowFormat::Mxfp4 | RowFormat::Nvfp4)
        });
    let bf16 = backend.isa() == Isa::Avx512Bf16 && formats().any(|format| format == RowFormat::Fp8E4m3);
    let (products, most, log_tolerance): (f64, f64, f64) = match (one_byte, bf16, integers) {
        (true, _, _) => (6e-2, 6e-3, 6e-2),
        (_, true, _) => (2e-2, 2e-3, 2e-2),
        (_, _, true) => (3e-4, 3e-4, 3e-4),
        _ => (0.0, 0.0, 1e-5),
    };
    // Centres are 20 times as large as rows, and so are their products with queries, which are added up in f32.
    let sums = if world.layer.transform.center.is_empty() { 0.0 } else { 1e-4 };
    let log_tolerance = log_tolerance.max(sums);
    let (tolerance, most) = (rounding.max(products).max(sums), rounding.max(most));
    assert_eq!(out.len(), expected_out.len());
    let mut squares = 0.0;
    for (i, (&x, &y)) in out.iter().zip(&expected_out).enumerate() {
        let error = (f64::from(x) - y).abs() / (1.0 + y.abs());
        assert!(
            error <= tolerance,
            "{} {:?}: out[{i}] is {x}, not {y}; {batch:?}",
            backend.isa(),
            world.layer
        );
        squares += error * error;
    }
    let error = (squares / out.len().max(1) as f64).sqrt();
    assert!(error <= most, "{} {:?}: errors of {error}; {batch:?}", backend.isa(), world.layer);
    for (i, (&x, &y)) in lse.iter().zip(&expected_lse).enumerate() {
        let same = f64::from(x) == y || (f64::from(x) - y).abs() <= log_tolerance * (1.0 + y.abs());
        assert!(same, "{} {:?}: lse[{i}] is {x}, not {y}; {batch:?}", backend.isa(), world.layer);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn matches_the_reference(seed: u64, threads in 1usize..4, deterministic: bool) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let mut random = Random(seed);
            let backend = Backend::new(threads, deterministic, Some(isa)).expect("supported");
            let mut world = random_world(&mut random);
            world.fill(&backend, random.pick(&ELEMENTS[..1]));
            let mut batch = Vec::new();
            for s in 0..world.sequences.len() {
                let len = world.sequences[s].len();
                let new = match random.below(3) {
                    0 => len.min(1),
                    1 => len.min(random.below(6)),
                    _ => len.min(random.below(120)),
                };
                batch.push((s, len, new));
            }
            let element = random.pick(&ELEMENTS);
            compare(&mut world, &backend, &batch, element);
            let mut ends = Vec::new();
            for &(_, len, new) in &batch {
                let inside = random.below(len + 1);
                ends.push(random.pick(&[0, len, inside, len - new]));
            }
            let found = world.attend_before(&backend, &batch, &ends, element);
            // Sums, not results: neither sinks nor the rounding of outputs are in them.
            let right = world.expect_before(&batch, &ends, None, element);
            hold(&world, &backend, &batch, ELEMENTS[0], found, right);
        }
    }
}

/// A layer with two K/V heads.
fn small(head_dim: u32, format: RowFormat) -> LayerGeometry {
    LayerGeometry {
        num_kv_heads: 2,
        head_dim,
        v_head_dim: head_dim,
        k_format: format,
        v_format: Some(format),
    }
}

fn plain(count: usize) -> Cut {
    Cut { shared: false, skip: 0, count, offset: 0, sight: Sight::Window }
}

#[test]
fn long_sequences_are_split_and_merged() {
    for (threads, deterministic) in [(1, false), (1, true), (2, false), (2, true), (7, false), (7, true)] {
        let mut random = Random(7);
        let backend = Backend::new(threads, deterministic, None).expect("supported");
        let mut world = World::new(&mut random, small(16, RowFormat::F16), 6, 64, 300);
        world.add(&mut random, &[Cut { skip: 5, offset: 9, ..plain(4500) }, plain(5000)]);
        world.add(&mut random, &[plain(700)]);
        world.add(&mut random, &[plain(65)]);
        world.fill(&backend, ELEMENTS[0]);
        compare(&mut world, &backend, &[(0, 9500, 1), (1, 700, 3), (2, 65, 65)], ELEMENTS[0]);
        world.sinks = Some(vec![0.5, 2.0, -1.0, 0.0, 3.0, 1.0]);
        world.layer.softcap = Some(5.0);
        compare(&mut world, &backend, &[(0, 9500, 1), (1, 700, 3), (2, 65, 65)], ELEMENTS[0]);
        world.layer.window = Some(4600);
        compare(&mut world, &backend, &[(0, 9500, 40), (1, 700, 1)], ELEMENTS[0]);
    }
}

#[test]
fn pages_in_common_are_gone_over_once() {
    let formats = [RowFormat::F32, RowFormat::F16, RowFormat::Fp8E4m3, RowFormat::Q8_0, RowFormat::Q4_0];
    for (first, isa) in Isa::ALL.into_iter().filter(|isa| isa.is_supported()).enumerate() {
        for (seed, format) in formats.into_iter().enumerate().cycle().skip(2 * first).take(2) {
            let mut random = Random(seed as u64);
            let backend = Backend::new(1 + seed % 3, false, Some(isa)).expect("supported");
            let page = random.pick(&[16, 64]);
            let mut world = World::new(&mut random, small(32, format), 6, page, 16_000 / page);
            world.add(&mut random, &[plain(3000)]);
            world.add(&mut random, &[plain(1200)]);
            world.add(&mut random, &[plain(1100), Cut { shared: true, ..plain(200) }]);
            world.layer.rope = Some(Rope { inv_freq: vec![1.0, 0.1, 0.01], interleaved: false });
            if seed % 2 == 1 {
                world.layer.softcap = Some(5.0);
                world.sinks = Some(vec![0.5, 2.0, -1.0, 0.0, 3.0, 1.0]);
            }
            world.fill(&backend, ELEMENTS[0]);
            // Those of sequence 0 have 1280 tokens in common, the first and the third of these 2944.
            let batch = [
                (0, 3000, 1),
                (1, 1200, 2),
                (0, 2990, 3),
                (0, 1500, 1),
                (2, 1300, 2),
                (0, 1300, 20),
                (0, 1300, 0),
            ];
            let found = world.attend_common(&backend, &batch, 2, ELEMENTS[0]);
            let right = world.expect(&batch, ELEMENTS[0]);
            hold(&world, &backend, &batch, ELEMENTS[0], found, right);
            // Nothing, and so many queries that they take several blocks.
            for (batch, nodes) in [(vec![(0, 3000, 1), (1, 1200, 1)], 0), (vec![(0, 1100, 30); 3], 1)] {
                let found = world.attend_common(&backend, &batch, nodes, ELEMENTS[0]);
                let right = world.expect(&batch, ELEMENTS[0]);
                hold(&world, &backend, &batch, ELEMENTS[0], found, right);
            }
        }
    }
}

#[test]
fn many_query_heads_share_a_head() {
    for group in [16, 17, 64] {
        let mut random = Random(u64::from(group));
        let backend = Backend::new(2, false, None).expect("supported");
        let mut geometry = small(64, RowFormat::Bf16);
        geometry.num_kv_heads = 1;
        let mut world = World::new(&mut random, geometry, group, 16, 100);
        world.add(&mut random, &[plain(333)]);
        world.fill(&backend, ELEMENTS[0]);
        compare(&mut world, &backend, &[(0, 333, 1)], ELEMENTS[0]);
        compare(&mut world, &backend, &[(0, 333, 20)], ELEMENTS[0]);
    }
}

#[test]
fn what_sees_nothing_is_zero() {
    let mut random = Random(3);
    let backend = Backend::new(2, false, None).expect("supported");
    let mut world = World::new(&mut random, small(24, RowFormat::F16), 4, 8, 40);
    world.add(&mut random, &[plain(20)]);
    world.fill(&backend, ELEMENTS[0]);
    world.layer.window = Some(0);
    world.sinks = Some(vec![1.0; 4]);
    let (out, lse) = world.attend(&backend, &[(0, 20, 3)], ELEMENTS[0]);
    assert!(out.iter().all(|x| x.to_bits() == 0));
    assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
    assert_eq!(world.attend(&backend, &[], ELEMENTS[0]), (vec![], vec![]));
}

#[test]
fn large_scores_do_not_overflow() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for center in [vec![], vec![60_000.0; 64]] {
            let mut random = Random(4);
            let backend = Backend::new(1, false, Some(isa)).expect("supported");
            let mut world = World::new(&mut random, small(32, RowFormat::F32), 4, 16, 40);
            world.layer.scale = if center.is_empty() { 300.0 } else { 1e6 };
            world.layer.transform.center = center;
            world.add(&mut random, &[plain(100)]);
            world.fill(&backend, ELEMENTS[0]);
            for softcap in [None, Some(50.0)] {
                world.layer.softcap = softcap;
                let (out, lse) = world.attend(&backend, &[(0, 100, 5)], ELEMENTS[0]);
                assert!(out.iter().chain(&lse).all(|x| x.is_finite()), "{isa} {:?}", world.layer);
            }
        }
    }
}

/// Makes the row of a token in head 0 NaN: its first number, or the first of its scales.
fn poison(world: &mut World, token: usize, in_keys: bool) {
    let (format, layout) = (world.layer.geometry.k_format, &world.layer.layout);
    let plane = if in_keys { layout.k } else { layout.v };
    let (strip, nan): (_, &[u8]) = match format {
        RowFormat::F32 => (plane.rows, &[0, 0, 0xc0, 0x7f]),
        RowFormat::Fp8E4m3 | RowFormat::Int8 => (plane.scales, &[0, 0, 0xc0, 0x7f]),
        RowFormat::Q8_0 | RowFormat::Q5_0 | RowFormat::Q4_0 => (plane.scales, &[0, 0x7e]),
        RowFormat::Mxfp4 => (plane.scales, &[0xff]),
        _ => unreachable!("{format:?}"),
    };
    let page_size = world.layer.page_size as usize;
    let page = world.sequences[0].row[token / page_size];
    let offset = u64::from(page.block().index()) * world.layer.block_bytes
        + strip.offset
        + (token % page_size) as u64 * strip.row_stride;
    let base = world.arenas().base[page.tier().index()];
    // SAFETY: the slot of the token in head 0.
    unsafe { base.add(offset as usize).copy_from_nonoverlapping(nan.as_ptr(), nan.len()) };
}

#[test]
fn nan_in_a_visible_key_or_value_reaches_the_output_and_only_later_queries() {
    use RowFormat::{F32, Fp8E4m3, Int8, Mxfp4, Q4_0, Q5_0, Q8_0};
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for format in [F32, Fp8E4m3, Int8, Q8_0, Q5_0, Q4_0, Mxfp4] {
            for (in_keys, softcap) in [(true, None), (true, Some(20.0)), (false, None)] {
                let mut random = Random(5);
                let backend = Backend::new(1, false, Some(isa)).expect("supported");
                let mut world = World::new(&mut random, small(32, format), 2, 16, 40);
                world.add(&mut random, &[plain(90)]);
                world.layer.softcap = softcap;
                world.fill(&backend, ELEMENTS[0]);
                poison(&mut world, 70, in_keys);
                let (out, _) = world.attend(&backend, &[(0, 90, 90)], ELEMENTS[0]);
                for (token, row) in out.chunks_exact(64).enumerate() {
                    assert_eq!(row[0].is_nan(), token >= 70, "{isa} {format:?} {in_keys} {token}");
                    assert!(row[32..].iter().all(|x| x.is_finite()));
                }
            }
        }
    }
}
