"""vLLM's engine over this package's model: greedy tokens equal those of this package's engine, token by token."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import soundfile
from PIL import Image
from small_checkpoint import small_config, small_tokenizer

from inkling_portable import LLM, SamplingParams
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.text import TextCodec

Run = Callable[..., dict[str, Any]]
SOURCE = Path(checkpoints.__file__).read_text()


def expected(model: Path, prompts: list[Any], max_tokens: int, **options: Any) -> list[list[int]]:
    """What this package's engine says, each prompt alone."""
    llm = LLM(model, **options)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    asked = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
    return [list(llm.generate([prompt], params)[0].outputs[0].token_ids) for prompt in asked]


def ragged(model: Path) -> list[list[int]]:
    """Five prompts of a token to some hundred, longer and shorter than a sliding window."""
    codec = TextCodec.find(model)
    assert codec is not None
    texts = SOURCE[:1000], SOURCE[1500:1520], "import ", SOURCE[2000:2400], "d"
    return [codec.encode(text) for text in texts]


def tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in step]


@pytest.mark.usefixtures("in_torch")
def test_ragged_requests_in_chunks_and_behind_a_cached_prefix(run_engine: Run, tiny: Path) -> None:
    """Blocks of 16, 16 tokens a step, five requests at once; then one of them again, from vLLM's prefix cache."""
    prompts = ragged(tiny)
    steps = [{"prompts": prompts, "max_tokens": 24}, {"prompts": prompts[:1], "max_tokens": 24}]
    result = run_engine(tiny, steps, engine={"block_size": 16, "max_num_batched_tokens": 16})
    right = expected(tiny, prompts, 24)
    assert tokens(result["steps"][0]) == right
    assert tokens(result["steps"][1]) == right[:1]
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
    quantize_checkpoint(str(tiny), tmp_path / format, format)
    prompts = ragged(tiny)[:3]
    result = run_engine(tmp_path / format, [{"prompts": prompts, "max_tokens": 16}], engine={"block_size": 64})
    assert tokens(result["steps"][0]) == expected(tmp_path / format, prompts, 16)
    assert f"experts {format}" in result["log"]


@pytest.mark.usefixtures("in_torch")
def test_an_image_and_a_sound(run_engine: Run, tmp_path: Path) -> None:
    """Media go through vLLM's processor and this package's towers, one request of each kind and one of both."""
    model = checkpoints.write_media(tmp_path / "model")
    rng = np.random.default_rng(3)
    Image.fromarray(rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    soundfile.write(tmp_path / "sound.wav", rng.standard_normal(12_000).clip(-1, 1) * 0.3, 16_000)
    places = {"image": 200005, "audio": 200020}
    paths = {"image": str(tmp_path / "image.png"), "audio": str(tmp_path / "sound.wav")}
    theirs, ours = [], []
    for kinds in (["image"], ["audio"], ["image", "audio"]):
        ids = [5, *(token for kind in kinds for token in (places[kind], 7)), 9]
        theirs.append({"tokens": ids} | {kind: paths[kind] for kind in kinds})
        ours.append({"prompt_token_ids": ids, "multi_modal_data": {kind: paths[kind] for kind in kinds}})
    result = run_engine(model, [{"prompts": theirs, "max_tokens": 8}], engine={"max_num_batched_tokens": 64})
    found = tokens(result["steps"][0])
    assert found == expected(model, ours, 8)
    assert len({tuple(row) for row in found}) == 3


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


def test_what_cannot_be_served_is_refused_before_weights_are_read(run_engine: Run, tiny: Path, tmp_path: Path) -> None:
    """Each error names the flag and what to use; those that vLLM finds itself name it too."""
    unknown = tmp_path / "unknown"
    shutil.copytree(tiny, unknown)
    raw = json.loads((unknown / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "quark", "export": {"kv_cache_group": []}, "global_quant_config": {
        "weight": {"dtype": "int4", "group_size": 128}}}  # fmt: skip
    (unknown / "config.json").write_text(json.dumps(raw))
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_backend": "TRITON_ATTN"}, r"--attention-backend is TRITON_ATTN, but .* give CUSTOM"),
        ({"dtype": "float16"}, r"--dtype is float16, .* use bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"--kv-cache-dtype is fp8_e5m2, .* use auto or fp8"),
        ({"block_size": 8}, r"--block-size is 8, .* use a multiple of 16"),
        ({"moe_backend": "marlin"}, r"--moe-backend is marlin, .* use auto or one of .*aiter"),
        (drafts, r"num_speculative_tokens.* is 3|num_speculative_tokens:3"),
        ({"model": str(unknown)}, r"has weights of \(dtype, group_size\) .'int4', 128.; expected .'fp4', 32."),
    ]
    result = run_engine(tiny, [], refused=[arguments for arguments, _ in cases])
    for (arguments, pattern), said in zip(cases, result["refused"], strict=True):
        assert re.search(pattern, said), f"{arguments}: {said}"
