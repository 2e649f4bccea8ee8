"""A layer as kernels see it: its kernel instances, how its queries are cut, and the arguments that never change."""

from __future__ import annotations

import ctypes
import math

from pagoda._core import COMMON_NEW_TOKENS_MAX, TOKENS_MAX
from pagoda.device.arrays import FLOATS
from pagoda.device.derived import DerivedKeys
from pagoda.device.tables import Work
from pagoda.errors import BackendUnavailable
from pagoda.geometry import BlockLayout, CoreLayer, Plane
from pagoda.kernels import arguments, instances
from pagoda.kernels.arguments import Append, Attend

LOG2_E = math.log2(math.e)

DECODE_ROWS = 16
"""Up to this many query rows of a sequence warps share out its stored rows, above that its queries."""


Kind = tuple[int | str | None, ...]
"""The properties of a layer that determine its kernel instances and how its queries are cut."""


class LayerKernels:
    """The kernels of one layer. few: a sequence with up to this many new tokens is decoded, one with more is prefilled.

    works: how queries are cut, by whether they are prefilled and by their type; decoded queries are cut alike for all types.
    lacks: the types of queries that no kernel of this device takes, and why. Raises BackendUnavailable if those are all.
    """

    def __init__(self, shape: CoreLayer, *, deterministic: bool, shared_bytes_max: int) -> None:
        self.shape = shape
        self.stored = shape["k_dtype"], instances.PART_OF_K if shape["v_alias"] else shape["v_dtype"]
        """Formats of rows as `append` writes them; if K is derived from V, V is stored in the place of K."""
        self.quantises = any(name in instances.QUANTISED for name in self.stored)
        """Whether `append` quantises rows."""
        self._read = self.stored if shape["k_norm"] is None else (instances.FROM_V, shape["v_dtype"])
        sizes = shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"], shape["v_head_dim"]
        self.kind: Kind = shape["group"], shape["window"], *self._read, *sizes
        self.heads = shape["num_q_heads"] // shape["num_kv_heads"]
        """Query heads of a K/V head."""
        self.few = max(1, DECODE_ROWS // self.heads)
        self._shared_bytes_max = shared_bytes_max
        self._deterministic = deterministic
        self._instances: dict[tuple[str, str], instances.Attention] = {}
        common = not deterministic and shape["window"] is None
        modes = ["verify", "prefill", *(["common"] if common else [])]
        self.lacks = {q: why for q in FLOATS if (why := self._lack(q, modes))}
        types = [q for q in FLOATS if q not in self.lacks]
        if not types:
            raise BackendUnavailable(next(iter(self.lacks.values())))
        common_queries = self._queries("common", types) if common else 0
        decode = self._work(False, self._queries("verify", types), common_queries)
        # Of prefilled sequences those with few tokens share pages, if there can be any.
        prefill = common_queries if self.few < COMMON_NEW_TOKENS_MAX else 0
        self.works = {(False, q): decode for q in types} | {
            (True, q): self._work(True, self._queries("prefill", [q]), prefill) for q in types
        }
        self._append, self._attend = Append(), Attend()
        self._derived: DerivedKeys | None = None

    def place(
        self,
        layout: BlockLayout,
        planes: tuple[Plane, Plane],
        page_size: int,
        bases: tuple[int, int],
        center: int | None,
        misfit: int | None,
        derived: DerivedKeys | None,
    ) -> None:
        """Sets all addresses. bases: of the device and the host tier. center: of what is subtracted from K, if anything.
        misfit: of the flag that `append` sets for values that do not fit their format, if any. derived: for layers that store
        no K."""
        shape, (k_plane, v_plane) = self.shape, planes
        page_shift, block_bytes = page_size.bit_length() - 1, layout.block_bytes
        rotate_k, rotate_v = shape["rotate"]
        self._append = Append(
            kv_heads=shape["num_kv_heads"],
            head_dim=shape["head_dim"],
            v_head_dim=0 if shape["v_alias"] else shape["v_head_dim"],
            base=bases[0],
            block_bytes=block_bytes,
            page_shift=page_shift,
            k_plane=k_plane,
            v_plane=v_plane,
            center=center,
            rotate_k=rotate_k,
            rotate_v=rotate_v,
            misfit=misfit,
        )
        # Held because kernels are given the address of its memory.
        self._derived = derived
        rope, softcap = shape["rope"], shape["softcap"]
        scale = shape["scale"] * (1.0 if derived is None else derived.unit)
        self._attend = Attend(
            pages=arguments.Pages(
                bases=(ctypes.c_void_p * arguments.TIERS)(*bases, None),
                pitches=(ctypes.c_int64 * arguments.TIERS)(block_bytes, block_bytes, 0),
                page_shift=page_shift,
            ),
            k_plane=k_plane,
            v_plane=v_plane,
            window=TOKENS_MAX if shape["window"] is None else shape["window"],
            # Kernels compute scores to base 2.
            scale=scale * LOG2_E if softcap is None else scale / softcap,
            softcap=0.0 if softcap is None else softcap * LOG2_E,
            rotary_pairs=len(rope[0]) if rope else 0,
            interleaved=bool(rope and rope[1]),
            center=center,
            rotate_k=rotate_k,
            rotate_v=rotate_v,
            key_weight=None if derived is None else derived.weight,
            turns=None if derived is None else derived.turns,
        )

    def append(self) -> Append:
        """The arguments of `append`, without those that depend on the step."""
        return Append.from_buffer_copy(self._append)

    def attend(self) -> Attend:
        """The arguments of `attend`, without those that depend on the step."""
        return Attend.from_buffer_copy(self._attend)

    def attention(self, mode: str, q: str) -> instances.Attention:
        """The instance of `attend` for queries of type `q`. mode: without "-deterministic", which is added if needed."""
        key = mode, q
        found = self._instances.get(key)
        if found is None:
            sizes = self.shape["head_dim"], self.shape["v_head_dim"]
            if self._deterministic:
                mode = "prefill-deterministic" if mode == "prefill" else "decode-deterministic"
            found = instances.attend(*self._read, q, *sizes, self.heads, mode, self._shared_bytes_max)
            self._instances[key] = found
        return found

    def _work(self, prefill: bool, queries: int, common_queries: int) -> Work:
        return Work(
            group=self.shape["group"],
            window=self.shape["window"],
            prefill=prefill,
            few=self.few,
            queries=queries,
            common_queries=common_queries,
            by_runs=self._deterministic,
        )

    def _lack(self, q: str, modes: list[str]) -> str:
        """Why no kernel takes queries of a type, if none does."""
        try:
            for mode in modes:
                self.attention(mode, q)
        except BackendUnavailable as error:
            return str(error)
        return ""

    def _queries(self, mode: str, types: list[str]) -> int:
        """Queries of a block: as many as fit a unit for every one of the types."""
        chosen = [self.attention(mode, q) for q in types]
        return min(one.rows // (self.heads // one.sets) for one in chosen)
