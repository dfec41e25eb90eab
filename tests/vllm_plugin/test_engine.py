"""vLLM's engine over this package's model: greedy tokens equal those of this package's engine, token by token."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import save_file
from small_checkpoint import small_config, small_tokenizer

from inkling_portable import LLM, SamplingParams, engine
from inkling_portable.cache import Cache, LayerState
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.text import TextCodec
from inkling_portable.weights import load_tensors

Run = Callable[..., dict[str, Any]]
FILE = "adapter_model.safetensors"
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


class Fp8Cache(Cache):
    """This package's cache with fp8 pages of scale 1."""

    def _layer(self, *arguments: Any) -> LayerState:
        state, one = super()._layer(*arguments), torch.ones(1)
        k, v = (pages.to(torch.float8_e4m3fn) for pages in (state.k_pages, state.v_pages))
        return replace(state, k_pages=k, v_pages=v, kv_scales=(one, one))


@pytest.mark.usefixtures("in_torch")
def test_an_fp8_cache(run_engine: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ragged(tiny)
    plain = expected(tiny, prompts, 24)
    monkeypatch.setattr(engine, "Cache", Fp8Cache)
    right = expected(tiny, prompts, 24)
    assert right != plain, "the cache's rounding shows"
    steps = [{"prompts": prompts, "max_tokens": 24}]
    result = run_engine(tiny, steps, engine={"kv_cache_dtype": "fp8", "block_size": 32})
    assert tokens(result["steps"][0]) == right


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


def write_adapter(folder: Path, tiny: Path) -> tuple[Path, Path]:
    """A LoRA adapter of the projections, in the checkpoint's names, and the model into which it is merged."""
    checkpoint, rank = Checkpoint.open(tiny), 4
    generator = torch.Generator().manual_seed(8)
    tensors, merged = dict(load_tensors(checkpoint, torch.float32, progress=False)), {}
    adapter: dict[str, torch.Tensor] = {}

    def low_rank(module: str, weight: torch.Tensor) -> torch.Tensor:
        a = torch.randn(rank, weight.shape[-1], generator=generator) * 0.1
        b = torch.randn(weight.shape[-2], rank, generator=generator) * 0.1
        adapter[f"base_model.model.{module}.lora_A.weight"], adapter[f"base_model.model.{module}.lora_B.weight"] = a, b
        return weight + b @ a

    for name, value in tensors.items():
        merged[name] = value
        if not isinstance(value, torch.Tensor) or not name.startswith("llm.layers."):
            continue
        module = f"model.{name.removesuffix('.weight')}"
        if name.endswith(("wq_du.weight", "wk_dv.weight", "wv_dv.weight", "wr_du.weight", "wo_ud.weight")) or (
            name.endswith(("w13_dn.weight", "w2_md.weight"))
        ):
            merged[name] = low_rank(module, value)
        elif name.endswith("shared_w13_weight"):
            place = f"model.{name.rsplit('.', 2)[0]}.shared_w13"
            merged[name] = torch.stack([low_rank(f"{place}_{i}", each) for i, each in enumerate(value)])
        elif name.endswith("shared_w2_weight"):
            wide = low_rank(f"model.{name.rsplit('.', 2)[0]}.shared_w2", torch.cat(list(value), 1))
            merged[name] = torch.stack(wide.chunk(len(value), 1))
    (folder / "adapter").mkdir()
    save_file({key: tensor.contiguous() for key, tensor in adapter.items()}, folder / "adapter" / FILE)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(tiny), "target_modules": sorted({k.split(".")[-3] for k in adapter})}  # fmt: skip
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    write_checkpoint(folder / "merged", checkpoint.config, merged.items())
    return folder / "adapter", folder / "merged"


@pytest.mark.usefixtures("in_torch")
def test_a_lora_adapter(run_engine: Run, tiny: Path, tmp_path: Path) -> None:
    """Attention, dense MLP and shared experts: a request with the adapter gives what the merged weights give."""
    adapter, merged = write_adapter(tmp_path, tiny)
    prompts = ragged(tiny)[1:4]
    plain, adapted = (expected(model, prompts, 12, dtype="float32") for model in (tiny, merged))
    assert plain != adapted
    steps = [{"prompts": prompts, "max_tokens": 12, "adapter": str(adapter)}, {"prompts": prompts, "max_tokens": 12}]
    options = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False}
    result = run_engine(tiny, steps, {"INKLING_MULTIMEM_AR": "0"}, engine=options)
    assert tokens(result["steps"][0]) == adapted
    assert tokens(result["steps"][1]) == plain
