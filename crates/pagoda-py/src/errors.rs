//! The one map from Rust errors to the exceptions of `pagoda.errors`.

use pagoda_core::fence::Failure;
use pagoda_core::ids::SequenceId;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyType};
use std::fmt::Display;
use std::path::Path;

/// What an exception has in addition to its message.
#[derive(IntoPyObjectRef)]
enum Field {
    Number(u64),
    Text(String),
    Numbers(Vec<u64>),
}

/// An exception of `pagoda.errors`, by its name there.
fn exception(py: Python<'_>, name: &str, message: impl Display, fields: &[(&str, Field)]) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let build = || -> PyResult<PyErr> {
        let module = MODULE.get_or_try_init(py, || py.import("pagoda.errors").map(Bound::unbind))?;
        let class = module.bind(py).getattr(name)?.cast_into::<PyType>()?;
        let fields = fields.into_py_dict(py)?;
        Ok(PyErr::from_value(class.call((message.to_string(),), Some(&fields))?))
    };
    build().unwrap_or_else(|error| error)
}

/// `argument = value: limit`, as an `InvalidArgument`.
pub(crate) fn invalid(
    py: Python<'_>,
    argument: impl Display,
    value: impl Display,
    limit: impl Display,
) -> PyErr {
    exception(py, "InvalidArgument", format_args!("{argument} = {value}: {limit}"), &[])
}

/// An `InvalidArgument` whose message names everything already.
pub(crate) fn invalid_because(py: Python<'_>, reason: impl Display) -> PyErr {
    exception(py, "InvalidArgument", reason, &[])
}

/// A handle that is no longer valid.
pub(crate) fn released(py: Python<'_>, what: impl Display) -> PyErr {
    exception(py, "UseAfterRelease", what, &[])
}

/// Something that this machine or build does not have.
pub(crate) fn unavailable(py: Python<'_>, what: impl Display) -> PyErr {
    exception(py, "BackendUnavailable", what, &[])
}

/// An error of the core.
pub(crate) fn core(py: Python<'_>, error: &pagoda_core::Error) -> PyErr {
    use pagoda_core::Error;
    match error {
        Error::InvalidArgument { .. } => exception(py, "InvalidArgument", error, &[]),
        Error::OutOfBlocks { tier, group, blocks_short, bytes_short, draining } => {
            let fields = [
                ("tier", Field::Text(tier.to_string())),
                ("layer_group", Field::Number(group.0.into())),
                ("blocks_short", Field::Number(*blocks_short)),
                ("bytes_short", Field::Number(*bytes_short)),
                ("draining", Field::Number(*draining)),
            ];
            exception(py, "OutOfBlocks", error, &fields)
        }
        Error::UseAfterRelease { .. } => exception(py, "UseAfterRelease", error, &[]),
        Error::CopyFailed { sequences, .. } => exception(py, "TierIOError", error, &holders(sequences)),
        Error::CorruptPage { sequences, .. } => exception(py, "CorruptPage", error, &holders(sequences)),
        Error::Invariant(_) => exception(py, "InvariantError", error, &[]),
    }
}

/// Why copies that had to arrive did not, for a page that some sequences hold.
pub(crate) fn failure(py: Python<'_>, failure: &Failure, sequences: &[SequenceId]) -> PyErr {
    match failure {
        Failure::Corrupt(reason) => exception(py, "CorruptPage", reason, &holders(sequences)),
        Failure::Io(reason) => exception(py, "TierIOError", reason, &holders(sequences)),
    }
}

fn holders(sequences: &[SequenceId]) -> [(&'static str, Field); 1] {
    [("sequences", Field::Numbers(sequences.iter().map(|id| id.number()).collect()))]
}

/// An error of the disk tier in a directory.
pub(crate) fn disk(py: Python<'_>, directory: &Path, error: &pagoda_store::disk::Error) -> PyErr {
    use pagoda_store::disk::Error;
    let class = match error {
        Error::Corrupt { .. } | Error::Index(_) => "CorruptPage",
        Error::Mismatch { .. } => "GeometryMismatch",
        Error::Invalid { .. } => "InvalidArgument",
        _ => "TierIOError",
    };
    exception(py, class, error.told_of(directory), &[])
}

/// An error of the CPU backend.
pub(crate) fn cpu(py: Python<'_>, error: &pagoda_cpu::Error) -> PyErr {
    match error {
        pagoda_cpu::Error::Unsupported(_) | pagoda_cpu::Error::Threads { .. } => unavailable(py, error),
        _ => invalid_because(py, error),
    }
}
