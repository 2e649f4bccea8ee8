//! The model geometry, as the facade hands it down.

use crate::arrays::format_named;
use crate::errors::invalid_because;
use pagoda_core::cache::{Group, GroupKind};
use pagoda_core::ids::GroupId;
use pagoda_core::layout::{BlockLayout, LayerGeometry, LayerLayout, Plane, Strip};
use pagoda_core::window::Window;
use pagoda_cpu::{DerivedKeys, Layer, Rope, Transform};
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
    /// The weight of K's norm, if only V is stored and K is derived from it.
    k_norm: Option<Vec<f32>>,
    window: Option<u32>,
    /// Sinks, tokens of the window, headroom, and whether sinks trail; if None, all tokens stay.
    keeps: Option<(u32, u32, u32, bool)>,
    scale: f32,
    softcap: Option<f32>,
    sinks: bool,
    kv_owner: Option<usize>,
    rope: Option<(Vec<f32>, bool)>,
}

/// A layer, and the group that its pages belong to.
pub(crate) struct PlacedLayer {
    pub(crate) group: GroupId,
    pub(crate) layer: Layer,
    /// Its number among the group's layers, or that of the layer whose K and V it reads.
    pub(crate) member: usize,
    /// Whether the centre of K is taken from its first rows.
    pub(crate) center_first: bool,
    /// Whether a logit for each query head joins the softmax.
    pub(crate) sinks: bool,
    /// The layer whose K and V this one reads, if it stores none itself.
    pub(crate) owner: Option<usize>,
}

/// Tokens in a page, which are the same in all layers.
pub(crate) fn page_size(layers: &[PlacedLayer]) -> u32 {
    layers[0].layer.page_size
}

/// The blocks of every group, and every layer.
pub(crate) struct Placed {
    pub(crate) groups: Vec<Group>,
    /// Bytes of each layer that stores pages, by group: a block is these one after the other.
    pub(crate) runs: Vec<Vec<u64>>,
    pub(crate) layers: Vec<PlacedLayer>,
}

/// K/V heads of a layer, elements of its K and V rows, and their formats; V has none where it is part of K.
type Stored<S> = (u32, u32, u32, S, Option<S>);

fn geometry(
    py: Python<'_>,
    (num_kv_heads, head_dim, v_head_dim, k_dtype, v_dtype): Stored<&str>,
) -> PyResult<LayerGeometry> {
    let k_format = format_named(py, "k_dtype", k_dtype)?;
    let v_format = v_dtype.map(|name| format_named(py, "v_dtype", name)).transpose()?;
    Ok(LayerGeometry { num_kv_heads, head_dim, v_head_dim, k_format, v_format })
}

/// Offset and head stride of rows, and of their scales.
type PlanePlace = ((u64, u64), (u64, u64));

/// Bytes of a block of a group of layers, and where in it each layer's K and V lie.
#[pyfunction]
pub(crate) fn block_layout(
    py: Python<'_>,
    layers: Vec<Stored<String>>,
    page_size: u32,
) -> PyResult<(u64, Vec<(PlanePlace, PlanePlace)>)> {
    let layers = layers
        .iter()
        .map(|(heads, k, v, k_dtype, v_dtype)| geometry(py, (*heads, *k, *v, k_dtype, v_dtype.as_deref())));
    let layout = BlockLayout::new(&layers.collect::<PyResult<Vec<_>>>()?, page_size);
    let strip = |strip: Strip| (strip.offset, strip.head_stride);
    let plane = |plane: Plane| (strip(plane.rows), strip(plane.scales));
    Ok((layout.block_bytes, layout.layers.iter().map(|layer| (plane(layer.k), plane(layer.v))).collect()))
}

/// Lays out the blocks of every group and checks every layer.
pub(crate) fn place(py: Python<'_>, layers: &[LayerArguments], page_size: u32) -> PyResult<Placed> {
    let geometry = |layer: &LayerArguments| {
        let LayerArguments { num_kv_heads, head_dim, v_head_dim, ref k_dtype, ref v_dtype, .. } = *layer;
        let v_dtype = (!layer.v_alias).then_some(v_dtype.as_str());
        geometry(py, (num_kv_heads, head_dim, v_head_dim, k_dtype, v_dtype))
    };
    let count = layers.iter().map(|layer| layer.group as usize + 1).max().unwrap_or(0);
    let (mut groups, mut runs) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let mut layouts: Vec<Option<(usize, LayerLayout)>> = vec![None; layers.len()];
    for group in 0..count {
        let members: Vec<usize> = (0..layers.len())
            .filter(|&at| layers[at].group as usize == group && layers[at].kv_owner.is_none())
            .collect();
        let geometries = members.iter().map(|&at| geometry(&layers[at])).collect::<PyResult<Vec<_>>>()?;
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
        let starts = layout.layers.iter().map(|layer| layer.k.rows.offset);
        let ends = starts.clone().skip(1).chain([layout.block_bytes]);
        runs.push(starts.zip(ends).map(|(start, end)| end - start).collect());
        members
            .iter()
            .zip(layout.layers.into_iter().enumerate())
            .for_each(|(&at, own)| layouts[at] = Some(own));
    }
    let place = |(at, arguments): (usize, &LayerArguments)| {
        let LayerArguments { group, num_q_heads, window, scale, softcap, sinks, kv_owner, .. } = *arguments;
        let rope = arguments.rope.clone().map(|(inv_freq, interleaved)| Rope { inv_freq, interleaved });
        let (member, layout) = layouts[kv_owner.unwrap_or(at)].expect("every owner is a member of a group");
        let layer = Layer {
            geometry: geometry(arguments)?,
            layout,
            block_bytes: groups[group as usize].block_bytes,
            page_size,
            num_q_heads,
            scale,
            softcap,
            window,
            transform: Transform {
                center: arguments.center.clone().unwrap_or_default(),
                rotate_k: arguments.rotate.0,
                rotate_v: arguments.rotate.1,
            },
            derived: arguments.k_norm.as_deref().map(|weight| DerivedKeys::new(weight, rope.as_ref())),
            rope,
        };
        layer.check().map_err(|error| invalid_because(py, format!("layers[{at}]: {error}")))?;
        let center_first = arguments.center_first;
        Ok(PlacedLayer { group: GroupId(group), layer, member, center_first, sinks, owner: kv_owner })
    };
    let layers = layers.iter().enumerate().map(place).collect::<PyResult<_>>()?;
    Ok(Placed { groups, runs, layers })
}
