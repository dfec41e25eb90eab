"""The whole model on the kernels gives the reference's greedy tokens, in every format, plain and with drafts.

The kernels run in Triton's interpreter, or on the GPU where torch sees one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from small_checkpoint import write_small

from inkling_kernels.rel_attention_decode import rel_attention_decode
from inkling_portable import LLM, SamplingParams
from inkling_portable.quantize import quantize_checkpoint

PROMPTS = [{"prompt_token_ids": [5, 9, 33, 2, 71, 8, 8, 100, 41]}, {"prompt_token_ids": [11, 12, 13]}]
NEW = 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("interpret")
    # The attention kernels take heads of 32 and more.
    found = {"bf16": write_small(folder / "bf16", head_dim=32, swa_head_dim=32)}
    for format in ("nvfp4", "mxfp4"):
        found[format] = folder / format
        quantize_checkpoint(found["bf16"], found[format], format, separate_gate_up=format == "nvfp4")
    return found


def tokens(folder: Path, device: str, drafts: int) -> tuple[LLM, list[list[int]]]:
    llm = LLM(
        folder, device=device, dtype="float32", max_model_len=64, max_num_seqs=2, block_size=16,
        num_speculative_tokens=drafts,
    )  # fmt: skip
    return llm, [
        list(r.outputs[0].token_ids) for r in llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, temperature=0))
    ]


@pytest.mark.parametrize("drafts", [0, 2], ids=["plain", "2 drafts"])
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_the_kernels_write_what_the_reference_writes(
    kernel_device: torch.device,
    checkpoints: dict[str, Path],
    format: str,
    drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel_device.type == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("a driver of INKLING_TEST_DRIVER is no target of the dispatch table")
    decoded, stock = [], rel_attention_decode

    def noted(*args: Any, max_query_len: int, **options: Any) -> torch.Tensor:
        decoded.append(max_query_len)
        return stock(*args, max_query_len=max_query_len, **options)

    monkeypatch.setattr("inkling_kernels.rel_attention.rel_attention_decode", noted)
    llm, found = tokens(checkpoints[format], "interpret" if kernel_device.type == "cpu" else "auto", drafts)
    # Every operation ran on its kernel, on the experts of the format.
    rows = {op: choice.row for op, choice in llm.ops.choices.items()}
    assert all(row is not None and "gpu" in row.targets for row in rows.values()), rows
    assert llm.ops.facts.format == format
    # So did generated tokens, and their drafts, on the kernel that splits keys.
    assert 1 + bool(drafts) in decoded
    assert max(decoded) <= 9
    assert found == tokens(checkpoints[format], "cpu", drafts)[1]
