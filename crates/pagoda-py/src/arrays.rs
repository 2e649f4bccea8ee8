//! NumPy arrays as the rows that the CPU backend reads and writes: shapes, types and strides are checked here.

use crate::errors::invalid;
use numpy::ndarray::{Dim, Dimension};
use numpy::{
    PyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadwriteArray, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pagoda_core::layout::RowFormat;
use pagoda_cpu::{Element, Rows, RowsMut};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The row format of a name, as in Python.
pub(crate) fn format_named(py: Python<'_>, argument: &str, name: &str) -> PyResult<RowFormat> {
    let named = RowFormat::ALL.into_iter().find(|format| format.to_string() == name);
    named.ok_or_else(|| {
        let names = RowFormat::ALL.map(|format| format.to_string());
        invalid(py, argument, format_args!("{name:?}"), format_args!("one of {names:?}"))
    })
}

/// An array, of whatever type and shape.
pub(crate) fn array<'a, 'py>(
    name: &str,
    given: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, PyUntypedArray>> {
    given.cast().or_else(|_| Err(invalid(given.py(), name, given.get_type().name()?, "an array of NumPy")))
}

/// A new array of the type of `like`, its contents undefined.
pub(crate) fn empty<'py>(
    shape: [usize; 3],
    like: &Bound<'py, PyUntypedArray>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let empty = EMPTY.import(like.py(), "numpy", "empty")?;
    Ok(empty.call1((shape, like.dtype()))?.cast_into()?)
}

/// A new array of zeros. Where there is no memory for it NumPy raises its error; `PyArray::zeros` would panic.
pub(crate) fn zeros<T: numpy::Element, const N: usize>(
    py: Python<'_>,
    shape: [usize; N],
) -> PyResult<Bound<'_, PyArray<T, Dim<[usize; N]>>>>
where
    Dim<[usize; N]>: Dimension,
{
    static ZEROS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let zeros = ZEROS.import(py, "numpy", "zeros")?;
    Ok(zeros.call1((shape, T::get_dtype(py)))?.cast_into()?)
}

/// A number for each new token of a step, as a new array. A `Vec` would abort if there is no memory for that many tokens.
pub(crate) fn by_token(
    py: Python<'_>,
    tokens: usize,
    numbers: impl Iterator<Item = i64>,
) -> PyResult<Bound<'_, PyArray1<i64>>> {
    let array = zeros(py, [tokens])?;
    array.readwrite().as_slice_mut()?.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
    Ok(array)
}

/// An array that was checked.
struct Checked {
    rows: Rows,
    strides: [isize; 3],
    writeable: bool,
}

/// Checks that `array` is `[tokens, heads, dim]` of an element type with a contiguous last dimension. `are_bf16`: 16-bit integers.
fn check(
    name: &str,
    array: &Bound<'_, PyUntypedArray>,
    shape: [usize; 3],
    are_bf16: bool,
) -> PyResult<Checked> {
    let py = array.py();
    if array.shape() != shape {
        return Err(invalid(py, name, format_args!("shape {:?}", array.shape()), format_args!("{shape:?}")));
    }
    let descr = array.dtype();
    let named =
        |name: &str| descr.getattr("name").is_ok_and(|n| n.extract::<&str>().is_ok_and(|n| n == name));
    let element = match (descr.kind(), descr.itemsize()) {
        (b'f', 4) => Element::F32,
        (b'f', 2) => Element::F16,
        (b'u', 2) if are_bf16 => Element::Bf16,
        (_, 2) if named("bfloat16") => Element::Bf16,
        _ => {
            let limit = "float32, float16, bfloat16, or uint16 with dtype=\"bf16\"";
            return Err(invalid(py, name, format_args!("dtype {descr}"), limit));
        }
    };
    if descr.is_native_byteorder() == Some(false) {
        return Err(invalid(py, name, format_args!("dtype {descr}"), "native byte order"));
    }
    let strides = [array.strides()[0], array.strides()[1], array.strides()[2]];
    let item = descr.itemsize() as isize;
    if array.len() > 0 && (strides[2] != item || strides.iter().any(|stride| stride % item != 0)) {
        let limit = format!(
            "a contiguous last dimension, {item} bytes from one element to the next, and multiples of that"
        );
        return Err(invalid(py, name, format_args!("strides {strides:?}"), limit));
    }
    let data = data_of(array);
    // SAFETY: as in `data_of`.
    let flags = unsafe { (*array.as_array_ptr()).fields.flags };
    if !(data as usize).is_multiple_of(item as usize) {
        return Err(invalid(
            py,
            name,
            format_args!("address {data:p}"),
            format_args!("a multiple of {item}"),
        ));
    }
    let writeable = flags & numpy::npyffi::flags::NPY_ARRAY_WRITEABLE != 0;
    let rows = Rows { ptr: data, element, token_stride: strides[0], head_stride: strides[1] };
    Ok(Checked { rows, strides, writeable })
}

/// Rows to read.
pub(crate) fn rows(
    name: &str,
    array: &Bound<'_, PyUntypedArray>,
    shape: [usize; 3],
    are_bf16: bool,
) -> PyResult<Rows> {
    Ok(check(name, array, shape, are_bf16)?.rows)
}

/// Rows to write: of the element type of `like`, not overlapping each other or `like`.
pub(crate) fn rows_mut(
    name: &str,
    array: &Bound<'_, PyUntypedArray>,
    shape: [usize; 3],
    are_bf16: bool,
    like: &Bound<'_, PyUntypedArray>,
) -> PyResult<RowsMut> {
    let py = array.py();
    let Checked { rows, strides, writeable } = check(name, array, shape, are_bf16)?;
    if !writeable {
        return Err(invalid(py, name, "read-only", "a writeable array"));
    }
    if !array.dtype().is_equiv_to(&like.dtype()) {
        return Err(invalid(
            py,
            name,
            format_args!("dtype {}", array.dtype()),
            format_args!("{}", like.dtype()),
        ));
    }
    let row = shape[2] * array.dtype().itemsize();
    // Heads within tokens, or tokens within heads; an axis of one entry overlaps nothing.
    let step = |axis: usize| if shape[axis] == 1 { usize::MAX } else { strides[axis].unsigned_abs() };
    let (inner, outer) = if step(1) <= step(0) { (1, 0) } else { (0, 1) };
    let apart = step(inner) >= row && step(outer) >= shape[inner].saturating_mul(step(inner));
    if array.len() > 0 && !apart {
        return Err(invalid(py, name, format_args!("strides {strides:?}"), "rows that do not overlap"));
    }
    let (ours, theirs) = (extent(array), extent(like));
    if ours.start < theirs.end && theirs.start < ours.end {
        return Err(invalid(py, name, "memory of q", "memory of its own"));
    }
    Ok(RowsMut(rows))
}

/// A copy of a float32 array `[length]`.
pub(crate) fn floats(name: &str, array: &Bound<'_, PyUntypedArray>, length: usize) -> PyResult<Vec<f32>> {
    let py = array.py();
    let Ok(floats) = array.cast::<PyArray1<f32>>() else {
        let given = format!("dtype {}, shape {:?}", array.dtype(), array.shape());
        return Err(invalid(py, name, given, format_args!("float32 [{length}]")));
    };
    if floats.len() != length {
        return Err(invalid(py, name, format_args!("shape {:?}", array.shape()), format_args!("[{length}]")));
    }
    let (data, stride) = (data_of(array), array.strides()[0]);
    // A field of records may have any address, and a stride that is no multiple of a float.
    let float = |at: usize| data.wrapping_offset(at as isize * stride).cast::<f32>();
    // SAFETY: the array is alive and has so many floats.
    Ok((0..length).map(|at| unsafe { float(at).read_unaligned() }).collect())
}

/// The address of an array's first element.
fn data_of(array: &Bound<'_, PyUntypedArray>) -> *mut u8 {
    // SAFETY: `array` is a live ndarray, so its header may be read.
    unsafe { (*array.as_array_ptr()).fields.data.cast() }
}

/// An address that other threads may write to.
#[derive(Clone, Copy)]
pub(crate) struct Address(*mut f32);

// SAFETY: only the backend's workers use it, for disjoint elements, while the array is borrowed (see `address_of`).
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    pub(crate) fn get(self) -> *mut f32 {
        self.0
    }
}

/// The memory of a contiguous float32 array of this shape, which the caller keeps borrowed as long as anything writes to it.
pub(crate) fn address_of<D: Dimension, const N: usize>(
    name: &str,
    array: &mut PyReadwriteArray<'_, f32, D>,
    shape: [usize; N],
) -> PyResult<Address> {
    if array.shape() != shape {
        let given = format!("shape {:?}", array.shape());
        return Err(invalid(array.py(), name, given, format_args!("{shape:?}")));
    }
    Ok(Address(array.as_slice_mut()?.as_mut_ptr()))
}

/// The addresses between the lowest and the highest byte of an array.
fn extent(array: &Bound<'_, PyUntypedArray>) -> std::ops::Range<isize> {
    if array.len() == 0 {
        return 0..0;
    }
    let data = data_of(array) as isize;
    let reach = |(&len, &stride): (&usize, &isize)| (len as isize - 1) * stride;
    let reaches = || array.shape().iter().zip(array.strides()).map(reach);
    let low: isize = reaches().filter(|&r| r < 0).sum();
    let high: isize = reaches().filter(|&r| r > 0).sum();
    data + low..data + high + array.dtype().itemsize() as isize
}
