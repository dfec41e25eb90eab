"""What a model needs of each device, by part, before anything is loaded; and what would fit where it does not.

Weights are the checkpoint's tensors (`tensor_table`) cut as `Rank` cuts them, embedding and head in equal slices.
Pages are those that `LLM` would take for so many sequences of such a length, rings and drafts included. `reserve` is
no measurement: 2 GiB for the runtime and its graphs, and the largest intermediate results of a step.

Memory of a device is its data sheet's, of which `USABLE` is counted on; a gigabyte of memory on a data sheet is 2**30
bytes, but for those chips whose driver shows less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from inkling_kernels.numerics import BLOCK, FORMATS, ExpertWeight, Format
from inkling_kernels.target import TARGETS, Target
from inkling_portable.cache import FULL, SLIDING
from inkling_portable.checkpoint_writer import expert_format
from inkling_portable.config import PRESETS, InklingConfig, QuantizationConfig, preset
from inkling_portable.dispatch import explain
from inkling_portable.llm import facts_of, page_bytes, pages_for
from inkling_portable.parallel import Rank
from inkling_portable.tensor_table import TensorSpec, stored_parts, tensor_table

GIB: Final = 2**30
USABLE: Final = 0.92
RUNTIME: Final = 2 * GIB
PAGE: Final = 64
SIZES: Final = (1, 2, 4, 8, 16, 32)
#: GiB of one device, of the chip that `Target.name` names; sources: the data sheets named in `inkling_kernels.target`.
#: B200 and B300 as the driver shows them. Those of sm121 and gfx1151 are the host's too, and as large as was ordered.
MEMORY: Final = {
    "sm80": 80, "sm86": 48, "sm89": 48, "sm90": 141, "sm100": 179, "sm103": 268, "sm120": 96, "sm121": 119,
    "gfx90a": 64, "gfx942": 192, "gfx950": 288, "gfx1100": 24, "gfx1151": 96, "gfx1201": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """What is asked for. `format`: of the routed experts, None as the model's configuration says; `max_num_seqs`
    sequences of `max_model_len` tokens each; `drafts` prediction depths; `kv_itemsize` bytes of a cached value; `chunk`
    tokens in one step."""

    size: int = 1
    format: Format | None = None
    max_model_len: int = 32768
    max_num_seqs: int = 8
    drafts: int = 0
    kv_itemsize: int = 2
    chunk: int = 8192


@dataclass(frozen=True)
class Plan:
    """Bytes by part that each device needs, and how many it has (None: of unknown size)."""

    wish: Wish
    parts: dict[str, int]
    memory: int | None

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def usable(self) -> int | None:
        return None if self.memory is None else int(self.memory * USABLE)

    @property
    def fits(self) -> bool:
        return self.usable is None or self.needed <= self.usable

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON, sizes in bytes."""
        return {
            "wish": asdict(self.wish), "parts": self.parts, "needed": self.needed, "memory": self.memory,
            "usable": self.usable, "fits": self.fits,
        }  # fmt: skip


def wish_of(format: str | None, max_model_len: int, max_num_seqs: int, kv_cache_dtype: str, drafts: int) -> Wish:
    """The wish that options of the command line make, for one device. ValueError naming an option that is wrong."""
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ValueError(f"--kv-cache-dtype is {kv_cache_dtype!r}; expected auto or fp8")
    if format is not None and format not in FORMATS:
        raise ValueError(f"--format is {format!r}; expected one of {', '.join(FORMATS)}")
    itemsize = 1 if kv_cache_dtype == "fp8" else 2
    return Wish(1, format, max_model_len, max_num_seqs, drafts, itemsize)  # type: ignore[arg-type]


def bytes_of(gib: float) -> int:
    """Bytes of a device given in GiB on the command line."""
    if gib <= 0:
        raise ValueError(f"--memory is {gib:g}; expected a positive number of GiB")
    return int(gib * GIB)


def words(wish: Wish) -> str:
    """A wish in words."""
    devices = "1 device" if wish.size == 1 else f"{wish.size} devices"
    format = f"{wish.format} experts" if wish.format else "the model's own format"
    extras = (", fp8 cache" if wish.kv_itemsize == 1 else "") + (f", {wish.drafts} drafts" if wish.drafts else "")
    return f"{devices}, {format}, {wish.max_num_seqs} sequences of {wish.max_model_len} tokens{extras}"


def model_config(name: str) -> InklingConfig:
    """The configuration of `inkling`, of `inkling-small`, or of the checkpoint (folder or hub id) `name`."""
    return preset(name) if name in PRESETS and not Path(name).exists() else InklingConfig.from_pretrained(name)


@lru_cache(64)
def in_format(config: InklingConfig, format: Format | None) -> InklingConfig:
    """`config` with its experts in `format`, as released checkpoints have them: MXFP4 keeps the first expert layer in
    bf16. ValueError where a width is no multiple of the format's block."""
    if format is None:
        return config
    if format == "bf16":
        return config.replace(quantization=None)
    if config.quantization is not None and config.quantization.format == format:
        return config
    experts = [spec for spec in tensor_table(config) if spec.experts]
    for spec in experts:
        if spec.shape[-1] % BLOCK[format]:
            raise ValueError(f"format is {format}, whose block of {BLOCK[format]} does not divide {spec.shape[-1]}")
    first = [stored_parts(spec, "original")[0].name for spec in experts[:2]] if format == "mxfp4" else []
    return config.replace(quantization=QuantizationConfig(format=format, excluded=tuple(first)))


def plan(config: InklingConfig, wish: Wish, memory: int | None = None) -> Plan:
    """What each of `wish.size` devices of `memory` bytes needs. ValueError for what is out of range or cannot be
    cut."""
    for name, value in (("max_model_len", wish.max_model_len), ("max_num_seqs", wish.max_num_seqs)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    if wish.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {wish.max_model_len}; the model has {config.max_position_embeddings} at most"
        )
    depths = config.mtp.num_layers if config.mtp else 0
    if not 0 <= wish.drafts <= depths:
        raise ValueError(f"drafts are {wish.drafts}; expected 0 to {depths}, as many as the model has depths")
    config = in_format(config, wish.format)
    own = _own(config, wish.size)
    parts = dict(_weights(config, wish.size, wish.drafts))
    pages = pages_for(config, wish.max_num_seqs, wish.max_model_len, wish.chunk, PAGE, wish.drafts)
    each = page_bytes(own, PAGE, wish.kv_itemsize, wish.drafts)
    parts["cache of full layers"] = pages[FULL] * each[FULL]
    parts["cache of sliding layers"] = pages[SLIDING] * each[SLIDING]
    parts["rings of convolutions"] = wish.max_num_seqs * _ring_bytes(own, wish.drafts)
    parts["reserve"] = RUNTIME + _step_bytes(config, own, wish)
    return Plan(wish, parts, memory)


@lru_cache(64)
def _own(config: InklingConfig, size: int) -> InklingConfig:
    return Rank(size, 0).config(config)


@lru_cache(64)
def _weights(config: InklingConfig, size: int, drafts: int) -> tuple[tuple[str, int], ...]:
    """Bytes of each part of the weights, on one of `size` devices."""
    rank, parts = Rank(size, 0), dict[str, int]()
    for spec in tensor_table(config):
        if spec.section == "mtp" and int(spec.name.split(".")[2] if "layers" in spec.name else 0) >= drafts:
            continue
        part = _part(spec)
        parts[part] = parts.get(part, 0) + _bytes(spec, config, rank)
    return tuple(parts.items())


def _part(spec: TensorSpec) -> str:
    if spec.section in ("visual", "audio"):
        return "towers"
    if spec.section == "mtp":
        return "prediction depths"
    if spec.experts:
        return "routed experts"
    if "embed" in spec.name and "layers" not in spec.name:
        return "embedding and head"
    return "shared experts and dense MLPs" if ".mlp." in spec.name else "attention and norms"


def _bytes(spec: TensorSpec, config: InklingConfig, rank: Rank) -> int:
    """Bytes that one rank holds of a tensor."""
    if spec.name in ("llm.embed.weight", "llm.unembed.weight"):
        return 2 * len(rank.part(spec.shape[0], "vocab_size")) * spec.shape[1]
    dtype = torch.float32 if spec.float32 else torch.bfloat16
    value: torch.Tensor | ExpertWeight = torch.empty(spec.shape, dtype=dtype, device="meta")
    if spec.experts:
        value = _weight(spec, expert_format(spec, config))
    part = rank.tensor(config, spec.name, value)
    return part.nbytes


def _weight(spec: TensorSpec, format: Format) -> ExpertWeight:
    experts, rows, columns = spec.shape
    if format == "bf16":
        data = torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
        return ExpertWeight("bf16", data, layout=spec.layout)
    data = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device="meta")
    scale = data.new_empty(experts, rows, columns // BLOCK[format])
    scale2 = torch.empty(experts, device="meta") if format == "nvfp4" else None
    return ExpertWeight(format, data, scale, scale2, spec.layout)


def _ring_bytes(own: InklingConfig, drafts: int) -> int:
    """Of one sequence: rows of K, V, attention and MLP in every layer."""
    specs = [own.layer(i) for i in range(own.num_hidden_layers)] + [own.mtp_layer(d) for d in range(drafts)]
    rows = own.conv_kernel_size - 1 + 2 * drafts
    return sum(2 * rows * (2 * spec.kv_size + 2 * own.hidden_size) for spec in specs)


def _step_bytes(config: InklingConfig, own: InklingConfig, wish: Wish) -> int:
    """The larger of a step's intermediate results: the experts' or a dense MLP's, and the logits, beside the stream."""
    rows = min(wish.chunk, max(wish.max_model_len, wish.max_num_seqs * (1 + wish.drafts)))
    experts = rows * own.num_experts_per_tok * (own.hidden_size + own.moe_intermediate_size)
    dense = rows * 3 * own.intermediate_size
    logits = 2 * wish.max_num_seqs * (1 + wish.drafts) * config.unpadded_vocab_size
    return 2 * (max(experts, dense) + 4 * rows * own.hidden_size) + 4 * logits


def memory_of(target: Target) -> int:
    """Bytes of a device of `target`, by the data sheet. ValueError for a CPU."""
    if target.arch not in MEMORY:
        raise ValueError(f"the memory of {target} is not known; give it in GiB (--memory)")
    return MEMORY[target.arch] * GIB


def alternatives(config: InklingConfig, wish: Wish, memory: int) -> Iterator[Plan]:
    """Plans near `wish` that fit, one for each thing that may be changed alone: shorter sequences, fewer of them, fewer
    bytes a cached value, another format, more devices."""
    changes: list[list[Wish]] = [
        [replace(wish, max_model_len=length) for length in _halves(wish.max_model_len, 1024)],
        [replace(wish, max_num_seqs=count) for count in _halves(wish.max_num_seqs, 1)],
        [replace(wish, kv_itemsize=1)] if wish.kv_itemsize > 1 else [],
        [replace(wish, format=format) for format in ("nvfp4", "mxfp4") if wish.format != format],
        [replace(wish, size=size) for size in SIZES if size > wish.size],
    ]
    for wishes in changes:
        for other in wishes:
            found = attempt(config, other, memory)
            if isinstance(found, Plan) and found.fits:
                yield found
                break


def require(config: InklingConfig, wish: Wish, free: int, cache_limit: int) -> None:
    """Raise ValueError, with what each part needs and what would fit, where a device with `free` bytes left cannot hold
    the model, with caches of at most `cache_limit` bytes."""
    found = plan(config, wish)
    caches = {name: size for name, size in found.parts.items() if name.startswith("cache")}
    spared = max(0, sum(caches.values()) - cache_limit)
    if found.needed - spared <= free:
        return
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.parts.items() if name not in caches)
    memory = int((free + spared) / USABLE)
    offers = [f"{words(other.wish)} would fit" for other in alternatives(config, wish, memory)]
    raise ValueError(
        f"the model needs {(found.needed - spared) / GIB:.2f} GiB and the device has {free / GIB:.2f} free: {parts}, "
        f"caches {(sum(caches.values()) - spared) / GIB:.2f}" + "".join(f"; {offer}" for offer in offers)
    )


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def attempt(config: InklingConfig, wish: Wish, memory: int | None) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan(config, wish, memory)
    except ValueError as error:
        return str(error)


def unsupported(config: InklingConfig, wish: Wish, target: Target) -> str | None:
    """Why the table has no implementation for a rank of this model on `target`, or None where it has."""
    config = in_format(config, wish.format)
    format = config.quantization.format if config.quantization else "bf16"
    own = _own(config, wish.size)
    missing = explain(target, facts_of(own, format, torch.bfloat16, PAGE)).missing
    return "; ".join(f"no implementation of {choice.op}" for choice in missing) or None


def longest(config: InklingConfig, wish: Wish, memory: int) -> int:
    """The longest context, a multiple of 1024, of which `wish.max_num_seqs` fit; 0 where none does, -1 where the model
    cannot be cut that way."""
    low, high = 0, config.max_position_embeddings // 1024
    if isinstance(attempt(config, replace(wish, max_model_len=1024), memory), str):
        return -1
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan(config, replace(wish, max_model_len=middle * 1024), memory).fits
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * 1024


def survey(config: InklingConfig, wish: Wish) -> Iterator[tuple[Target, dict[int, int]]]:
    """For every GPU of the table: the longest context by number of devices."""
    for target in TARGETS:
        if target.is_gpu:
            yield target, {size: longest(config, replace(wish, size=size), memory_of(target)) for size in SIZES}
