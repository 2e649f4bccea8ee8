"""torch's scaled_dot_product_attention: one piece, the query heads of a K/V head as query rows."""

from __future__ import annotations

import numpy as np
from case import Array, Attention, Case, Data, LeftOut


def prepare(case: Case, data: Data) -> Attention:
    import torch

    if case.format != "f16":
        raise LeftOut("f16 only")
    torch.set_num_threads(case.threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.from_numpy(data.q.astype(np.float16)).reshape(1, case.kv_heads, -1, case.dim)
    rows = [[torch.from_numpy(np.ascontiguousarray(part.swapaxes(0, 1)[None])) for part in (data.k, data.v)]]
    rows += [[part.clone() for part in rows[0]] for _ in range(case.layers - 1)]

    def run(index: int) -> Array:
        out: Array = attend(q, *rows[index]).reshape(case.q_heads, case.dim).numpy()
        return out

    return Attention(run, sum(part.nbytes for part in rows[0]))
