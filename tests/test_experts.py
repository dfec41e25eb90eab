"""Experts on their way into a model: prepared, checked once, and never in a format that nothing was bound for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_oracle import random_packed
from small_checkpoint import write_small

from inkling_kernels.moe_check import SelfCheckFailed
from inkling_kernels.moe_gemm import moe_experts_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable import LLM
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.experts import Experts, ExpertsLoader
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.ops import Ops
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors

CPU, GPU = Target.parse("cpu"), Target.parse("sm90")


def ops_for(format: str, run: Callable[..., torch.Tensor] | None = None, prepare: Any = None) -> Ops:
    """The references, said to run on a GPU, those of `format` replaced."""
    ops = Ops.bind(CPU, Facts(format=format, hidden_size=64, expert_width=64), {"moe_experts": "torch"})
    changed = replace(ops.experts[format], run=run or moe_experts_ref, prepare=prepare)
    return replace(ops, target=GPU, experts={**ops.experts, format: changed})


def pair(format: str, seed: int = 0) -> tuple[ExpertWeight, ExpertWeight]:
    rng = np.random.default_rng(seed)
    return random_packed(rng, format, 3, 128, 64, "interleaved")[0], random_packed(rng, format, 3, 64, 64, "plain")[0]


def empty(ops: Ops) -> Experts:
    return Experts(
        ops,
        ExpertWeight("bf16", torch.zeros(3, 128, 64), layout="interleaved"),
        ExpertWeight("bf16", torch.zeros(3, 64, 64)),
    )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("first", ["w13", "w2"])
def test_the_first_layer_is_checked_and_no_other(format: str, first: str, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[1].num_experts)
        return moe_experts_ref(*args)

    ops = ops_for(format, counted)
    loader = ExpertsLoader(ops, torch.bfloat16)
    with caplog.at_level(logging.INFO):
        for layer in range(3):
            experts, weights = empty(ops), dict(zip(("w13", "w2"), pair(format, layer), strict=True))
            for which in (first, *(name for name in weights if name != first)):
                loader.take(experts, which, weights[which])
            assert (experts.w13, experts.w2) == (weights["w13"], weights["w2"])
    assert calls == [1]
    assert 0 < loader.errors[format] < 2**-6
    assert f"self-check in {format} off by" in caplog.text


def test_a_wrong_implementation_is_an_error_at_load() -> None:
    ops = ops_for(
        "nvfp4", lambda x, w13, w2, ids, g: moe_experts_ref(x, replace(w13, data=w13.data.roll(1, 1)), w2, ids, g)
    )
    loader, (w13, w2) = ExpertsLoader(ops, torch.bfloat16), pair("nvfp4")
    experts = empty(ops)
    loader.take(experts, "w13", w13)
    with pytest.raises(SelfCheckFailed, match="differs from plain dequantisation"):
        loader.take(experts, "w2", w2)


def test_weights_are_prepared_and_the_check_is_of_both() -> None:
    """Codes that `prepare` turns over, an implementation that turns them back, and one that does not."""

    def turned(weight: ExpertWeight) -> ExpertWeight:
        return replace(weight, data=weight.data >> 4 | weight.data << 4)

    def back(x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, *rest: torch.Tensor) -> torch.Tensor:
        return moe_experts_ref(x, turned(w13), turned(w2), *rest)

    w13, w2 = pair("mxfp4")
    ops = ops_for("mxfp4", back, turned)
    loader, experts = ExpertsLoader(ops, torch.float32), empty(ops)
    loader.take(experts, "w13", w13)
    loader.take(experts, "w2", w2)
    assert torch.equal(experts.w13.data, turned(w13).data)
    x, ids, gammas = torch.ones(2, 64), torch.tensor([[0], [2]], dtype=torch.int32), torch.ones(2, 1)
    assert torch.equal(experts(x, ids, gammas), moe_experts_ref(x, w13, w2, ids, gammas))
    loader = ExpertsLoader(ops_for("mxfp4", moe_experts_ref, turned), torch.float32)
    loader.take(experts, "w13", w13)
    with pytest.raises(SelfCheckFailed):
        loader.take(experts, "w2", w2)


def test_a_rank_without_experts_has_nothing_to_check() -> None:
    ops = ops_for("nvfp4")
    loader, experts = ExpertsLoader(ops, torch.bfloat16), empty(ops)
    for which, weight in zip(("w13", "w2"), pair("nvfp4"), strict=True):
        loader.take(experts, which, weight.part(slice(0, 0)))
    assert experts.w13.num_experts == 0
    assert loader.errors == {}


def test_a_format_that_nothing_was_bound_for() -> None:
    ops = Ops.bind(CPU, Facts(format="nvfp4"), {})
    with pytest.raises(
        ValueError, match="w13: format is mxfp4, but this model's operations were bound for nvfp4, bf16"
    ):
        ExpertsLoader(ops, torch.bfloat16).take(empty(ops), "w13", pair("mxfp4")[0])


def test_an_unsupported_format_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path / "bf16", depths=0, moe_intermediate_size=48, hidden_size=64)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", "nvfp4")
    monkeypatch.setattr("inkling_portable.llm.load_tensors", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr("inkling_portable.llm.usable_target", lambda _: GPU)
    with pytest.raises(ValueError, match="takes packed widths that are multiples of 32, not 64 by 48"):
        LLM(tmp_path / "nvfp4")


def test_an_unquantised_layer_of_a_packed_checkpoint(tmp_path: Path) -> None:
    """It runs on what bf16 runs on, which another row may be; only the packed ones are checked."""
    write_small(tmp_path / "bf16", depths=0)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4", "mxfp4")
    ops, seen = ops_for("mxfp4"), []

    def dense(*args: Any) -> torch.Tensor:
        seen.append(args[1].format)
        return moe_experts_ref(*args)

    ops = replace(ops, experts={**ops.experts, "bf16": replace(ops.experts["bf16"], run=dense)})
    with Checkpoint.open(tmp_path / "mxfp4") as checkpoint:
        model = Inkling(checkpoint.config, ops, dtype=torch.float32).requires_grad_(False)
        model.load(load_tensors(checkpoint, torch.float32, sections=("text",)))
    layers = model.experts()
    assert [layer.w13.format for layer in layers.values()] == ["bf16", "mxfp4"]
    x, ids, gammas = torch.ones(1, 64), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
    for layer in layers.values():
        layer(x, ids, gammas)
    assert seen == ["bf16"]
