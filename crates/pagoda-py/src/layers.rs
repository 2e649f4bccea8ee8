//! The model geometry, as the facade hands it down.

use crate::arrays::format_named;
use crate::errors::{cpu, invalid};
use pagoda_core::cache::{Group, GroupKind};
use pagoda_core::ids::GroupId;
use pagoda_core::layout::{BlockLayout, LayerGeometry};
use pagoda_core::window::Window;
use pagoda_cpu::{Layer, Rope};
use pyo3::prelude::*;

/// One attention layer, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LayerArguments {
    group: u8,
    num_q_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    v_head_dim: u32,
    v_alias: bool,
    window: Option<u32>,
    /// Sinks, tokens of the window, headroom, and whether sinks trail; all tokens stay if None.
    keeps: Option<(u32, u32, u32, bool)>,
    scale: f32,
    rope: Option<(Vec<f32>, bool)>,
}

/// A layer, and the group that its pages belong to.
pub(crate) struct PlacedLayer {
    pub(crate) group: GroupId,
    pub(crate) layer: Layer,
}

/// Lays out the blocks of every group and checks every layer.
pub(crate) fn place(
    py: Python<'_>,
    layers: &[LayerArguments],
    page_size: u32,
    k_dtype: &str,
    v_dtype: &str,
) -> PyResult<(Vec<Group>, Vec<PlacedLayer>)> {
    let format = |argument, name: &str| {
        format_named(name).ok_or_else(|| invalid(py, argument, format_args!("{name:?}"), "f32, f16 or bf16"))
    };
    let (k_format, v_format) = (format("k_dtype", k_dtype)?, format("v_dtype", v_dtype)?);
    let geometry = |layer: &LayerArguments| LayerGeometry {
        num_kv_heads: layer.num_kv_heads,
        head_dim: layer.head_dim,
        v_head_dim: layer.v_head_dim,
        k_format,
        v_format: (!layer.v_alias).then_some(v_format),
    };
    let count = layers.iter().map(|layer| layer.group as usize + 1).max().unwrap_or(0);
    let mut groups = Vec::with_capacity(count);
    let mut placed: Vec<Option<PlacedLayer>> = layers.iter().map(|_| None).collect();
    for group in 0..count {
        let members: Vec<usize> =
            (0..layers.len()).filter(|&at| layers[at].group as usize == group).collect();
        let geometries: Vec<_> = members.iter().map(|&at| geometry(&layers[at])).collect();
        let layout = BlockLayout::new(&geometries, page_size);
        let window = members.first().and_then(|&at| layers[at].keeps);
        groups.push(Group {
            block_bytes: layout.block_bytes,
            kind: GroupKind::Paged { page_size },
            window: window.map(|(sinks, tokens, headroom, trailing)| Window {
                sinks,
                tokens,
                headroom,
                trailing,
            }),
        });
        for (&at, &layout_of_layer) in members.iter().zip(&layout.layers) {
            let LayerArguments { num_q_heads, window, scale, ref rope, .. } = layers[at];
            let layer = Layer {
                geometry: geometry(&layers[at]),
                layout: layout_of_layer,
                block_bytes: layout.block_bytes,
                page_size,
                num_q_heads,
                scale,
                window,
                rope: rope.clone().map(|(inv_freq, interleaved)| Rope { inv_freq, interleaved }),
            };
            layer.check().map_err(|error| cpu(py, &error.into()))?;
            placed[at] = Some(PlacedLayer { group: GroupId(group as u8), layer });
        }
    }
    Ok((groups, placed.into_iter().map(|layer| layer.expect("every layer has a group")).collect()))
}
