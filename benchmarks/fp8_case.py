"""The `fp8` case: what an 8-bit cache of keys and values costs the trained small model in perplexity.

The text is the held-out part of the standard library (`inkling_portable/heldout.py`), in windows of 512 tokens. The
model and its activations are float32, on the CPU reference; only the cache differs: float32, bfloat16, and e4m3 as OCP
and as CDNA3 have it, each at scale 1 and with calibrated scales. Every key and value that attention reads has been
through the cache, those of its own step too. Queries stay as they are.

Calibrated: for each layer and key head, the largest magnitude among the keys (and values) of eight windows of text that
the model was trained on, over the largest number of the type. What a model of 3 million parameters loses says little of
what a large one does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from gate import GateError, MissingError
from rich.console import Console
from rich.table import Table

from inkling_kernels.target import Target
from inkling_portable.cache import FULL, SLIDING, Batch, Cache, LayerState
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.config import InklingConfig
from inkling_portable.dispatch import OPS
from inkling_portable.heldout import sources
from inkling_portable.llm import default_model, facts_of
from inkling_portable.model import Inkling
from inkling_portable.ops import Ops
from inkling_portable.text import TextCodec
from inkling_portable.weights import load_tensors

LENGTH, SEQUENCES, PAGE = 512, 4, 16
HELD_OUT_TOKENS, CALIBRATION_TOKENS = 65_536, 8 * LENGTH
E4M3 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
# At most this much more perplexity than with a bfloat16 cache, as a part of it.
BOUNDS = {"scale 1": 0.002, "calibrated": 0.001}

Scales = list[tuple[torch.Tensor, torch.Tensor]]


class Reference:
    """The small model on the CPU reference in float32, over a cache of any type."""

    def __init__(self) -> None:
        checkpoint = Checkpoint.open(default_model())
        self.config: InklingConfig = checkpoint.config
        # The references: rows before them need not know 8-bit pages.
        facts = facts_of(self.config, "bf16", torch.float32, PAGE)
        self.ops = Ops.bind(Target.parse("cpu"), facts, dict.fromkeys(OPS, "torch"))
        # By the address of a layer's keys: the scales of its cache, and the largest magnitudes that went into it.
        self.scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        ops = dataclasses.replace(self.ops, qkvr_prep=self._prepare, rel_attention=self._attend)
        self.model = Inkling(self.config, ops, dtype=torch.float32).eval()
        for name, value in load_tensors(checkpoint, torch.float32, "cpu"):
            if not name.startswith("mtp."):
                self.model.load([(name, value)])

    def _prepare(self, *args: Any, **options: Any) -> Any:
        pages, mapping = args[9], args[10]
        found = self.ops.qkvr_prep(*args, **options, **self._scaled(pages[0]))
        for most, written in zip(self.largest[pages[0].data_ptr()], pages, strict=True):
            now = written.float()[mapping // PAGE, mapping % PAGE].abs().amax((0, 2))
            most.copy_(torch.maximum(most, now))
        return found

    def _attend(self, q: Any, r: Any, k_pages: torch.Tensor, *args: Any, **options: Any) -> Any:
        return self.ops.rel_attention(q, r, k_pages, *args, **options, **self._scaled(k_pages))

    def _scaled(self, k_pages: torch.Tensor) -> dict[str, Any]:
        known = self.scales.get(k_pages.data_ptr())
        return {} if known is None else {"kv_scales": known}

    def cached(self, kind: torch.dtype, scales: Scales | None) -> tuple[Cache, list[LayerState]]:
        """A cache whose keys and values are of type `kind`, and its layers."""
        pages = SEQUENCES * -(-LENGTH // PAGE)
        cache = Cache(
            self.config, page_size=PAGE, num_pages={FULL: pages, SLIDING: pages}, max_seqs=SEQUENCES,
            dtype=torch.float32, device="cpu", prefix_caching=False,
        )  # fmt: skip
        states = [
            dataclasses.replace(each, k_pages=each.k_pages.to(kind), v_pages=each.v_pages.to(kind))
            for each in cache.layers
        ]
        layers = [each.k_pages.data_ptr() for each in states]
        self.scales = {} if scales is None else dict(zip(layers, scales, strict=True))
        heads = [each.k_pages.shape[2] for each in states]
        self.largest = {at: (torch.zeros(n), torch.zeros(n)) for at, n in zip(layers, heads, strict=True)}
        return cache, states

    def losses(self, tokens: torch.Tensor, kind: torch.dtype, scales: Scales | None = None) -> list[float]:
        """The mean cross entropy of each group of windows."""
        windows = tokens[: (len(tokens) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
        cache, states = self.cached(kind, scales)
        found = []
        with torch.inference_mode():
            for group in windows.split(SEQUENCES):
                sequences = [cache.open([], LENGTH, LENGTH) for _ in group]
                step: Batch = cache.batch(sequences, [LENGTH] * len(group))
                hidden = self.model(
                    self.model.embedding(group[:, :-1].flatten()), dataclasses.replace(step, states=states)
                )
                loss = F.cross_entropy(self.model.logits(hidden), group[:, 1:].flatten())
                found += [float(loss)] * len(group)
                for sequence in sequences:
                    cache.close(sequence)
        return found

    def calibrate(self, tokens: torch.Tensor) -> Scales:
        """For each layer the largest magnitudes `[Hkv]` of its keys and of its values."""
        self.losses(tokens, torch.float32)
        return list(self.largest.values())


def encoded(codec: TextCodec, held: bool, count: int) -> torch.Tensor:
    """The first `count` tokens of the files that are held out, or of the others, each file ended by token 0."""
    ids: list[int] = []
    for _, text in sources(held=held):
        ids += [*codec.encode(text), 0]
        if len(ids) > count:
            break
    return torch.tensor(ids[: count + 1])


def measured(held_out: int = HELD_OUT_TOKENS) -> dict[str, dict[str, float]]:
    """Perplexity with each cache, and how much more it is than with a bfloat16 one."""
    reference = Reference()
    codec = TextCodec.find(default_model())
    if codec is None:
        raise MissingError(f"{default_model()} has no tokenizer")
    text, trained = encoded(codec, True, held_out), encoded(codec, False, CALIBRATION_TOKENS)
    largest = reference.calibrate(trained)
    runs: dict[str, tuple[torch.dtype, Scales | None]] = {
        "float32": (torch.float32, None),
        "bfloat16": (torch.bfloat16, None),
    }
    for name, kind in E4M3.items():
        top = torch.finfo(kind).max
        one = torch.ones(1)
        runs[f"{name}, scale 1"] = (kind, [(one, one)] * len(largest))
        runs[f"{name}, calibrated"] = (kind, [(k / top, v / top) for k, v in largest])
    found: dict[str, dict[str, float]] = {}
    for name, (kind, scales) in runs.items():
        losses = reference.losses(text, kind, scales)
        found[name] = {"perplexity": math.exp(sum(losses) / len(losses))}
    base = found["bfloat16"]["perplexity"]
    for row in found.values():
        row["more"] = row["perplexity"] / base - 1
    return found


def held(found: dict[str, dict[str, float]]) -> None:
    """GateError where a cache costs more than its bound."""
    for name, row in found.items():
        bound = BOUNDS.get(name.partition(", ")[2])
        if not math.isfinite(row["perplexity"]) or (bound is not None and row["more"] > bound):
            raise GateError(f"a cache of {name} costs {row['more']:.2%} of perplexity; at most {bound} was promised")


def run(console: Console) -> tuple[dict[str, Any], str]:
    """Measure, hold to the bounds, and report."""
    found = measured()
    held(found)
    head = ("cache", "perplexity", "more than bfloat16", "bound")
    table = Table(*head, title=f"The small model on {HELD_OUT_TOKENS:,} held-out tokens")
    page = ["# Perplexity with an 8-bit cache", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    page += [f"{HELD_OUT_TOKENS:,} tokens.", "", "| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    for name, row in found.items():
        bound = BOUNDS.get(name.partition(", ")[2])
        cells = [name, f"{row['perplexity']:.3f}", f"{row['more']:+.3%}", "" if bound is None else f"{bound:.1%}"]
        table.add_row(*cells)
        page.append("| " + " | ".join(cells) + " |")
    console.print(table)
    return {"device": "cpu", "held_out_tokens": HELD_OUT_TOKENS, "caches": found, "bounds": BOUNDS}, "\n".join(
        page
    ) + "\n"
