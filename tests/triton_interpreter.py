"""Triton's interpreter with the bfloat16 of a GPU.

Stock Triton (3.6 to 3.9) keeps bfloat16 in uint16 arrays and lets NumPy do integer arithmetic on them, and truncates
where a GPU rounds to nearest even. `repair` keeps them in `ml_dtypes.bfloat16` arrays instead: elementwise operations
then round once, and matrix products and reductions are computed in float32, as the hardware does. It also makes calls
between jit functions cheap: the interpreter looks through the whole of `triton.language` at each call; once a launch is
enough.

`tests/kernels/test_interpreter.py` holds the repaired interpreter against torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as host
from triton.runtime.interpreter import TensorHandle

BF16 = np.dtype(ml_dtypes.bfloat16)
Builder: Any = host.InterpreterBuilder


def repair() -> None:
    """Patch the interpreter of this process; a second call does nothing."""
    if getattr(host, "bfloat16_repaired", False):
        return
    host.bfloat16_repaired = True  # type: ignore[attr-defined]
    _types()
    _memory()
    _arithmetic()
    _block_scales()
    _calls()
    _bounds()


def _types() -> None:
    stock = host._get_np_dtype

    def numpy_type(kind: Any) -> np.dtype:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return BF16 if element == tl.bfloat16 else stock(kind)

    host._get_np_dtype = numpy_type

    def cast(self: Any, src: TensorHandle, to: Any) -> TensorHandle:
        return TensorHandle(src.data.astype(numpy_type(to)), to.scalar)

    stock_float = Builder.create_fp_to_fp

    def float_to_float(self: Any, src: TensorHandle, to: Any, rounding: Any) -> TensorHandle:
        if tl.bfloat16 not in (src.dtype.scalar, to.scalar):
            return stock_float(self, src, to, rounding)
        if rounding is not None and rounding == host._ir.ROUNDING_MODE.RTZ:
            kept = np.ascontiguousarray(src.data.astype(np.float32)).view(np.uint32) & np.uint32(0xFFFF0000)
            return TensorHandle(kept.view(np.float32).astype(numpy_type(to)), to.scalar)
        return cast(self, src, to)

    def bitcast(self: Any, src: TensorHandle, to: Any) -> TensorHandle:
        return TensorHandle(np.ascontiguousarray(src.data).view(numpy_type(to)).reshape(src.data.shape), to.scalar)

    Builder.cast_impl, Builder.create_fp_to_fp, Builder.create_bitcast = cast, float_to_float, bitcast
    Builder.get_bf16 = lambda self, value: TensorHandle(np.array([value], np.float32).astype(BF16), tl.bfloat16)


def _memory() -> None:
    """The compiled helpers that read and write memory know NumPy's own types: they move the bits."""
    raw = np.uint16
    stock_load, stock_store = Builder.create_masked_load, Builder.create_masked_store

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any) -> TensorHandle:
        if ptrs.get_element_ty() != tl.bfloat16:
            return stock_load(self, ptrs, mask, other, *hints)
        given = np.zeros(ptrs.data.shape, BF16) if other is None else other.data.astype(BF16)
        given = np.ascontiguousarray(np.broadcast_to(given, ptrs.data.shape)).view(raw)
        data = host._interpreter.load(ptrs.data, mask.data, given, np.dtype(raw)).view(BF16)
        return TensorHandle(data, tl.bfloat16)

    def store(self: Any, ptrs: Any, value: TensorHandle, mask: Any, *hints: Any) -> Any:
        if value.data.dtype == BF16:
            value = TensorHandle(np.ascontiguousarray(value.data).view(raw), tl.uint16)
        return stock_store(self, ptrs, value, mask, *hints)

    Builder.create_masked_load, Builder.create_masked_store = load, store


def _arithmetic() -> None:
    stock_fma, stock_dot = Builder.create_fma, Builder.create_dot

    def fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if z.data.dtype != BF16:
            return stock_fma(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(BF16), tl.bfloat16)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        a, b = (TensorHandle(x.data.astype(np.float32), tl.float32) if x.data.dtype == BF16 else x for x in (a, b))
        return stock_dot(self, a, b, *rest)

    Builder.create_fma, Builder.create_dot = fma, dot
    Builder.create_fabs = lambda self, arg: TensorHandle(np.abs(arg.data), arg.dtype.scalar)
    host.ReduceOps.sum = _in_float32(host.ReduceOps.sum)
    host.ReduceOps.min_max = _in_float32(host.ReduceOps.min_max)


def _block_scales() -> None:
    """`dot_scaled`: stock reads E4M3 scales as powers of two. Codes lie along K, two a byte."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

    def values(codes: TensorHandle, scale: TensorHandle, format: Any, axis: int) -> np.ndarray:
        bits = np.moveaxis(codes.data, axis, -1).view(np.uint8)
        if format == host._ir.ScaleDotElemTypeTY.E2M1:
            found = np.stack((e2m1[bits & 15], e2m1[bits >> 4]), -1).reshape(*bits.shape[:-1], -1)
        else:
            found = np.ascontiguousarray(bits).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        raw = np.ascontiguousarray(scale.data).view(np.uint8)
        if scale.dtype.scalar == tl.float8e4nv:
            # As in hardware, a scale has no sign.
            factor = (raw & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            factor = raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        return found * factor.repeat(found.shape[-1] // factor.shape[-1], -1)

    def dot_scaled(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any):
        product = values(a, a_scale, a_format, -1) @ values(b, b_scale, b_format, -2).T
        return TensorHandle(product + rest[-1].data, tl.float32)

    Builder.create_dot_scaled = dot_scaled


def _in_float32(reduction: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        single = values[0] if isinstance(values, tuple) else values
        if single.handle.data.dtype != BF16:
            return reduction(self, values, *args, **kwargs)
        wide = tl.core.tensor(
            TensorHandle(single.handle.data.astype(np.float32), tl.float32),
            tl.block_type(tl.float32, list(single.handle.data.shape)),
        )
        found = reduction(self, wide, *args, **kwargs)
        parts = found if isinstance(found, tuple) else (found,)
        narrow = tuple(
            self.to_tensor(np.asarray(part.handle.data).astype(BF16), tl.bfloat16)
            if part.dtype.scalar == tl.float32
            else part
            for part in parts
        )
        return narrow if isinstance(found, tuple) else narrow[0]

    return reduce


def _calls() -> None:
    """Patch `triton.language` for a jit function's globals once a launch instead of once a call."""
    seen: set[int] | None = None
    stock_launch, stock_call = host.GridExecutor.__call__, host.InterpretedFunction.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        outer, seen = seen, set()
        try:
            return stock_launch(self, *args, **kwargs)
        finally:
            seen = outer

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if seen is None or id(self.fn) not in seen:
            if seen is not None:
                seen.add(id(self.fn))
            return stock_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    host.GridExecutor.__call__, host.InterpretedFunction.__call__ = launch, call


def _bounds() -> None:
    """Up to Triton 3.7, a loop bound is an array of one element, which NumPy 2.4 no longer takes for a number."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        return
    stock = host._patch_lang_tensor

    def patch(tensor: Any, *rest: Any) -> None:
        stock(tensor, *rest)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())

    host._patch_lang_tensor = patch
