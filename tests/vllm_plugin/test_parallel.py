"""Two ranks, as processes that exchange over gloo: tensor, expert and pipeline parallelism give the tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Run, expected, ragged, tokens

WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor, whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("in_torch")
def test_two_ranks(run_engine: Run, tiny: Path, way: str) -> None:
    """In float32, where the order in which partial sums are added shows in no token. The full layers of this model have
    one key head, which two tensor-parallel ranks both hold."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 256, "disable_log_stats": True}
    result = run_engine(tiny, steps, variables, engine=options | WAYS[way])
    right = expected(tiny, prompts, 24, dtype="float32")
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]
