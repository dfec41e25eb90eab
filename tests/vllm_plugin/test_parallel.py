"""Two ranks, as processes that exchange over gloo: tensor, expert and pipeline parallelism give the tokens of one, also
while vLLM moves experts about and where one rank holds more of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
from engines import Run, expected, ragged, tokens
from small_checkpoint import small_config, small_tokenizer

HERE = Path(__file__).parent
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor, whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}


VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONPATH": f"{HERE / 'platform'}:{HERE}",
}
OPTIONS = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 256, "disable_log_stats": True}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("in_torch")
def test_two_ranks(run_engine: Run, tiny: Path, way: str) -> None:
    """In float32, where the order in which partial sums are added shows in no token. The full layers of this model have
    one key head, which two tensor-parallel ranks both hold."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    result = run_engine(tiny, steps, VARIABLES, engine=OPTIONS | WAYS[way])
    right = expected(tiny, prompts, 24, dtype="float32")
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]


@pytest.mark.slow
@pytest.mark.usefixtures("in_torch")
def test_experts_that_vllm_moves(run_engine: Run, tiny: Path) -> None:
    """vLLM's balancer with its own policy, every six steps: eight experts and two copies, five on each rank."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    balancer = {
        "window_size": 4, "step_interval": 6, "num_redundant_experts": 2, "use_async": False,
        "communicator": "torch_nccl",
    }  # fmt: skip
    options = OPTIONS | WAYS["tensor, whole experts"] | {"enable_eplb": True, "eplb_config": balancer}
    result = run_engine(tiny, steps, VARIABLES, engine=options, balanced=True)
    right = expected(tiny, prompts, 24, dtype="float32")
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]
    loaded = [*range(8), 0, 1]
    first, second = (placements[0] for placements in result["placements"])
    for placements, layers in zip(result["placements"], (first, second), strict=True):
        assert placements == [layers, layers], "the ranks disagree"
        for places in layers:
            assert set(places) == set(range(8))
            assert places != loaded
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.usefixtures("in_torch")
def test_ranks_that_hold_unequal_numbers_of_experts(run_engine: Run, tmp_path: Path, experts: int) -> None:
    """Two of three on the first rank; of one, none on the second."""
    config = small_config(depths=0, n_routed_experts=experts, num_experts_per_tok=1)
    model = checkpoints.write_random(tmp_path / "model", config, small_tokenizer())
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [200, 7]]
    steps = [{"prompts": prompts, "max_tokens": 8}]
    result = run_engine(model, steps, VARIABLES, engine=OPTIONS | WAYS["tensor, whole experts"])
    assert tokens(result["steps"][0]) == expected(model, prompts, 8, dtype="float32")
