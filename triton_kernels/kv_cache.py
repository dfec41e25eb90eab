"""Preparation of the attention inputs from the fused projection: convolution, norms, log scaling, cache write.

    q = rms(Wq a; q_norm) * tau      k = rms(conv(Wk a); k_norm)      v = conv(Wv a)      r = (Wr a) * tau
    tau(p) = 1 + alpha * ln(max((p + 1) / n_floor, 1))                on full layers that have an n_floor, else 1

`qkvr` `[T, q + kv + kv + r]` is the product with the four projections stacked in that order; K and V are convolved
together as one strided view of it. Norms run over each head of `head_dim` values. tau is float32 and rounds once with
its product. Only q `[T, Hq, D]` and r `[T, Hq, d_rel]` leave; K and V go to the paged cache, logical `[P, page, Hkv,
D]` of any strides, at flat slot `page_id * page + offset`; slot -1 is padding and is not written.

In the kernel a program takes one head of q, k or v, or a run of r, of a tile of rows of one sequence. An fp8 cache
(e4m3fn, e4m3fnuz, or uint8 holding e4m3fn) gets `value / scale`, scales float32 per tensor or per head, converted
as `inkling_kernels.fp8` says. q is never cast down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inkling_kernels.compile_case import NO_MATRIX, CompileCase
from inkling_kernels.fp8 import fp8_fn, fp8_ref
from inkling_kernels.norm import normed_fn, rms_norm_ref
from inkling_kernels.ragged import FLOATS, check_config, check_tensor, not_powers_of_two, sequence_tile_fn
from inkling_kernels.rel_attention_tile import FP8_KINDS, cache_operands, check_scales
from inkling_kernels.short_conv import convolved_ref
from inkling_kernels.short_conv_tile import check_conv, convolved_fn, keep_fn, owner_fn
from inkling_kernels.target import Target


@dataclass(frozen=True, slots=True)
class QkvrPrepConfig:
    """Rows of a tile. It does not follow the lengths, so that a row's bits do not depend on the batch around it."""

    rows: int = 8
    num_warps: int = 4

    def problems(self, target: Target, *, width: int) -> tuple[str, ...]:
        """Why this configuration cannot run there; empty where it can."""
        found = not_powers_of_two(self, rows=(1, 64), num_warps=(1, 8))
        if self.rows < width - 1:
            found.append(f"rows is {self.rows}; the first tile of a sequence must hold the {width - 1} that reach back")
        return tuple(found)


DEFAULT = QkvrPrepConfig()


@triton.jit
def _cache_fn(y, pages_ptr, strides, slot, page, head, dim, scale_ptr, scale_stride, FP8: tl.constexpr):
    """Write rows `y` `[rows, D]` of one head at flat cache slots `[rows]` int64; a slot below 0 is passed over."""
    at = (slot // page) * strides[0] + (slot % page) * strides[1] + head * strides[2]
    if FP8 > 0:
        scale = tl.load(scale_ptr + head * scale_stride)
        y = fp8_fn(tl.div_rn(y.to(tl.float32), tl.zeros(y.shape, tl.float32) + scale), FP8)
    kept = (slot >= 0)[:, None] & (dim >= 0)[None, :]
    tl.store(pages_ptr + at[:, None] + (dim * strides[3])[None, :], y.to(pages_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _tau_fn(position, n_floor, alpha):
    """`1 + alpha * ln(max((position + 1) / n_floor, 1))`, exactly 1 up to the floor."""
    n = (position + 1).to(tl.float32)
    return tl.where(n > n_floor, 1.0 + alpha * tl.log(tl.maximum(n / n_floor, 1.0)), 1.0)


@triton.jit(do_not_specialize=["rows", "batch", "ring", "eps", "n_floor", "alpha"])
def _qkvr_prep_kernel(
    q_ptr, r_ptr, k_ptr, v_ptr, x_ptr, weight_ptr, q_norm_ptr, k_norm_ptr, state_ptr, slots_ptr, cu_ptr, kv_lens_ptr,
    mapping_ptr, k_scale_ptr, v_scale_ptr, rows, batch, ring, page, eps, n_floor, alpha, x_strides, weight_strides,
    state_strides, slots_strides, k_strides, v_strides, scale_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D_REL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
    FP8: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    seq, begin, length, covered, local, start = sequence_tile_fn(
        cu_ptr, kv_lens_ptr, tl.program_id(0), rows, batch, BLOCK_T
    )
    if local >= covered:
        return
    part = tl.program_id(1)
    index = local + tl.arange(0, BLOCK_T)
    row_live = index < covered
    row = (begin + index).to(tl.int64)
    dim = tl.arange(0, D).to(tl.int64)
    column = part.to(tl.int64) * D + dim
    dtype = q_ptr.dtype.element_ty
    if part >= HEADS and part < HEADS + 2 * KV_HEADS:
        head = (part - HEADS).to(tl.int64)
        channel = head * D + dim
        x_at, state_at, every = column * x_strides[1], channel * state_strides[2], dim >= 0
        slot = -1
        if state_ptr is not None:
            slot, slots_ptr = owner_fn(slots_ptr, slots_strides, seq, PAGED)
        y = convolved_fn(
            x_ptr, x_strides[0], x_at, weight_ptr, channel * weight_strides[0], weight_strides[1],
            state_ptr, state_strides[0], state_strides[1], state_at, slot, slots_ptr, slots_strides[1], ring, begin,
            length, local, start, every, WIDTH, BLOCK_T, PAGED,
        ).to(dtype)  # fmt: skip
        if state_ptr is not None:
            keep_fn(
                x_ptr, x_strides[0], x_at, state_ptr, state_strides[0], state_strides[1], state_at,
                slot, slots_ptr, slots_strides[1], ring, begin, length, local, start, every, BLOCK_T, PAGED,
            )  # fmt: skip
        at = tl.load(mapping_ptr + row, mask=(index < length) & (start + index >= 0), other=-1)
        if head < KV_HEADS:
            weight = tl.load(k_norm_ptr + dim).to(tl.float32)
            y = normed_fn(y.to(tl.float32), weight, D, eps, dtype)
            _cache_fn(y, k_ptr, k_strides, at, page, head, dim, k_scale_ptr, scale_stride, FP8)
        else:
            _cache_fn(y, v_ptr, v_strides, at, page, head - KV_HEADS, dim, v_scale_ptr, scale_stride, FP8)
    else:
        is_q = part < HEADS
        run = column - (HEADS + 2 * KV_HEADS) * D
        live = row_live[:, None] & ((column < HEADS * D) | (run < HEADS * D_REL))[None, :]
        x = tl.load(x_ptr + (row * x_strides[0])[:, None] + (column * x_strides[1])[None, :], mask=live, other=0.0)
        if is_q:
            weight = tl.load(q_norm_ptr + dim).to(tl.float32)
            x = normed_fn(x.to(tl.float32), weight, D, eps, dtype)
        if TAU:
            x = (x.to(tl.float32) * _tau_fn(start + index, n_floor, alpha)[:, None]).to(dtype)
        if is_q:
            tl.store(q_ptr + (row * (HEADS * D))[:, None] + column[None, :], x, mask=live)
        elif TAU:
            tl.store(r_ptr + (row * (HEADS * D_REL))[:, None] + run[None, :], x, mask=live)


@dataclass(frozen=True, slots=True)
class QkvrPrepPlan:
    """A launch: (row tiles at most, heads of q, k and v and runs of r), rows a tile, warps."""

    grid: tuple[int, int]
    block_t: int
    num_warps: int


def qkvr_prep_plan(
    rows: int,
    batch: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_rel: int,
    tau: bool,
    target: Target | None = None,
    config: QkvrPrepConfig | None = None,
) -> QkvrPrepPlan:
    """Plan `rows` rows of `batch` sequences; pure, and right for any lengths. Without `tau` r is not touched."""
    config = config or DEFAULT
    runs = triton.cdiv(num_heads * d_rel, head_dim) if tau else 0
    parts = num_heads + 2 * num_kv_heads + runs
    return QkvrPrepPlan((rows // config.rows + batch, parts), config.rows, config.num_warps)


def qkvr_prep(
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
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    target: Target | None = None,
    config: QkvrPrepConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare a step's q, r, k and v with the Triton kernel; returns `(q, r, k_pages, v_pages)`. Forward only.

    As the module and `qkvr_prep_ref` say; `qkvr`, `q_norm` and `k_norm` bfloat16, float32 or (in tests) float16, all
    the same, any strides. The cache is of that type, or fp8 with `kv_scales` = float32 `(k_scale, v_scale)`, each `[1]`
    or `[Hkv]`. Without log scaling `r` is a view of `qkvr`. Rows behind `cu_seqlens[-1]`, at positions before 0 or of
    slot -1 are not cached; a sequence whose entry of `slots` is -1 keeps no state. Without `kv_cache` all sequences
    must be equally long; their K and V come back as one page each.

    Raises TypeError or ValueError naming the argument, before anything is allocated or launched.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "d_rel": d_rel}
    config = config or DEFAULT
    _check(
        qkvr, conv_weight, q_norm, k_norm, eps, state, slots, cu_seqlens, kv_lens, kv_cache, slot_mapping, sizes,
        log_scaling_n_floor, kv_scales,
    )  # fmt: skip
    if target is not None:
        check_config("qkvr_prep", config.problems(target, width=conv_weight.shape[1]))
    rows, device, batch = len(qkvr), qkvr.device, len(kv_lens)
    tau = log_scaling_n_floor is not None
    q = torch.empty(rows, num_heads, head_dim, dtype=qkvr.dtype, device=device)
    r = qkvr[:, (num_heads + 2 * num_kv_heads) * head_dim :].unflatten(1, (num_heads, d_rel))
    if tau:
        r = torch.empty(r.shape, dtype=qkvr.dtype, device=device)
    if kv_cache is not None:
        k_pages, v_pages = kv_cache
    else:
        shape = (batch, rows // max(1, batch), num_kv_heads, head_dim)
        k_pages, v_pages = (torch.empty(shape, dtype=qkvr.dtype, device=device) for _ in range(2))
        slot_mapping = torch.arange(rows, device=device)
    if rows == 0:
        return q, r, k_pages, v_pages
    plan = qkvr_prep_plan(rows, batch, **sizes, tau=tau, target=target, config=config)
    pages, scales, scale_stride = cache_operands(k_pages, v_pages, kv_scales)
    _qkvr_prep_kernel[plan.grid](
        q, r, *pages, qkvr, conv_weight, q_norm, k_norm, state, slots, cu_seqlens, kv_lens, slot_mapping, *scales, rows,
        batch, state.shape[1] if state is not None else 1, k_pages.shape[1], float(eps),
        float(log_scaling_n_floor or 1), float(log_scaling_alpha), qkvr.stride(), conv_weight.stride(),
        state.stride() if state is not None else (0, 0, 0), (*slots.stride(), 0)[:2], k_pages.stride(),
        v_pages.stride(), scale_stride,
        HEADS=num_heads, KV_HEADS=num_kv_heads, D=head_dim, D_REL=d_rel, WIDTH=conv_weight.shape[1],
        BLOCK_T=plan.block_t, PAGED=slots.dim() == 2, FP8=FP8_KINDS[k_pages.dtype] if kv_scales else 0, TAU=tau,
        num_warps=plan.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return q, r, k_pages, v_pages


def _check(
    qkvr: torch.Tensor, conv_weight: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float,
    state: torch.Tensor | None, slots: torch.Tensor, cu_seqlens: torch.Tensor, kv_lens: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor] | None, slot_mapping: torch.Tensor | None, sizes: dict[str, int],
    n_floor: int | None, kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:  # fmt: skip
    op = "qkvr_prep"
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{op}: {name} is {value!r}; expected a positive int")
    heads, kv_heads, head_dim, d_rel = sizes.values()
    if head_dim > 256 or head_dim & (head_dim - 1):
        raise ValueError(f"{op}: head_dim is {head_dim}; expected a power of two up to 256")
    columns = (heads + 2 * kv_heads) * head_dim + heads * d_rel
    check_tensor(op, "qkvr", qkvr, (None, None), FLOATS)
    if qkvr.shape[1] != columns:
        raise ValueError(
            f"{op}: qkvr has {qkvr.shape[1]} columns; {heads} query and {kv_heads} key heads of {head_dim} "
            f"with d_rel {d_rel} need {columns}"
        )
    kv = qkvr[:, heads * head_dim : (heads + 2 * kv_heads) * head_dim]
    check_conv(op, kv, conv_weight, state, slots, cu_seqlens, kv_lens)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        check_tensor(op, name, norm, (head_dim,), (qkvr.dtype,), qkvr.device)
        if norm.stride(0) != 1:
            raise ValueError(f"{op}: {name} has stride {norm.stride(0)}; expected a contiguous tensor")
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps!r}; expected 0 or more")
    if n_floor is not None and not n_floor > 0:
        raise ValueError(f"{op}: log_scaling_n_floor is {n_floor!r}; expected a positive number, or None")
    rows = len(qkvr)
    if (kv_cache is None) != (slot_mapping is None):
        raise ValueError(f"{op}: kv_cache and slot_mapping are given together or not at all")
    if kv_cache is None or slot_mapping is None:
        if rows % max(1, len(kv_lens)):
            raise ValueError(
                f"{op}: kv_cache is None and {len(kv_lens)} sequences have {rows} rows; expected equally many"
            )
        if kv_scales is not None:
            raise ValueError(f"{op}: kv_scales is given without kv_cache; expected None")
        return
    check_tensor(op, "slot_mapping", slot_mapping, (rows,), (torch.int64,), qkvr.device)
    if rows > 1 and slot_mapping.stride(0) != 1:
        raise ValueError(f"{op}: slot_mapping has stride {slot_mapping.stride(0)}; expected a contiguous tensor")
    if not isinstance(kv_cache, tuple) or len(kv_cache) != 2:
        raise TypeError(f"{op}: kv_cache is {type(kv_cache).__name__}; expected a tuple (k_pages, v_pages)")
    wanted = (qkvr.dtype,) if kv_scales is None else tuple(FP8_KINDS)
    for name, pages in zip(("k_pages", "v_pages"), kv_cache, strict=True):
        check_tensor(op, name, pages, (*kv_cache[0].shape[:2], kv_heads, head_dim), wanted, qkvr.device)
    if kv_cache[1].dtype != kv_cache[0].dtype:
        raise TypeError(f"{op}: v_pages is {kv_cache[1].dtype} and k_pages {kv_cache[0].dtype}; expected one type")
    check_scales(op, kv_cache[0], kv_scales)
    room = kv_cache[0].shape[0] * kv_cache[0].shape[1]
    if qkvr.device.type == "cpu" and rows and int(slot_mapping.max()) >= room:
        raise ValueError(
            f"{op}: slot_mapping has {int(slot_mapping.max())}; expected slots below {room}, or -1 for none"
        )


def _case(
    name: str,
    heads: int,
    kv_heads: int,
    n_floor: int | None,
    fp8: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> CompileCase:
    def launch(target: Target) -> object:
        def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device="meta")

        def int32(size: int) -> torch.Tensor:
            return empty(size, kind=torch.int32)

        kv = kv_heads * 128
        scales = empty(kv_heads, kind=torch.float32)
        return qkvr_prep(
            empty(8192, heads * (128 + 16) + 2 * kv), empty(2 * kv, 4, kind=torch.float32), empty(128), empty(128),
            1e-6, empty(64, 11, 2 * kv), int32(4), int32(5), int32(4),
            (empty(64, 16, kv_heads, 128, kind=fp8 or dtype), empty(64, 16, kv_heads, 128, kind=fp8 or dtype)),
            empty(8192, kind=torch.int64), num_heads=heads, num_kv_heads=kv_heads, head_dim=128, d_rel=16,
            log_scaling_n_floor=n_floor, log_scaling_alpha=0.1, kv_scales=(scales, scales) if fp8 else None,
            target=target,
        )  # fmt: skip

    return CompileCase(name, "qkvr_prep=triton", launch, instruction=NO_MATRIX)


COMPILE_CASES = (
    _case("full", 64, 8, 128_000),
    _case("sliding", 64, 16, None),
    _case("sliding, e4m3fn cache", 64, 16, None, torch.float8_e4m3fn),
    _case("full, e4m3fnuz cache", 64, 8, 128_000, torch.float8_e4m3fnuz),
    _case("Small, full, float32", 32, 8, 128_000, dtype=torch.float32),
)


def kv_write_ref(
    x: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """Write `x` `[T, Hkv, D]` into `pages` `[P, page, Hkv, D]` at `slot_mapping` `[T]` int64; slots of -1 are passed
    over. With `scale` `[1]` or `[Hkv]` the pages are fp8 and get `x / scale`.
    """
    page = pages.shape[1]
    if scale is not None:
        x, pages = fp8_ref(x.float() / scale[:, None], pages.dtype), pages.view(torch.uint8)
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
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `(q, r, k_pages, v_pages)`; see the module. Writes `state` and the cache in place, fp8 with `kv_scales`.

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
    kv = convolved_ref(kv, conv_weight, state, slots, cu_seqlens, kv_lens)
    q = rms_norm_ref(q.unflatten(-1, (num_heads, head_dim)), q_norm, eps)
    k = rms_norm_ref(kv[:, :kv_size].unflatten(-1, (num_kv_heads, head_dim)), k_norm, eps)
    v, r = kv[:, kv_size:].unflatten(-1, (num_kv_heads, head_dim)), r.unflatten(-1, (num_heads, d_rel))
    if log_scaling_n_floor is not None and kv_lens.numel() and int(kv_lens.max()) > log_scaling_n_floor:
        q_lens, n = cu_seqlens.diff(), torch.arange(1, len(q) + 1, device=q.device)
        # Rows behind the last sequence are padding: what they are scaled by does not matter.
        n[: int(q_lens.sum())] += torch.repeat_interleave(kv_lens - q_lens - cu_seqlens[:-1], q_lens)
        tau = 1 + log_scaling_alpha * torch.log((n.float() / log_scaling_n_floor).clamp(min=1.0)).view(-1, 1, 1)
        q, r = (q.float() * tau).to(q.dtype), (r.float() * tau).to(r.dtype)
    if (kv_cache is None) != (slot_mapping is None):
        raise ValueError("qkvr_prep: kv_cache and slot_mapping are given together or not at all")
    if kv_cache is None or slot_mapping is None:
        if kv_scales is not None:
            raise ValueError("qkvr_prep: kv_scales is given without kv_cache; expected None")
        sequences = len(kv_lens)
        return q, r, k.unflatten(0, (sequences, -1)), v.unflatten(0, (sequences, -1))
    k_scale, v_scale = kv_scales or (None, None)
    kv_write_ref(k, kv_cache[0], slot_mapping, k_scale)
    kv_write_ref(v, kv_cache[1], slot_mapping, v_scale)
    return q, r, *kv_cache
