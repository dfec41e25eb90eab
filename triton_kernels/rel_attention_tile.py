"""What the two relative attention kernels share: the loop over key tiles and the check of their arguments.

The bias of query token `t` of a tile at key `j` is `r[t] . proj[:, first + t - j]`. Every token needs its own shift of
`proj`, so a plain product of `r` and a band of `proj` would have to be sheared row by row afterwards. Here the shift is
put into the operands instead:

    r_wide[row, 16 * u + c]  = r[row, c] where u is the row's token, else 0                     once a query tile
    p_wide[16 * u + c, j]    = proj[c, first + u - j]                                          once a key tile
    score = scale * (q @ k^T) + r_wide @ p_wide

so the bias arrives in the accumulator of the matrix instruction, already in place, and the softmax sees no extra
registers. With `proj` stored distance-major (`proj.stride() == (1, d_rel)`) a column of `p_wide` is a contiguous run of
`16 * tokens` elements; neighbouring columns overlap in all but 16 of them, so the loads hit the first-level cache. Any
strides work; that one is fast. Against shearing a band product with `tl.gather`, compiled for the same 64 x 64 tile
with Triton 3.9, this is 1230 instead of 1853 instructions on sm90 (8 tokens a tile) and 2819 instead of 4665 on gfx942.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# What a row's running maximum starts from: below every score, and finite, so that subtracting it from itself is 0 and
# a row whose keys are all masked so far needs no special case.
FLOOR = tl.constexpr(-1.0e30)

# How the bytes of an fp8 cache are read: OCP's e4m3fn (NaN at 0x7F and 0xFF) or CDNA3's e4m3fnuz (NaN at 0x80, half the
# value).
FP8_KINDS = {torch.float8_e4m3fn: 1, torch.uint8: 1, torch.float8_e4m3fnuz: 2}


@triton.jit
def _widen_fn(raw, FP8: tl.constexpr, to: tl.constexpr):
    """fp8 bytes as `to`, exactly: the magnitude's bits become a float32's exponent and top mantissa, then the bias is
    undone."""
    if FP8 == 0:
        return raw
    byte = raw.to(tl.uint32)
    value = (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).to(tl.float32, bitcast=True)
    if FP8 == 1:
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)
    else:
        value = tl.where(byte == 0x80, float("nan"), value * 6.64613997892458e35)
    return value.to(to)


@triton.jit
def _cache_fn(at, held, FP8: tl.constexpr, to: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values of a tile as `to`; MASKED: 0 for those that are not `held`, which are not read."""
    if MASKED:
        raw = tl.load(at, mask=held[:, None], other=0)
    else:
        raw = tl.load(at)
    return _widen_fn(raw, FP8, to)


@triton.jit
def r_wide_fn(r_row_ptr, r_stride, token, live, shift, D_REL: tl.constexpr, TOKENS: tl.constexpr):
    """`r_wide` for tokens `shift .. shift + TOKENS - 1` of a tile; rows of other tokens are 0 and are not read."""
    wide = tl.arange(0, D_REL * TOKENS)
    own = live[:, None] & ((token - shift)[:, None] == (wide // D_REL)[None, :])
    return tl.load(r_row_ptr[:, None] + ((wide % D_REL).to(tl.int64) * r_stride)[None, :], mask=own, other=0.0)


@triton.jit
def _p_wide_fn(
    proj_ptr, proj_strides, first, key, extent, D_REL: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """`p_wide` for `TOKENS` query positions from `first` on and the keys of a tile; 0 outside `0 <= distance <
    extent`. AHEAD: some distance may be negative."""
    wide = tl.arange(0, D_REL * TOKENS)
    distance = (first - key)[None, :] + (wide // D_REL)[:, None]
    at = distance * proj_strides[1] + (wide % D_REL)[:, None] * proj_strides[0]
    inside = distance < extent
    if AHEAD:
        inside = inside & (distance >= 0)
    return tl.load(proj_ptr + at, mask=inside, other=0.0)


@triton.jit
def attend_fn(
    acc, peak, total, q, r_wide, r_extra, k_ptr, v_ptr, proj_ptr, table_ptr, k_strides, v_strides, proj_strides,
    first, token, begin, end, low, high, window, extent, scale,
    D: tl.constexpr, D_REL: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Online softmax of one query tile over the keys `begin .. end - 1`, in tiles from a multiple of BLOCK_N on.

    `first` is the position of the tile's token 0; `peak` is in bits, the score times LOG2E. Keys outside `low .. high -
    1` belong to no row: neither they, nor their values, nor their page numbers are read, and zeros stand for them.
    BIAS: some distance may lie inside the extent; WINDOW: some key may have left a row's window; CAUSAL: some key may
    lie ahead of a row, or at or past `high`. APART: a value that is not finite makes NaN of the rows that give its key
    weight and of no other; in the plain product 0 * NaN and 0 * inf are NaN in all of them, which `spoilt_fn` tells.
    """
    col = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D).to(tl.int64)
    if begin < end:
        for start in range(begin, end, BLOCK_N):
            key = start + col
            held = (key >= low) & (key < high)
            if PAGE >= BLOCK_N:
                page = tl.load(table_ptr + start // PAGE).to(tl.int64)
                slot = (start % PAGE + col).to(tl.int64)
            else:
                number = start // PAGE + tl.arange(0, BLOCK_N // PAGE)
                if WINDOW or CAUSAL:
                    some = (number * PAGE + PAGE > low) & (number * PAGE < high)
                    page = tl.load(table_ptr + number, mask=some, other=0)
                else:
                    page = tl.load(table_ptr + number)
                # One number for each of its keys. Products come after the reshape, beyond which Triton 3.6 does not
                # know that they are multiples of 16 bytes.
                page = tl.reshape(tl.broadcast_to(page[:, None], [BLOCK_N // PAGE, PAGE]), [BLOCK_N]).to(tl.int64)
                slot = (col % PAGE).to(tl.int64)
            k_row, v_row = page * k_strides[0] + slot * k_strides[1], page * v_strides[0] + slot * v_strides[1]
            k_at = k_ptr + k_row[:, None] + (dim * k_strides[3])[None, :]
            v_at = v_ptr + v_row[:, None] + (dim * v_strides[3])[None, :]
            if APART:
                # 0 for a finite value, else NaN: so is their sum for a key. Before the scores take their registers.
                v = _cache_fn(v_at, held, FP8, q.dtype, True)
                nought = v * 0.0
                v = tl.where(nought == 0.0, v, 0.0)
                spoils = tl.sum(nought.to(tl.float32), 1)
            k = _cache_fn(k_at, held, FP8, q.dtype, WINDOW or CAUSAL)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            bits = scale * LOG2E
            if BIAS:
                p_wide = _p_wide_fn(proj_ptr, proj_strides, first, key, extent, D_REL, TOKENS, CAUSAL)
                score = tl.dot(r_wide, p_wide, score * scale, input_precision="ieee")
                if EXTRA > 0:
                    p_wide = _p_wide_fn(proj_ptr, proj_strides, first + TOKENS, key, extent, D_REL, EXTRA, CAUSAL)
                    score = tl.dot(r_extra, p_wide, score, input_precision="ieee")
                bits = LOG2E
            distance = (first + token)[:, None] - key[None, :]
            if CAUSAL and WINDOW:
                score = tl.where((distance >= 0) & (distance < window), score, float("-inf"))
            elif CAUSAL:
                score = tl.where(distance >= 0, score, float("-inf"))
            elif WINDOW:
                score = tl.where(distance < window, score, float("-inf"))
            raised = tl.maximum(peak, tl.max(score, 1) * bits)
            weight = tl.exp2(score * bits - raised[:, None])
            decay = tl.exp2(peak - raised)
            if APART:
                weight += tl.where(weight > 0.0, spoils[None, :], 0.0)
            else:
                v = _cache_fn(v_at, held, FP8, q.dtype, WINDOW or CAUSAL)
            total = total * decay + tl.sum(weight, 1)
            peak = raised
            acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def spoilt_fn(acc):
    """Whether a sum is NaN: then some rows may owe it to values of keys that only others see. Also true where
    infinities of both signs meet, which costs time alone."""
    found = tl.sum(acc)
    return found != found


def check_arguments(
    op: str,
    q: torch.Tensor,
    r: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    proj: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int | None,
    scale: float,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
    max_query_len: int | None,
    max_kv_len: int | None,
) -> None:
    """Raise TypeError or ValueError for what `op` cannot take. Lengths are compared with each other only on the CPU,
    where reading them waits for nothing."""
    named = {"q": q, "r": r, "k_pages": k_pages, "v_pages": v_pages, "proj": proj, "block_table": block_table}
    named |= {"cu_seqlens": cu_seqlens, "kv_lens": kv_lens}
    ranks = {"q": 3, "r": 3, "k_pages": 4, "v_pages": 4, "proj": 2, "block_table": 2, "cu_seqlens": 1, "kv_lens": 1}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} is {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.dim() != ranks[name]:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {ranks[name]} dimensions")
        if tensor.device != q.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and q on {q.device}; move them to one device")
    for name in ("block_table", "cu_seqlens", "kv_lens"):
        if named[name].dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {named[name].dtype}; expected torch.int32")
        if named[name].dim() == 1 and named[name].stride(0) != 1 and named[name].numel() > 1:
            raise ValueError(f"{op}: {name} has stride {named[name].stride(0)}; expected a contiguous tensor")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"{op}: block_table has stride {block_table.stride(1)} along pages; expected 1")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{op}: q is {q.dtype}; expected bfloat16, float32 or (in tests) float16")
    for name in ("r", "proj"):
        if named[name].dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {named[name].dtype} and q {q.dtype}; cast {name} to q's type")
    if v_pages.dtype != k_pages.dtype or (k_pages.dtype != q.dtype and k_pages.dtype not in FP8_KINDS):
        raise TypeError(
            f"{op}: k_pages is {k_pages.dtype} and v_pages {v_pages.dtype}; expected both {q.dtype} like q, or both "
            "fp8 (float8_e4m3fn, float8_e4m3fnuz, or uint8 holding e4m3fn)"
        )
    heads, head_dim = q.shape[1:]
    kv_heads = k_pages.shape[2]
    if head_dim not in (16, 32, 64, 128):
        raise ValueError(f"{op}: q has head_dim {head_dim}; expected 16, 32, 64 or 128")
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != head_dim:
        raise ValueError(
            f"{op}: k_pages has shape {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)}; expected both "
            f"[pages, page, kv_heads, {head_dim}]"
        )
    page = k_pages.shape[1]
    if page < 16 or page > 256 or page & (page - 1):
        raise ValueError(f"{op}: k_pages has pages of {page} tokens; expected a power of two from 16 to 256")
    if kv_heads == 0 or heads % kv_heads or not 1 <= heads // kv_heads <= 16:
        raise ValueError(f"{op}: q has {heads} heads over {kv_heads} key heads; expected a whole group of 1 to 16")
    if r.shape[:2] != q.shape[:2] or r.shape[2] != proj.shape[0]:
        raise ValueError(
            f"{op}: r has shape {tuple(r.shape)}; expected [{len(q)}, {heads}, {proj.shape[0]}] as q and proj say"
        )
    if proj.shape[0] != 16:
        raise ValueError(f"{op}: proj has d_rel {proj.shape[0]}; these kernels are written for 16")
    if proj.shape[1] < 1:
        raise ValueError(f"{op}: proj has shape {tuple(proj.shape)}; expected an extent of at least 1")
    if (proj.shape[1] + 16) * abs(proj.stride(1)) + 15 * abs(proj.stride(0)) >= 1 << 31:
        raise ValueError(
            f"{op}: proj has strides {proj.stride()}; its {proj.shape[1]} distances must lie within 2^31 elements"
        )
    if len(cu_seqlens) != len(kv_lens) + 1 or len(block_table) != len(kv_lens):
        raise ValueError(
            f"{op}: {len(kv_lens)} kv_lens, {len(cu_seqlens)} cu_seqlens and {len(block_table)} rows of block_table; "
            "expected B, B + 1 and B"
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{op}: window is {window!r}; expected a positive int, or None for full attention")
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise ValueError(f"{op}: scale is {scale!r}; expected a positive finite number (1 / head_dim)")
    if len(q) and len(kv_lens) == 0:
        raise ValueError(f"{op}: kv_lens is empty and q has {len(q)} rows; expected at least one sequence")
    check_scales(op, k_pages, kv_scales)
    room = block_table.shape[1] * page
    if isinstance(max_kv_len, int) and max_kv_len > room:
        raise ValueError(
            f"{op}: block_table has {block_table.shape[1]} pages of {page} tokens a sequence; max_kv_len {max_kv_len} "
            f"needs {-(-max_kv_len // page)}"
        )
    if q.device.type == "cpu":
        starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
        _check_lengths(op, len(q), room, starts, lengths)
        check_bounds(op, starts, lengths, max_query_len, max_kv_len)
    else:
        check_bounds(op, [0], [], max_query_len, max_kv_len)


def meta_case(
    heads: int, kv_heads: int, extent: int, rows: int, *, dtype: torch.dtype = torch.bfloat16, fp8: bool = False,
    page: int = 16,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor] | None]:  # fmt: skip
    """Tensors without storage in the shapes of a layer, and the cache's scales: what the cases to compile are launched
    with."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = [empty(4096, page, kv_heads, 128, dtype=torch.uint8 if fp8 else dtype) for _ in range(2)]
    lengths = [empty(4, 8192 // page, dtype=torch.int32), empty(5, dtype=torch.int32), empty(4, dtype=torch.int32)]
    scales = (empty(kv_heads, dtype=torch.float32), empty(kv_heads, dtype=torch.float32)) if fp8 else None
    return (empty(rows, heads, 128), empty(rows, heads, 16), *pages, empty(extent, 16).t(), *lengths), scales


def cache_operands(
    k_pages: torch.Tensor, v_pages: torch.Tensor, kv_scales: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None], int]:
    """The cache as a kernel takes it: fp8 as bytes (Triton has no e4m3 type on half the chips), scales, their
    stride."""
    if kv_scales is None:
        return (k_pages, v_pages), (None, None), 0
    per_head = len(kv_scales[0]) > 1
    return (k_pages.view(torch.uint8), v_pages.view(torch.uint8)), kv_scales, int(per_head)


def check_scales(op: str, k_pages: torch.Tensor, kv_scales: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise TypeError or ValueError for scales that do not belong to such a cache."""
    if (kv_scales is not None) != (k_pages.dtype in FP8_KINDS):
        wanted = "(k_scale, v_scale)" if kv_scales is None else "None"
        raise ValueError(f"{op}: kv_scales is {kv_scales!r} for a {k_pages.dtype} cache; expected {wanted}")
    if kv_scales is None:
        return
    if not isinstance(kv_scales, tuple) or len(kv_scales) != 2:
        raise TypeError(f"{op}: kv_scales is {kv_scales!r}; expected a tuple (k_scale, v_scale)")
    for name, scale in zip(("k_scale", "v_scale"), kv_scales, strict=True):
        if not isinstance(scale, torch.Tensor):
            raise TypeError(f"{op}: {name} is {type(scale).__name__}; expected a torch.Tensor")
        if scale.dtype != torch.float32 or scale.dim() != 1 or len(scale) not in (1, k_pages.shape[2]):
            raise ValueError(
                f"{op}: {name} is {scale.dtype} {tuple(scale.shape)}; expected float32 [1] or [{k_pages.shape[2]}]"
            )
        if len(scale) != len(kv_scales[0]):
            raise ValueError(
                f"{op}: v_scale has {len(scale)} entries and k_scale {len(kv_scales[0])}; expected one number"
            )
        if len(scale) > 1 and scale.stride(0) != 1:
            raise ValueError(f"{op}: {name} has stride {scale.stride(0)}; expected a contiguous tensor")
        if scale.device != k_pages.device:
            raise ValueError(
                f"{op}: {name} is on {scale.device} and k_pages on {k_pages.device}; move them to one device"
            )


def check_bounds(
    op: str, starts: list[int], kv_lens: list[int], max_query_len: int | None, max_kv_len: int | None
) -> None:
    """Raise ValueError for bounds that are none, or that one of the sequences passes."""
    rows = [b - a for a, b in pairwise(starts)]
    for name, bound, found in (("max_query_len", max_query_len, rows), ("max_kv_len", max_kv_len, kv_lens)):
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise ValueError(f"{op}: {name} is {bound!r}; expected an int that no sequence passes, or None")
        if found and max(found) > bound:
            raise ValueError(f"{op}: {name} is {bound} and a sequence has {max(found)}; expected no fewer")


def _check_lengths(op: str, tokens: int, room: int, starts: list[int], kv_lens: list[int]) -> None:
    if starts[0] != 0 or starts[-1] > tokens or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"{op}: cu_seqlens is {starts}; expected a rise from 0 to at most {tokens}, the rows of q")
    for name, bad in (("negative", [n for n in kv_lens if n < 0]), ("too long", [n for n in kv_lens if n > room])):
        if bad:
            raise ValueError(f"{op}: kv_lens has {name} {bad[0]}; block_table has room for 0 to {room} keys a sequence")
