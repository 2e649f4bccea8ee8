"""Pagoda: a tiered, paged KV cache for LLM inference.

Exact attention over contexts larger than the memory of the device, over pages that live in several tiers of memory.
Start with `ModelSpec` and `Cache`; `pagoda.cache` is the file to read first.
"""

from pagoda._core import __version__, build_info
from pagoda.cache import Batch, Cache, Plan, Sequence, Step, Table, Ticket
from pagoda.errors import (
    BackendUnavailable,
    CorruptPage,
    GeometryMismatch,
    InvalidArgument,
    InvariantError,
    OutOfBlocks,
    PagodaError,
    TierIOError,
    UseAfterRelease,
)
from pagoda.report import StepReport
from pagoda.retention import SinkWindow
from pagoda.spec import AttentionLayer, ModelSpec, Rope
from pagoda.stats import Stats

__all__ = [
    "AttentionLayer",
    "BackendUnavailable",
    "Batch",
    "Cache",
    "CorruptPage",
    "GeometryMismatch",
    "InvalidArgument",
    "InvariantError",
    "ModelSpec",
    "OutOfBlocks",
    "PagodaError",
    "Plan",
    "Rope",
    "Sequence",
    "SinkWindow",
    "Stats",
    "Step",
    "StepReport",
    "Table",
    "Ticket",
    "TierIOError",
    "UseAfterRelease",
    "__version__",
    "build_info",
]
