//! With `deterministic` the bits depend on the sequence alone.

use super::samples::Random;
use super::world::{Cut, ELEMENTS, World};
use crate::{Backend, Isa, Rope};
use pagoda_core::layout::{LayerGeometry, RowFormat};
use pagoda_core::table::Sight;
use proptest::prelude::*;

fn bits(x: &(Vec<f32>, Vec<f32>)) -> Vec<u32> {
    x.0.iter().chain(&x.1).map(|x| x.to_bits()).collect()
}

/// A few sequences, one of them longer than two runs.
fn world(random: &mut Random) -> World {
    let num_kv_heads = 1 + random.below(2) as u32;
    let group = random.pick(&[1, 3, 4, 6, 7]);
    let geometry = LayerGeometry {
        num_kv_heads,
        head_dim: random.pick(&[8, 16, 24]),
        v_head_dim: random.pick(&[8, 16, 40]),
        k_format: random.pick(&RowFormat::ALL[..3]),
        v_format: Some(random.pick(&RowFormat::ALL[..3])),
    };
    let quantised = LayerGeometry {
        head_dim: 32,
        v_head_dim: 64,
        k_format: random.pick(&RowFormat::ALL),
        v_format: Some(random.pick(&RowFormat::ALL)),
        ..geometry
    };
    let alone = LayerGeometry { v_head_dim: 32, v_format: None, ..quantised };
    let geometry = random.pick(&[geometry, quantised, alone]);
    let page_size = random.pick(&[16, 64, 256]);
    let mut world = World::new(random, geometry, num_kv_heads * group, page_size, 1200);
    world.layer.window = random.pick(&[None, None, Some(70), Some(5000)]);
    world.layer.softcap = random.pick(&[None, Some(3.0)]);
    world.sinks = random.pick(&[None, Some(0.5)]).map(|logit| vec![logit; (num_kv_heads * group) as usize]);
    let inv_freq = vec![1.0, 0.1];
    world.layer.rope = Some(Rope { inv_freq, interleaved: false });
    if geometry.v_format.is_none() && random.below(3) > 0 {
        world.derive_keys(random);
    }
    let sight = random.pick(&[Sight::Window, Sight::Always, Sight::Trailing { from: 4100 }]);
    let (count, rest) = (4000 + random.below(5000), 100 + random.below(300));
    world.add(
        random,
        &[
            Cut { shared: false, skip: 3, count, offset: 1000, sight },
            Cut { shared: true, skip: 0, count: rest, offset: 0, sight: Sight::Window },
        ],
    );
    let count = 1 + random.below(500);
    world.add(random, &[Cut { shared: false, skip: 0, count, offset: 0, sight: Sight::Window }]);
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn placement_batch_chunks_and_threads_change_no_bit(seed: u64) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let mut random = Random(seed);
            let one = Backend::new(1, true, Some(isa)).expect("supported");
            let mut world = world(&mut random);
            world.fill(&one, ELEMENTS[0]);
            let len = world.sequences[0].len();
            let other = world.sequences[1].len();
            let new = 20 + random.below(25);
            let width = |world: &World| world.layer.num_q_heads as usize * world.layer.geometry.v_head_dim as usize;
            let whole = world.attend(&one, &[(0, len, new)], ELEMENTS[0]);
            let backend = Backend::new(random.pick(&[1, 2, 5]), true, Some(isa)).expect("supported");
            prop_assert_eq!(bits(&whole), bits(&world.attend(&backend, &[(0, len, new)], ELEMENTS[0])));
            let in_runs = world.attend_runs(&mut random, &backend, (0, len, new), ELEMENTS[0]);
            prop_assert_eq!(bits(&whole), bits(&in_runs));
            world.shuffle(&mut random);
            // Together with another, and in chunks down to single tokens.
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            let mut done = 0;
            while done < new {
                let chunk = random.pick(&[1, 1, 2, 5, 17, 40]).min(new - done);
                done += chunk;
                let end = len - new + done;
                let batch = [(0, end, chunk), (1, other, other.min(3))];
                let (o, l) = world.attend(&backend, &batch, ELEMENTS[0]);
                out.extend_from_slice(&o[..chunk * width(&world)]);
                lse.extend_from_slice(&l[..chunk * world.layer.num_q_heads as usize]);
            }
            prop_assert_eq!(bits(&whole), bits(&(out, lse)));
        }
    }
}
