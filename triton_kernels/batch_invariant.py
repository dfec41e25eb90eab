"""Operations whose bits for a token do not depend on the tokens that share its batch.

A sum is rounded in the order in which it is taken. Libraries pick that order by the size of the whole batch, so a
prompt can give another token at temperature 0 when it has neighbours. Here tile shapes and splits are constants:

* `linear` is `inkling_kernels.linear`'s own kernel;
* `rel_attention`: decode and verify rows with splits of `SPLIT_KEYS` keys at absolute positions; the prefill kernel's
  tiles are fixed anyway;
* `moe_experts`: the tile shape of small batches for all.

The other kernels take a row's sums in an order that follows from its length alone. Rows must still come to the same
kernel every time: whoever makes batches gives a constant `max_query_len` for steps of generated tokens, None for steps
of prompts and no `decode_query_len`, and does not mix the two (see `inkling_portable.engine`).
"""

from __future__ import annotations

import torch

from inkling_kernels.moe_gemm import moe_experts as moe_experts_of
from inkling_kernels.moe_gemm_plan import SMALL_BATCH
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.rel_attention import rel_attention as rel_attention_of
from inkling_kernels.target import Target

# Keys a split: at 64 Ki keys and 8 key heads that is 512 programs, and 34 MB of partial results a row at 1 Mi keys.
SPLIT_KEYS = 1024


def rel_attention(
    q: torch.Tensor, r: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, proj: torch.Tensor,
    block_table: torch.Tensor, cu_seqlens: torch.Tensor, kv_lens: torch.Tensor, *, window: int | None, scale: float,
    max_query_len: int | None = None, max_kv_len: int | None = None, decode_query_len: int | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None, target: Target | None = None,
) -> torch.Tensor:  # fmt: skip
    """As :func:`inkling_kernels.rel_attention.rel_attention`, decode and verify rows in splits of `SPLIT_KEYS` keys."""
    return rel_attention_of(
        q, r, k_pages, v_pages, proj, block_table, cu_seqlens, kv_lens, window=window, scale=scale,
        max_query_len=max_query_len, max_kv_len=max_kv_len, decode_query_len=decode_query_len, split_keys=SPLIT_KEYS,
        kv_scales=kv_scales, target=target,
    )  # fmt: skip


def moe_experts(
    x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: torch.Tensor, weights: torch.Tensor, *,
    target: Target | None = None,
) -> torch.Tensor:  # fmt: skip
    """As :func:`inkling_kernels.moe_gemm.moe_experts`, with the tiles of small batches whatever the batch."""
    return moe_experts_of(x, w13, w2, ids, weights, target=target, config=SMALL_BATCH)
