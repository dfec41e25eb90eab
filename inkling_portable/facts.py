"""What is known of a model before any token arrives, and the conditions on it that rows of the dispatch table have.

A condition says why a row does not hold, as the end of a sentence that begins with the row's name, or None where it
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from inkling_rocm import aiter_support

FORMATS: Final = ("bf16", "nvfp4", "mxfp4")
#: Names of torch dtypes that activations may have (`float64` for tests), and those that a KV cache may have.
DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
KV_DTYPES: Final = (*DTYPES, "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model and its cache before any token arrives, on one rank; the defaults are Inkling's at TP 1.

    * `format`: of the routed experts' weights, one of `FORMATS` (`bf16` is any unquantised float type).
    * `dtype`, `kv_dtype`: of activations and of the KV cache, as torch names them.
    * `hidden_size`, `head_dim`, `d_rel`, `top_k`, `conv_width`: as in the model's config.
    * `page_size`: tokens in a page of the KV cache.
    * `num_experts`, `expert_width`: routed experts held, and their width, on this rank: local under EP and TP.
    * `ep_size`: ranks that share the routed experts among them. From 2 on, ids of experts held elsewhere come as -1.
    * `batch_invariant`: whether a token's bits must not depend on its batch.

    Raises ValueError or TypeError naming the field that is out of its range.
    """

    format: str = "bf16"
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    hidden_size: int = 6144
    head_dim: int = 128
    d_rel: int = 16
    page_size: int = 16
    num_experts: int = 256
    expert_width: int = 3072
    top_k: int = 6
    conv_width: int = 4
    ep_size: int = 1
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("dtype", DTYPES), ("kv_dtype", KV_DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field.name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")


#: A condition of a row on static facts: None where it holds, else what is wrong, in words, with the value at hand.
#: Its docstring says why the implementation has that limit.
Condition = Callable[[Facts], str | None]


def to_float32(facts: Facts) -> str | None:
    """The Triton kernels compute in float32 at most, which is no float64."""
    return "computes in float32 at most, not in float64" if facts.dtype == "float64" else None


def groupable(facts: Facts) -> str | None:
    """The grouped products compute in float32 at most, hold up to 1024 experts, and unpack codes in words and MXFP4
    blocks, so packed widths are multiples of 32; codes times their scales leave float16's range."""
    if facts.num_experts > 1024:
        return f"sorts tokens by at most 1024 experts, not {facts.num_experts}"
    if facts.format != "bf16" and facts.dtype == "float16":
        return "unpacks codes to bfloat16 or float32, not to float16"
    widths = (facts.hidden_size, facts.expert_width)
    if facts.format != "bf16" and any(width % 32 for width in widths):
        return f"takes packed widths that are multiples of 32, not {widths[0]} by {widths[1]}"
    return to_float32(facts)


def aiter_mxfp4(facts: Facts) -> str | None:
    """AITER's MXFP4 products are silently wrong where they sum over a number of columns that is no multiple of 256
    (ROCm/aiter issues 4176 and 5233); its masks for experts of other ranks mean different things in its versions."""
    found = [] if facts.format == "mxfp4" else [f"is for mxfp4, not {facts.format}"]
    if facts.dtype != "bfloat16":
        found.append(f"takes bfloat16 activations, not {facts.dtype}")
    for what, width in (("an expert width on this rank", facts.expert_width), ("a hidden size", facts.hidden_size)):
        if width % 256:
            found.append(f"needs {what} that is a multiple of 256, not {width}")
    if facts.batch_invariant:
        found.append("adds a token's experts in no fixed order")
    if facts.ep_size > 1:
        found.append(f"needs all routed experts on one rank, not on {facts.ep_size}")
    if missing := aiter_support.problem():
        found.append(missing)
    return "; ".join(found) or None


def cpu_floats(facts: Facts) -> str | None:
    """The CPU kernels read float32 and the bits of bfloat16."""
    return None if facts.dtype in ("float32", "bfloat16") else f"is for float32 and bfloat16, not {facts.dtype}"


def cpu_cache(facts: Facts) -> str | None:
    """The CPU kernels read and write a cache of the activations' type."""
    if facts.kv_dtype != facts.dtype:
        return f"is for a cache of the activations' type, not of {facts.kv_dtype} for {facts.dtype}"
    return cpu_floats(facts)


def native_fp4(facts: Facts) -> str | None:
    """Weights that the matrix unit multiplies by their block scales; tokens are quantised from bfloat16."""
    if facts.format == "bf16" or facts.dtype != "bfloat16":
        return f"multiplies 4-bit codes with bfloat16 tokens, which it quantises, not {facts.format} with {facts.dtype}"
    return groupable(facts)


def native_mxfp4(facts: Facts) -> str | None:
    """CDNA4 has block scales of powers of two alone."""
    return native_fp4(facts) if facts.format != "nvfp4" else "multiplies codes with E8M0 scales per 32, not nvfp4"


def rel_shapes(facts: Facts) -> str | None:
    """The tiles of the attention kernels are powers of two, and their bias products have the 16 columns of d_rel."""
    if facts.d_rel != 16:
        return f"is for d_rel 16, not {facts.d_rel}"
    if facts.head_dim not in (32, 64, 128):
        return f"is for head_dim 32, 64 and 128, not {facts.head_dim}"
    if facts.page_size not in (16, 32, 64, 128, 256):
        return f"is for pages of 16, 32, 64, 128 and 256 tokens, not {facts.page_size}"
    return to_float32(facts)


def invariant(facts: Facts) -> str | None:
    """Fixed tiles give equal bits in every batch and cost time, so they are for models that ask for them."""
    return to_float32(facts) if facts.batch_invariant else "is for batch_invariant models"


def invariant_rel(facts: Facts) -> str | None:
    """The attention kernels with splits of one size, which cost time where contexts are short or batches large."""
    return invariant(facts) or rel_shapes(facts)


def invariant_experts(facts: Facts) -> str | None:
    """The grouped products with the tiles of small batches, which cost time where batches are large."""
    return invariant(facts) or groupable(facts)
