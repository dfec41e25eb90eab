"""Rank `RANK` of two that balance the experts of three layers with vLLM's own functions, over gloo.

    python balance_ranks.py RANK FOLDER

FOLDER is where the two find each other. The first layer of a packed model is in bf16, as checkpoints have single ones.
Prints, as JSON and by format, how many layers were shown to vLLM and how many rows it moved here, where the ranks' sums
are those of a float64 oracle at every step: as loaded, and behind each of the rearrangements. And how many broken
copies, of which each loses one tensor of the six of an NVFP4 expert or leaves ids as they are, were found out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import numpy as np
import torch
import torch.distributed as dist
from balance_worker import with_kernel
from moe_oracle import oracle, random_packed
from small_checkpoint import small_config
from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.experts import Experts, ExpertsLoader
from inkling_portable.facts import Facts
from inkling_portable.ops import Ops
from inkling_portable.parallel import ExpertRank
from inkling_portable.vllm_plugin.balance import Balanced, BalancedExperts, own_experts

LOGICAL, COPIES, ROWS, HIDDEN, WIDTH = 6, 2, 9, 64, 32


def plain(rng: np.random.Generator, rows: int, columns: int, layout: str) -> tuple[ExpertWeight, np.ndarray]:
    exact = rng.standard_normal((LOGICAL, rows, columns)).astype(np.float32)
    return ExpertWeight("bf16", torch.from_numpy(exact), layout=layout), exact.astype(np.float64)


def balanced(rank: int, format: str) -> tuple[int, int]:
    """Layers shown to vLLM and rows that it moved."""
    rng = np.random.default_rng(17)
    config = small_config(n_routed_experts=LOGICAL)
    build = SimpleNamespace(whole=config, experts=ExpertRank(2, rank), redundant=COPIES, format=format)
    facts = Facts(dtype="float32", format=format, num_experts=4, hidden_size=HIDDEN, expert_width=WIDTH)
    ops = Ops.bind(Target.parse("cpu"), facts, {"moe_experts": "torch"})
    layers, exact = [], []
    for kind in ("bf16", format, format):
        shapes = (2 * WIDTH, HIDDEN, "interleaved"), (HIDDEN, WIDTH, "plain")
        made = [plain(rng, *s) if kind == "bf16" else random_packed(rng, kind, LOGICAL, *s) for s in shapes]
        layer = Experts(ops, *(weight for weight, _ in made))
        loader = ExpertsLoader(ops, torch.float32)
        for which, (weight, _) in zip(("w13", "w2"), made, strict=True):
            loader.take(layer, which, own_experts(build, weight))
        layers.append(layer)
        exact.append([values for _, values in made])
    model = Balanced.__new__(type("Model", (Balanced,), {}))
    model.give_places(build, layers)
    count, places = model.num_moe_layers, list(range(LOGICAL)) + list(range(COPIES))
    assert (model.num_physical_experts, model.num_local_physical_experts) == (8, 4)

    placed = torch.tensor([places] * count)
    to_physical = torch.full((count, LOGICAL, 8), -1)
    copies, load = torch.zeros(count, LOGICAL, dtype=torch.int64), torch.zeros(count, 8, dtype=torch.int32)
    model.set_eplb_state(load, to_physical, copies)
    for layer in model.moe_layers:
        layer.eplb_state.should_record_tensor = torch.tensor(True)
        layer.eplb_state.num_unpadded_tokens_tensors = [torch.tensor(ROWS, dtype=torch.int32)]
    buffers = [torch.empty_like(rows) for rows in model.expert_weights[0]]
    transport = TorchDistNcclEplbCommunicator(dist.group.WORLD)
    moved = 0
    for step in range(4):
        if step:
            spread = [rng.permutation(places if step < 3 else [5, 5, 5, 4, 3, 2, 1, 0]) for _ in range(count)]
            new = torch.from_numpy(np.stack(spread))
            own = slice(4 * rank, 4 * rank + 4)
            moved += int((new != placed)[:, own].sum())
            rearrange_expert_weights_inplace(placed, new, model.expert_weights, buffers, dist.group.WORLD, transport)
            placed = new
        maps, counts = compute_logical_maps(placed, LOGICAL)
        to_physical.fill_(-1)[..., : maps.shape[-1]] = maps
        copies.copy_(counts)
        load.zero_()
        x = rng.standard_normal((ROWS, HIDDEN))
        ids = np.stack([rng.permutation(LOGICAL)[:3] for _ in range(ROWS)]).astype(np.int32)
        gammas = rng.uniform(0.1, 2, ids.shape).astype(np.float32)
        for layer, (w13, w2) in zip(layers, exact, strict=True):
            found = layer(torch.from_numpy(x).float(), torch.from_numpy(ids), torch.from_numpy(gammas))
            dist.all_reduce(found)
            right = oracle(x, w13, w2, ids, gammas)
            np.testing.assert_allclose(found.numpy(), right, rtol=1e-4, atol=1e-5 * np.abs(right).max())
        assert load.sum(1).tolist() == [ids.size] * count
    return count, moved


def found_out(rank: int, method: str, broken: Callable[..., Any]) -> bool:
    """Whether the oracle contradicts the experts with that method."""
    with mock.patch.object(BalancedExperts, method, broken):
        try:
            balanced(rank, "nvfp4")
        except AssertionError:
            return True
    return False


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with_kernel()
    torch.set_num_threads(1)
    formats = {format: balanced(rank, format) for format in ("bf16", "nvfp4", "mxfp4")}
    held, call = BalancedExperts.get_expert_weights, BalancedExperts.__call__
    broken: list[tuple[str, Callable[..., Any]]] = [
        ("get_expert_weights", lambda self, lost=lost: [rows for i, rows in enumerate(held(self)) if i != lost])
        for lost in range(6)
    ]
    broken.append(("__call__", lambda self, ids: (call(self, ids), ids)[1]))
    caught = [found_out(rank, *each) for each in broken]
    print(json.dumps({"formats": formats, "caught": sum(caught), "broken": len(caught)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
