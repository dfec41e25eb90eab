"""Expert-parallel load balancing: which experts a rank loads, where ids go, and that vLLM moves every tensor of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from balance_worker import with_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import random_packed
from small_checkpoint import small_config

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.parallel import ExpertRank
from inkling_portable.vllm_plugin.balance import Balanced, BalancedExperts, own_experts

HERE = Path(__file__).parent


def build(experts: int, size: int, rank: int, redundant: int | None, format: str) -> Any:
    whole = small_config(n_routed_experts=experts, num_experts_per_tok=1)
    return SimpleNamespace(whole=whole, experts=ExpertRank(size, rank), redundant=redundant, format=format)


@given(experts=st.integers(1, 9), size=st.integers(2, 5), more=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_rank_loads_the_experts_of_its_places(experts: int, size: int, more: int, seed: int) -> None:
    """One of each and then copies from the first on, dealt out in runs; layers of another format have none."""
    redundant = -experts % size + more * size
    rng = np.random.default_rng(seed)
    format = ("nvfp4", "mxfp4")[seed % 2]
    packed, _ = random_packed(rng, format, experts, 4, 32, "interleaved")
    plain = ExpertWeight("bf16", torch.randn(experts, 2, 2), layout="plain")
    share = (experts + redundant) // size
    kept = 0
    for rank in range(size):
        told = build(experts, size, rank, redundant, format)
        found, alone = own_experts(told, packed), own_experts(told, plain)
        logical = [p if p < experts else (p - experts) % experts for p in range(rank * share, (rank + 1) * share)]
        for name in ("data", "scale", "scale2"):
            whole, part = getattr(packed, name), getattr(found, name)
            if whole is not None:
                bits = [tensor.contiguous().view(torch.uint8) for tensor in (whole, part)]
                assert torch.equal(bits[1], bits[0][logical]), name
                assert part.is_contiguous()
        assert torch.equal(alone.data, plain.data[kept : kept + alone.num_experts])
        kept += alone.num_experts
    assert kept == experts


@given(data=st.data(), experts=st.integers(1, 6), redundant=st.integers(0, 4), rows=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_ids_go_to_a_copy_and_are_counted(data: st.DataObject, experts: int, redundant: int, rows: int) -> None:
    """By vLLM's kernel, against its rule spelled out; padding and steps that are not to be recorded count nothing."""
    with_kernel()
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    real, record = data.draw(st.integers(0, rows)), data.draw(st.booleans())
    places = rng.permutation([*range(experts), *rng.integers(0, experts, redundant)])
    lies = [[int(p) for p in np.flatnonzero(places == e)] for e in range(experts)]
    ids = rng.integers(0, experts, (rows, 2)).astype(np.int32)
    layer = BalancedExperts(SimpleNamespace())  # type: ignore[arg-type]
    load = torch.zeros(1, experts + redundant, dtype=torch.int32)
    maps = torch.tensor([[row + [-1] * (8 - len(row)) for row in lies]])
    layer.set_eplb_state(
        moe_layer_idx=0, expert_load_view=load, logical_to_physical_map=maps,
        logical_replica_count=torch.tensor([[len(row) for row in lies]]),
    )  # fmt: skip
    layer.eplb_state.should_record_tensor = torch.tensor(record)
    layer.eplb_state.num_unpadded_tokens_tensors = [torch.tensor(real, dtype=torch.int32)]
    found = layer(torch.from_numpy(ids))
    assert found.dtype == torch.int32
    counted = [0] * (experts + redundant)
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            copies = lies[expert]
            place = copies[t * 2654435769 % 2**32 % len(copies)]
            assert found[t, k] == place
            counted[place] += record and t < real
    assert load[0].tolist() == counted


def test_vllm_moves_experts_between_two_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-P", str(HERE / "balance_ranks.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (said, log) in zip(ranks, told, strict=True):
        assert process.returncode == 0, log[-4000:]
        found = json.loads(said.splitlines()[-1])
        assert found["caught"] == found["broken"] == 7
        for format, (shown, moved) in found["formats"].items():
            assert shown == (3 if format == "bf16" else 2)
            assert moved >= 12


def test_layers_that_one_buffer_cannot_serve_are_refused() -> None:
    def layer(*rows: int) -> Any:
        held = [ExpertWeight("bf16", torch.zeros(2, n, 4)) for n in rows]
        return SimpleNamespace(w13=held[0], w2=held[1], first=None, place=None)

    class Model(Balanced):
        pass

    model = Model()
    model.give_places(build(2, 2, 0, 2, "bf16"), [layer(4, 8), layer(4, 6)])
    with pytest.raises(ValueError, match=r"expert layer 1 .*--enable-eplb moves experts through one buffer"):
        model.set_eplb_state(torch.zeros(2, 4), torch.zeros(2, 2, 4), torch.zeros(2, 2))


def test_ids_before_vllm_has_said_where_experts_lie() -> None:
    with pytest.raises(RuntimeError, match="it has not registered this model's yet"):
        BalancedExperts(SimpleNamespace())(torch.zeros(1, 1, dtype=torch.int32))  # type: ignore[arg-type]
