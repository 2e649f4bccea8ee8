//! The tables of the open step as NumPy arrays, for kernels of other libraries. Names and types are the field's.

use crate::arrays::{by_token, zeros};
use crate::cache::Inner;
use crate::errors::invalid_because;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pagoda_core::Cache;
use pagoda_core::ids::{BlockRef, GroupId, SequenceId, Tier};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `kv_indptr`, `kv_indices`, `kv_last_page_len`.
pub(crate) type Csr<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

/// The block tables handed out last, by layer group: only rows that changed are written again.
#[derive(Default)]
pub(crate) struct Tables(Vec<GroupTable>);

#[derive(Default)]
struct GroupTable {
    /// With room to grow.
    blocks: Option<Py<PyArray2<i32>>>,
    pointers: Option<Py<PyArray2<u64>>>,
    rows: usize,
    columns: usize,
    /// What each row holds.
    stamps: Vec<Option<Stamp>>,
}

/// What a row of a block table holds: the sequence, the version of its table, and how many of its pages.
#[derive(Clone, Copy)]
pub(crate) struct Stamp {
    pub(crate) sequence: SequenceId,
    pub(crate) version: u32,
    pub(crate) pages: usize,
}

impl Stamp {
    /// How many entries need not be written again in a row that held `before`: tables of one version only grow.
    pub(crate) fn kept(self, before: Option<Self>) -> usize {
        let is_of = |held: &Self| (held.sequence, held.version) == (self.sequence, self.version);
        before.filter(is_of).map(|held| held.pages).filter(|&pages| pages <= self.pages).unwrap_or(0)
    }
}

impl GroupTable {
    /// Makes the arrays at least `rows` by `columns`.
    fn grow(&mut self, py: Python<'_>, rows: usize, columns: usize) -> PyResult<()> {
        if rows <= self.rows && columns <= self.columns && self.blocks.is_some() {
            return Ok(());
        }
        let (rows, columns) = (rows.max(self.rows), columns.next_power_of_two().max(self.columns));
        let blocks = Some(zeros(py, [rows, columns])?.unbind());
        let pointers = Some(zeros(py, [rows, columns])?.unbind());
        *self = Self { blocks, pointers, rows, columns, stamps: vec![None; rows] };
        Ok(())
    }
}

/// `block_table` int32 and `pointers` uint64 `[B, pages]`, `slot_mapping` int64 `[sum(new)]`.
///
/// Entries past a sequence's pages, of pages that have left a window and of pages on disk are -1 and 0; those of pages on the
/// host tier are -1 in `block_table`.
pub(crate) fn export<'py>(py: Python<'py>, inner: &mut Inner, layer: usize) -> PyResult<Bound<'py, PyDict>> {
    let group = inner.layers[layer].group;
    let page_size = inner.layers[layer].layer.page_size;
    let block_bytes = inner.layers[layer].layer.block_bytes;
    let batch: Vec<_> = inner.core.step_batch().collect();
    let pages = (0..batch.len()).map(|index| inner.core.step_row(index, group).0.len()).max().unwrap_or(0);
    let base = inner.arenas.base.map(|address| address as u64);

    if inner.tables.0.len() <= group.index() {
        inner.tables.0.resize_with(group.index() + 1, GroupTable::default);
    }
    let table = &mut inner.tables.0[group.index()];
    table.grow(py, batch.len(), pages)?;
    let blocks = table.blocks.as_ref().expect("grown").bind(py);
    let pointers = table.pointers.as_ref().expect("grown").bind(py);
    {
        // SAFETY: only views that are marked read-only were handed out, and no Python code runs meanwhile.
        let (block_rows, pointer_rows) = unsafe { (blocks.as_slice_mut()?, pointers.as_slice_mut()?) };
        for (index, &(sequence, _)) in batch.iter().enumerate() {
            let (row, version) = inner.core.step_row(index, group);
            let stamp = Stamp { sequence, version, pages: row.len() };
            let before = table.stamps[index].replace(stamp);
            // Entries that are as they should be, and those that may be no padding.
            let clean = stamp.kept(before);
            let used = before.map_or(table.columns, |held| held.pages);
            let start = index * table.columns;
            for (column, at) in row.iter().enumerate().skip(clean) {
                block_rows[start + column] = device_block(*at);
                pointer_rows[start + column] = match at.tier() {
                    Tier::Disk => 0,
                    tier => base[tier.index()] + u64::from(at.block().index()) * block_bytes,
                };
            }
            let padding = start + row.len()..start + used.max(row.len());
            block_rows[padding.clone()].fill(-1);
            pointer_rows[padding].fill(0);
            for span in inner.core.step_spans(index, group) {
                let left = (start + span.first_page as usize)..;
                for entry in left.take((span.skip / page_size) as usize) {
                    block_rows[entry] = -1;
                    pointer_rows[entry] = 0;
                }
            }
        }
    }
    let slice = |array: &Bound<'py, PyAny>| -> PyResult<Bound<'py, PyAny>> {
        let view = array.get_item((
            pyo3::types::PySlice::new(py, 0, batch.len() as isize, 1),
            pyo3::types::PySlice::new(py, 0, pages as isize, 1),
        ))?;
        view.call_method1("setflags", (false,))?;
        Ok(view)
    };
    let result = PyDict::new(py);
    result.set_item("block_table", slice(blocks.as_any())?)?;
    result.set_item("pointers", slice(pointers.as_any())?)?;
    let slots = slots(&inner.core, group, page_size);
    result.set_item("slot_mapping", by_token(py, inner.step.new_tokens(), slots)?)?;
    Ok(result)
}

fn device_block(at: BlockRef) -> i32 {
    if at.tier() == Tier::Device { at.block().index() as i32 } else { -1 }
}

/// `block * page_size + row` of every new token.
pub(crate) fn slots(core: &Cache, group: GroupId, page_size: u32) -> impl Iterator<Item = i64> {
    let places = (0..core.step_batch().len()).flat_map(move |index| core.step_slots(index, group));
    places.map(move |(block, row)| i64::from(block.index()) * i64::from(page_size) + i64::from(row))
}

/// The CSR form that FlashInfer takes, of pages on the device tier.
pub(crate) fn csr<'py>(py: Python<'py>, inner: &Inner, layer: usize) -> PyResult<Csr<'py>> {
    let group = inner.layers[layer].group;
    let page_size = inner.layers[layer].layer.page_size;
    let (mut indptr, mut indices, mut last_page_len) = (vec![0], Vec::new(), Vec::new());
    for (index, _) in inner.core.step_batch().enumerate() {
        let spans: Vec<_> = inner.core.step_spans(index, group).filter(|span| span.count > 0).collect();
        if spans.len() > 1 || spans.iter().any(|span| span.skip % page_size > 0) {
            let what = format!(
                "kv_indices = sequence {index} of the batch: one whole span; drop() or sinks have cut it"
            );
            return Err(invalid_because(py, what));
        }
        let left = spans.first().map_or(0, |span| span.skip / page_size);
        let row = &inner.core.step_row(index, group).0[left as usize..];
        if row.iter().any(|at| at.tier() != Tier::Device) {
            let what =
                format!("kv_indices = sequence {index} of the batch: all pages on the device; promote them");
            return Err(invalid_because(py, what));
        }
        let tokens = spans.first().map_or(0, |span| span.count);
        indices.extend(row.iter().map(|at| device_block(*at)));
        indptr.push(indices.len() as i32);
        last_page_len.push(if tokens == 0 { 0 } else { ((tokens - 1) % page_size + 1) as i32 });
    }
    Ok((
        PyArray1::from_vec(py, indptr),
        PyArray1::from_vec(py, indices),
        PyArray1::from_vec(py, last_page_len),
    ))
}
