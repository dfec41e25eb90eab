"""What the CPU kernels are made of: values in memory, two tiles of products, and threads.

Kernels take addresses and element strides, since making an array of every tensor would cost more than most kernels. The
type of what lies there comes with `like`, an empty array: float32, or uint16 for the bits of bfloat16. Arithmetic is
float32 and rounds to the stored type once an operation.

`dots_fn` takes 4 vectors against 4 weight rows along their columns, so that a weight is read once for 4 tokens;
`blend_fn` adds 4 weighted rows to each of 4 sums. Fewer than 4 are filled up with copies or weights of 0: a token is
computed in one and the same way whatever runs beside it, and its bits do not depend on that. NaN and infinities of a
token reach no other, so the compiler may reorder sums and contract products and may not assume that values are finite.

Work for several threads is cut into parts, each of which a kernel `*_part` does alone.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload

FLOAT, BYTE = np.empty(0, np.float32), np.empty(0, np.uint8)
INT, LONG = np.empty(0, np.int32), np.empty(0, np.int64)
#: The `like` of a tensor's type.
LIKE = {torch.float32: FLOAT, torch.bfloat16: np.empty(0, np.uint16)}
#: Rows up to which an operation is one of few tokens: more are torch's matrix products, which then are the faster ones.
FEW = 32

_FOLDER = Path(__file__).parent
_SOURCES = zlib.crc32(b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.py"))))


# "numpy": a division by zero gives infinity or NaN, and is no exception that a loop would have to look out for.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cfunc_wrapper": True}
_FAST = {"reassoc", "contract"}


def helper(function: Callable[..., Any] | None = None, *, exact: bool = False) -> Any:
    """Compile a function that kernels call, as a part of them; `exact`: with its products in the order written."""
    if function is None:
        return functools.partial(helper, exact=exact)
    return njit(function, no_cpython_wrapper=True, fastmath=set() if exact else _FAST, **_OPTIONS)


def kernel(function: Callable[..., Any], parallel: bool = False) -> Any:
    """Compile a function that Python calls, on first use, and keep the code on disk: beside the module or else in the
    user's cache folder.
    """
    # numba names its files after the function and looks at the module of the function alone, not at its helpers'.
    function.__qualname__ += f"_{_SOURCES:08x}"
    options = {"parallel": parallel, "nogil": True, "fastmath": _FAST, **_OPTIONS}
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:
        # Neither folder can be written to: then every process compiles anew.
        return njit(function, **options)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """`kernel` for a function that runs parts in a `prange`."""
    return kernel(function, parallel=True)


@functools.cache
def _most_threads() -> int:
    """How many threads numba may use; 1 where it has no OpenMP, since its own work queue starts too slowly."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return 1
    return numba.config.NUMBA_NUM_THREADS


#: What this thread last set: to ask numba takes longer.
_running = threading.local()


def parts_of(size: int, least: int) -> int:
    """How many threads share work of `size`, of which a part should have at least `least`: torch's number at most."""
    parts = min(size // least, torch.get_num_threads(), _most_threads())
    if parts <= 1:
        return 1
    if getattr(_running, "parts", None) != parts:
        numba.set_num_threads(parts)
        _running.parts = parts
    return parts


def records(*tensors: torch.Tensor) -> bool:
    """Whether gradients are wanted of what is made of `tensors`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# -- values ------------------------------------------------------------------------------------------------------------


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), build


@intrinsic
def _cast_bits(typing: Any, value: Any) -> Any:
    """The bits of a float32 as uint32, or the reverse."""
    result = types.uint32 if value == types.float32 else types.float32

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(value), build


def widen_fn(value: Any) -> Any:
    """A stored value as float32."""
    raise NotImplementedError


@overload(widen_fn)
def _widen(value):
    if value == types.uint16:
        return lambda value: _cast_bits(np.uint32(np.uint32(value) << 16))
    return lambda value: value


def narrow_fn(like: Any, value: Any) -> Any:
    """A float32 in the stored type: to nearest, ties to even; NaN stays NaN."""
    raise NotImplementedError


@helper
def _to_bfloat16_fn(value):
    bits = _cast_bits(np.float32(value))
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.uint16(even) if value == value else np.uint16(0x7FC0)


@overload(narrow_fn)
def _narrow(like, value):
    if like.dtype == types.uint16:
        return lambda like, value: _to_bfloat16_fn(value)
    return lambda like, value: np.float32(value)


@helper
def row_fn(like, address, size):
    """The `size` elements of type `like` at `address`, as an array."""
    return carray(_pointer(address), (size,), like.dtype)


@helper
def four_fn(like, address, stride, first, last, size):
    """Rows `first` to `first + 3` of a matrix at `address`, `stride` elements apart; those behind `last` are `last`."""
    step = stride * like.itemsize
    return (
        row_fn(like, address + first * step, size),
        row_fn(like, address + min(first + 1, last) * step, size),
        row_fn(like, address + min(first + 2, last) * step, size),
        row_fn(like, address + min(first + 3, last) * step, size),
    )


@helper
def read_fn(to, like, address):
    """Fill the float32 array `to` with stored values."""
    source = row_fn(like, address, to.size)
    for i in range(to.size):
        to[i] = widen_fn(source[i])


@helper
def write_fn(like, address, values):
    """Store the float32 array `values`."""
    out = row_fn(like, address, values.size)
    for i in range(values.size):
        out[i] = narrow_fn(like, values[i])


@helper
def clear_fn(values):
    for i in range(values.size):
        values[i] = 0


@helper
def exp_fn(x):
    """`e ** x` of a float32 to 2 units in the last place; 0 below -87.3 and infinite from 88.3 on.

    In plain operations, which a loop over an array does several at a time. `x = n ln 2 + f`, the constant in two parts
    so that `f` is exact to its last bits; then a polynomial (that of Cephes' expf).
    """
    clamped = x if x > np.float32(-87.3) else np.float32(-87.3)
    clamped = clamped if clamped < np.float32(88.3) else np.float32(88.3)
    n = math.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    f = clamped - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4) * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1)
    y = p * _cast_bits(np.uint32((np.int32(n) + 127) << 23))
    y = y if x > np.float32(-87.3) else np.float32(0)
    y = y if x < np.float32(88.3) else np.float32(np.inf)
    return y if x == x else x


@helper
def largest_fn(values):
    """The largest float32 of an array, or a NaN where it holds one with its sign bit clear.

    Compared as integers of the same order, which takes no assumption on NaN to be done several at a time.
    """
    top = np.int32(-0x80000000)
    for i in range(values.size):
        bits = np.int32(_cast_bits(values[i]))
        top = max(top, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return _cast_bits(np.uint32(top ^ ((top >> 31) & 0x7FFFFFFF)))


@helper
def gate_fn(out, x):
    """`silu(x[2 i]) x[2 i + 1]`, all float32."""
    for i in range(out.size):
        out[i] = x[2 * i] / (np.float32(1) + exp_fn(-x[2 * i])) * x[2 * i + 1]


# -- products ----------------------------------------------------------------------------------------------------------


@helper
def span_fn(size, part, parts):
    """Where part `part` of `size` things begins and ends, in multiples of 4."""
    fours = (size + 3) // 4
    return 4 * (fours * part // parts), min(size, 4 * (fours * (part + 1) // parts))


@helper
def dot_fn(x, w):
    """The inner product of a float32 array and a stored one."""
    total = np.float32(0)
    for k in range(x.size):
        total += x[k] * widen_fn(w[k])
    return total


@helper
def dots_fn(x, w):
    """The 16 inner products of 4 rows `x` `[4, K]` float32 and 4 stored rows `w`: of x's i and w's j at `4 i + j`."""
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    w0, w1, w2, w3 = w
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
    for k in range(x0.size):
        u0, u1, u2, u3 = widen_fn(w0[k]), widen_fn(w1[k]), widen_fn(w2[k]), widen_fn(w3[k])
        v = x0[k]
        a0, a1, a2, a3 = a0 + v * u0, a1 + v * u1, a2 + v * u2, a3 + v * u3
        v = x1[k]
        b0, b1, b2, b3 = b0 + v * u0, b1 + v * u1, b2 + v * u2, b3 + v * u3
        v = x2[k]
        c0, c1, c2, c3 = c0 + v * u0, c1 + v * u1, c2 + v * u2, c3 + v * u3
        v = x3[k]
        d0, d1, d2, d3 = d0 + v * u0, d1 + v * u1, d2 + v * u2, d3 + v * u3
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@helper
def blend_fn(y0, y1, y2, y3, f, w):
    """Add to 4 float32 rows the 4 stored rows `w`, weighted by `f` `[4, 4]`: `y_i += sum_j f[i, j] w_j`."""
    w0, w1, w2, w3 = w
    a0, a1, a2, a3 = f[0, 0], f[0, 1], f[0, 2], f[0, 3]
    b0, b1, b2, b3 = f[1, 0], f[1, 1], f[1, 2], f[1, 3]
    c0, c1, c2, c3 = f[2, 0], f[2, 1], f[2, 2], f[2, 3]
    d0, d1, d2, d3 = f[3, 0], f[3, 1], f[3, 2], f[3, 3]
    for n in range(y0.size):
        u0, u1, u2, u3 = widen_fn(w0[n]), widen_fn(w1[n]), widen_fn(w2[n]), widen_fn(w3[n])
        y0[n] += a0 * u0 + a1 * u1 + a2 * u2 + a3 * u3
        y1[n] += b0 * u0 + b1 * u1 + b2 * u2 + b3 * u3
        y2[n] += c0 * u0 + c1 * u1 + c2 * u2 + c3 * u3
        y3[n] += d0 * u0 + d1 * u1 + d2 * u2 + d3 * u3
