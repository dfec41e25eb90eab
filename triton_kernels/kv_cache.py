"""Preparation of the attention inputs from the fused projection: convolution, norms, log scaling, cache write.

    q = rms(Wq a; q_norm) * tau      k = rms(conv(Wk a); k_norm)      v = conv(Wv a)      r = (Wr a) * tau
    tau(p) = 1 + alpha * ln(max((p + 1) / n_floor, 1))                on full layers that have an n_floor, else 1

`qkvr` `[T, q + kv + kv + r]` is the product with the four projections stacked in that order; K and V are convolved
together as one strided view of it. Norms run over each head of `head_dim` values. tau is float32 and rounds once with
its product. Only q `[T, Hq, D]` and r `[T, Hq, d_rel]` leave; K and V go to the paged cache, logical `[P, page, Hkv,
D]` of any strides, at flat slot `page_id * page + offset`; slot -1 is padding and is not written.
"""

from __future__ import annotations

import torch

from inkling_kernels.norm import rms_norm_ref
from inkling_kernels.short_conv import short_conv_ref


def kv_write_ref(x: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `x` `[T, Hkv, D]` into `pages` `[P, page, Hkv, D]` at `slot_mapping` `[T]` int64; slots of -1 are passed
    over.
    """
    page = pages.shape[1]
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        x, slot_mapping = x[kept], slot_mapping[kept]
    pages[slot_mapping // page, slot_mapping % page] = x.to(pages.dtype)


def qkvr_prep_ref(
    qkvr: torch.Tensor,
    conv_weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor] | None,
    slot_mapping: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_rel: int,
    log_scaling_n_floor: int | None,
    log_scaling_alpha: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `(q, r, k_pages, v_pages)`; see the module. Writes `state` and the cache in place.

    `conv_weight` is `[2 * Hkv * D, W]` float32, K's channels first. Without `kv_cache` (training; all sequences
    equally long) the step's own K and V come back as pages, one page a sequence, and gradients flow through them.
    """
    q_size, kv_size, r_size = num_heads * head_dim, num_kv_heads * head_dim, num_heads * d_rel
    if qkvr.shape[1] != q_size + 2 * kv_size + r_size:
        raise ValueError(
            f"qkvr_prep: qkvr has {qkvr.shape[1]} columns; {num_heads} query and {num_kv_heads} key heads of "
            f"{head_dim} with d_rel {d_rel} need {q_size + 2 * kv_size + r_size}"
        )
    q, kv, r = qkvr.split([q_size, 2 * kv_size, r_size], -1)
    kv = short_conv_ref(kv, conv_weight, state, slots, cu_seqlens, kv_lens)
    q = rms_norm_ref(q.unflatten(-1, (num_heads, head_dim)), q_norm, eps)
    k = rms_norm_ref(kv[:, :kv_size].unflatten(-1, (num_kv_heads, head_dim)), k_norm, eps)
    v, r = kv[:, kv_size:].unflatten(-1, (num_kv_heads, head_dim)), r.unflatten(-1, (num_heads, d_rel))
    if log_scaling_n_floor is not None and kv_lens.numel() and int(kv_lens.max()) > log_scaling_n_floor:
        q_lens = cu_seqlens.diff()
        start = torch.repeat_interleave(kv_lens - q_lens - cu_seqlens[:-1], q_lens)
        n = (start + torch.arange(len(q), device=q.device) + 1).float()
        tau = 1 + log_scaling_alpha * torch.log((n / log_scaling_n_floor).clamp(min=1.0)).view(-1, 1, 1)
        q, r = (q.float() * tau).to(q.dtype), (r.float() * tau).to(r.dtype)
    if (kv_cache is None) != (slot_mapping is None):
        raise ValueError("qkvr_prep: kv_cache and slot_mapping are given together or not at all")
    if kv_cache is None or slot_mapping is None:
        sequences = len(kv_lens)
        return q, r, k.unflatten(0, (sequences, -1)), v.unflatten(0, (sequences, -1))
    kv_write_ref(k, kv_cache[0], slot_mapping)
    kv_write_ref(v, kv_cache[1], slot_mapping)
    return q, r, *kv_cache
