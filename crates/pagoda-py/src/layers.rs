//! The model geometry, as the facade hands it down.

use crate::arrays::format_named;
use crate::errors::cpu;
use pagoda_core::cache::{Group, GroupKind};
use pagoda_core::ids::GroupId;
use pagoda_core::layout::{BlockLayout, LayerGeometry};
use pagoda_cpu::{Layer, Rope, Transform};
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
    k_dtype: String,
    v_dtype: String,
    center: Option<Vec<f32>>,
    center_first: bool,
    rotate: (bool, bool),
    window: Option<u32>,
    scale: f32,
    rope: Option<(Vec<f32>, bool)>,
}

/// A layer, and the group that its pages belong to.
pub(crate) struct PlacedLayer {
    pub(crate) group: GroupId,
    pub(crate) layer: Layer,
    /// Whether the first rows of K will say what all are centred by.
    pub(crate) center_first: bool,
}

/// Lays out the blocks of every group and checks every layer.
pub(crate) fn place(
    py: Python<'_>,
    layers: &[LayerArguments],
    page_size: u32,
) -> PyResult<(Vec<Group>, Vec<PlacedLayer>)> {
    let geometry = |layer: &LayerArguments| {
        let (k, v) =
            (format_named(py, "k_dtype", &layer.k_dtype)?, format_named(py, "v_dtype", &layer.v_dtype)?);
        PyResult::Ok(LayerGeometry {
            num_kv_heads: layer.num_kv_heads,
            head_dim: layer.head_dim,
            v_head_dim: layer.v_head_dim,
            k_format: k,
            v_format: (!layer.v_alias).then_some(v),
        })
    };
    let count = layers.iter().map(|layer| layer.group as usize + 1).max().unwrap_or(0);
    let mut groups = Vec::with_capacity(count);
    let mut placed: Vec<Option<PlacedLayer>> = layers.iter().map(|_| None).collect();
    for group in 0..count {
        let members: Vec<usize> =
            (0..layers.len()).filter(|&at| layers[at].group as usize == group).collect();
        let geometries = members.iter().map(|&at| geometry(&layers[at])).collect::<PyResult<Vec<_>>>()?;
        let layout = BlockLayout::new(&geometries, page_size);
        groups.push(Group { block_bytes: layout.block_bytes, kind: GroupKind::Paged { page_size } });
        for (&at, &layout_of_layer) in members.iter().zip(&layout.layers) {
            let LayerArguments { num_q_heads, window, scale, ref rope, .. } = layers[at];
            let layer = Layer {
                geometry: geometry(&layers[at])?,
                layout: layout_of_layer,
                block_bytes: layout.block_bytes,
                page_size,
                num_q_heads,
                scale,
                window,
                transform: Transform {
                    center: layers[at].center.clone().unwrap_or_default(),
                    rotate_k: layers[at].rotate.0,
                    rotate_v: layers[at].rotate.1,
                },
                rope: rope.clone().map(|(inv_freq, interleaved)| Rope { inv_freq, interleaved }),
            };
            layer.check().map_err(|error| cpu(py, &error.into()))?;
            placed[at] = Some(PlacedLayer {
                group: GroupId(group as u8),
                layer,
                center_first: layers[at].center_first,
            });
        }
    }
    Ok((groups, placed.into_iter().map(|layer| layer.expect("every layer has a group")).collect()))
}
