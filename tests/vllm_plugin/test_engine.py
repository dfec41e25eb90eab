"""vLLM's engine over this package's model: greedy tokens equal those of this package's engine, token by token, and
those of Transformers."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import pytest
from engines import Run, expected, ragged, tokens
from reference import Reference
from small_checkpoint import small_config, small_tokenizer

from inkling_portable import LLM, SamplingParams
from inkling_portable.quantize import quantize_checkpoint


@pytest.mark.usefixtures("in_torch")
def test_ragged_requests_in_chunks_and_behind_a_cached_prefix(run_engine: Run, tiny: Path) -> None:
    """Blocks of 16, 16 tokens a step, five requests at once; then one of them again, from vLLM's prefix cache.

    Each token is the likeliest of Transformers in float32 too, or as likely as that up to bfloat16's rounding: logits
    are spread by 2.5, and the models' roundings put two of them apart by a hundredth of that."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    result = run_engine(tiny, steps, engine={"block_size": 16, "max_num_batched_tokens": 16})
    right = expected(tiny, prompts, 24)
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]
    reference = Reference(tiny)
    apart = [each for pair in zip(prompts, right, strict=True) for each in reference.passed_over(*pair)]
    assert sorted(apart)[-3] == 0
    assert max(apart) < 0.025
    assert result["steps"][1][0]["cached"] >= len(prompts[0]) - 48
    assert "Inkling on cpu (CPU): inkling-portable" in result["log"]
    assert "(--attention-backend CUSTOM), experts bf16; rows of its table: embedding=torch" in result["log"]


@pytest.mark.usefixtures("in_torch")
def test_drafts_of_the_prediction_depths(run_engine: Run, tiny: Path) -> None:
    """Blocks of 128, whose conv state vLLM makes larger than its width; two drafts a step, some of them accepted."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    options = {"block_size": 128, "max_num_batched_tokens": 128, "speculative_config": speculative}
    result = run_engine(tiny, steps, engine=options)
    right = expected(tiny, prompts, 24)
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]
    drafted, accepted = (result["metrics"][f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    # This package's engine accepts about as many: drafts of wrong states would be accepted by luck alone.
    llm = LLM(tiny, num_speculative_tokens=2)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    own = [o.timings for o in llm.generate(asked, SamplingParams(temperature=0, max_tokens=24))]
    ratio = sum(sum(timing["accepted"]) for timing in own) / sum(2 * timing["steps"] for timing in own)
    assert accepted / drafted > 0.75 * ratio > 0.15


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.usefixtures("in_torch")
def test_packed_experts(run_engine: Run, tiny: Path, tmp_path: Path, format: str) -> None:
    """One of them with `--quantization` as vLLM names it; left out, vLLM takes it from the checkpoint."""
    quantize_checkpoint(str(tiny), tmp_path / format, format)
    prompts = ragged(tiny)[:3]
    options = {"block_size": 64} | ({"quantization": "modelopt_fp4"} if format == "nvfp4" else {})
    result = run_engine(tmp_path / format, [{"prompts": prompts, "max_tokens": 16}], engine=options)
    assert tokens(result["steps"][0]) == expected(tmp_path / format, prompts, 16)
    assert f"experts {format}" in result["log"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_dummy_weights(run_engine: Run, tiny: Path, tmp_path: Path, format: str) -> None:
    """`--load-format dummy` reads nothing and runs: people size caches with it."""
    if format != "bf16":
        quantize_checkpoint(str(tiny), tmp_path / format, format)
    model = tiny if format == "bf16" else tmp_path / format
    steps = [{"prompts": [[5, 6, 7]], "max_tokens": 3}]
    result = run_engine(model, steps, engine={"block_size": 64, "load_format": "dummy"})
    assert len(result["steps"][0][0]["tokens"]) == 3


@pytest.mark.usefixtures("in_torch")
def test_the_kernels_themselves(run_engine: Run, tmp_path: Path) -> None:
    """The Triton rows in the interpreter, in vLLM's caches: the strides, tables and padding that a GPU would see."""
    config = small_config(depths=0, swa_head_dim=32, head_dim=32, num_key_value_heads=1)
    model = checkpoints.write_random(tmp_path / "model", config, small_tokenizer())
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [200, 7]]
    options = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 16}
    steps = [{"prompts": prompts, "max_tokens": 4}, {"prompts": prompts[:1], "max_tokens": 2}]
    result = run_engine(model, steps, {"INKLING_IMPL": ""}, engine=options, interpret=True)
    right = expected(model, prompts, 4, dtype="float32")
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == [right[0][:2]]
    assert "rel_attention=triton" in result["log"]
