"""With `batch_invariant` a request's logits are the same to the last bit alone and in any company.

The kernels run in Triton's interpreter, or on the GPU where torch sees one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from small_checkpoint import write_small

from inkling_portable import LLM, SamplingParams

WATCHED = [(7 * i + 3) % 110 for i in range(21)]
NEIGHBOURS = [[5, 9, 33, 2, 71, 8, 8, 100, 41], [(3 * i + 1) % 100 for i in range(18)]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding layer with a dense MLP and a full one with experts."""
    sizes = {"num_hidden_layers": 2, "local_layer_ids": (0,), "dense_layer_ids": (0,), "n_routed_experts": 2}
    folder = tmp_path_factory.mktemp("invariant")
    return write_small(folder, depths=1, head_dim=32, swa_head_dim=32, **sizes)


def answer(llm: LLM, prompts: list[list[int]]) -> tuple[list[int], list[dict[int, float]]]:
    """What follows `WATCHED` among `prompts`, and the logarithms of the probabilities, which show every logit."""
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=20)
    outs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = outs[prompts.index(WATCHED)].outputs[0]
    assert found.error is None
    assert found.logprobs is not None
    return list(found.token_ids), found.logprobs


@pytest.mark.parametrize("drafts", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["plain", "1 draft"])
def test_logits_have_their_bits_in_any_company(kernel_device: torch.device, checkpoint: Path, drafts: int) -> None:
    if kernel_device.type == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("a driver of INKLING_TEST_DRIVER is no target of the dispatch table")

    def llm(**options: Any) -> LLM:
        return LLM(
            checkpoint, device="interpret" if kernel_device.type == "cpu" else "auto", max_model_len=48,
            max_num_seqs=3, block_size=16, num_speculative_tokens=drafts, batch_invariant=True, **options,
        )  # fmt: skip

    alone = answer(llm(), [WATCHED])
    # The prompt is cut where its neighbours leave room, begins late, and the second time is partly there already.
    crowded = llm(max_num_batched_tokens=16)
    names = {op: choice.row.name for op, choice in crowded.ops.choices.items() if choice.row is not None}
    assert {names["linear"], names["rel_attention"], names["moe_experts"]} == {"fixed_tiles", "fixed_splits"}
    for _ in range(2):
        assert answer(crowded, [NEIGHBOURS[0], WATCHED, NEIGHBOURS[1]]) == alone


def test_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant is True and device is cpu"):
        LLM(batch_invariant=True)
