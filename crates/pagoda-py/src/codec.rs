//! Rows of a format from and to numbers, for `pagoda.formats`.

use crate::arrays::{format_named, zeros};
use crate::errors::invalid;
use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArrayMethods};
use pagoda_core::layout::RowFormat;
use pagoda_cpu::{HEAD_DIM_MAX, decode_row, encode_row};
use pyo3::prelude::*;

type Bytes<'py> = Bound<'py, PyArray2<u8>>;

/// The format, if its rows may have `dim` elements.
fn format(py: Python<'_>, name: &str, dim: usize) -> PyResult<RowFormat> {
    let format = format_named(py, "name", name)?;
    let unit = format.unit();
    if dim == 0 || dim > HEAD_DIM_MAX as usize || !dim.is_multiple_of(unit as usize) {
        let limit = format!("a multiple of {unit} up to {HEAD_DIM_MAX}, for {name}");
        return Err(invalid(py, "dim", dim, limit));
    }
    Ok(format)
}

/// Encodes numbers `[rows, dim]` as rows and scales.
#[pyfunction]
pub(crate) fn encode_rows<'py>(
    py: Python<'py>,
    numbers: PyReadonlyArray2<'py, f32>,
    name: &str,
) -> PyResult<(Bytes<'py>, Bytes<'py>)> {
    let [count, dim] = *numbers.shape() else { unreachable!("two dimensions") };
    let format = format(py, name, dim)?;
    let numbers = numbers.as_slice()?;
    let (width, scale_width) =
        (format.row_bytes(dim as u32) as usize, format.scale_bytes(dim as u32) as usize);
    let (rows, scales) = (zeros(py, [count, width])?, zeros(py, [count, scale_width])?);
    {
        let (mut rows, mut scales) = (rows.readwrite(), scales.readwrite());
        let (rows, scales) = (rows.as_slice_mut()?, scales.as_slice_mut()?);
        for (i, x) in numbers.chunks_exact(dim).enumerate() {
            let scales = &mut scales[i * scale_width..][..scale_width];
            encode_row(format, x, &mut rows[i * width..][..width], scales);
        }
    }
    Ok((rows, scales))
}

/// Decodes rows and scales to numbers `[rows, dim]`.
#[pyfunction]
pub(crate) fn decode_rows<'py>(
    py: Python<'py>,
    rows: PyReadonlyArray2<'py, u8>,
    scales: PyReadonlyArray2<'py, u8>,
    name: &str,
    dim: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let format = format(py, name, dim)?;
    let (width, scale_width) =
        (format.row_bytes(dim as u32) as usize, format.scale_bytes(dim as u32) as usize);
    let count = rows.shape()[0];
    for (what, array, wanted) in [("rows", &rows, width), ("scales", &scales, scale_width)] {
        let shape = array.shape();
        if shape != [count, wanted] {
            return Err(invalid(
                py,
                what,
                format_args!("shape {shape:?}"),
                format_args!("{:?}", [count, wanted]),
            ));
        }
    }
    let (rows, scales) = (rows.as_slice()?, scales.as_slice()?);
    let numbers = zeros(py, [count, dim])?;
    {
        let mut numbers = numbers.readwrite();
        for (i, x) in numbers.as_slice_mut()?.chunks_exact_mut(dim).enumerate() {
            decode_row(format, &rows[i * width..][..width], &scales[i * scale_width..][..scale_width], x);
        }
    }
    Ok(numbers)
}
