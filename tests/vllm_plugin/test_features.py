"""What else vLLM does with this package's model: media, an fp8 cache, LoRA, and refusing what cannot be served."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import soundfile
import torch
from engines import Run, expected, ragged, tokens
from PIL import Image
from safetensors.torch import save_file

from inkling_portable import engine
from inkling_portable.cache import Cache
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors

FILE = "adapter_model.safetensors"
LEAVES = ("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "w13_dn", "w2_md")


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
    result = run_engine(
        model, [{"prompts": theirs, "max_tokens": 8}], engine={"max_num_batched_tokens": 64, "skip_mm_profiling": True}
    )
    found = tokens(result["steps"][0])
    assert found == expected(model, ours, 8)
    assert len({tuple(row) for row in found}) == 3


# Of the first layer's keys and values; so small that many saturate.
SCALES = (0.002, 0.004)


class Fp8Cache(Cache):
    """This package's cache with fp8 pages; scales are `first` in the first layer and 1 in the others."""

    first = (1.0, 1.0)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for index, state in enumerate(self.layers):
            k, v = (pages.to(torch.float8_e4m3fn) for pages in (state.k_pages, state.v_pages))
            scales = tuple(torch.tensor([scale]) for scale in ((1.0, 1.0) if index else self.first))
            self.layers[index] = replace(state, k_pages=k, v_pages=v, kv_scales=scales)  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_torch")
def test_an_fp8_cache(run_engine: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of the first layer stand in the checkpoint, under ModelOpt's and under the layer's name; others are 1."""
    long, *_, short = ragged(tiny)
    prompts = [long[:200], short]
    plain = expected(tiny, prompts, 12)
    monkeypatch.setattr(engine, "Cache", Fp8Cache)
    unscaled = expected(tiny, prompts, 12)
    monkeypatch.setattr(Fp8Cache, "first", SCALES)
    right = expected(tiny, prompts, 12)
    assert plain != unscaled != right, "the cache's rounding and its scales show"
    calibrated = shutil.copytree(tiny, tmp_path / "calibrated")
    names = ("model.llm.layers.0.attn.wk_dv.k_scale", "model.llm.layers.0.attn.v_scale")
    save_file(
        {name: torch.tensor(scale) for name, scale in zip(names, SCALES, strict=True)}, calibrated / "s.safetensors"
    )
    steps = [{"prompts": prompts, "max_tokens": 12}]
    result = run_engine(calibrated, steps, engine={"kv_cache_dtype": "fp8", "block_size": 32})
    assert tokens(result["steps"][0]) == right
    assert re.search(r"fp8 cache of \d+ layers: 2 scales from the checkpoint, the others are 1", result["log"])


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
        if name.endswith(tuple(f"{leaf}.weight" for leaf in LEAVES)):
            merged[name] = low_rank(module, value)
        elif name.endswith("shared_w13_weight"):
            place = f"model.{name.rsplit('.', 2)[0]}.shared_w13"
            merged[name] = torch.stack([low_rank(f"{place}_{i}", each) for i, each in enumerate(value)])
        elif name.endswith("shared_w2_weight"):
            wide = low_rank(f"model.{name.rsplit('.', 2)[0]}.shared_w2", torch.cat(list(value), 1))
            merged[name] = torch.stack(wide.chunk(len(value), 1))
    (folder / "adapter").mkdir()
    save_file({key: tensor.contiguous() for key, tensor in adapter.items()}, folder / "adapter" / FILE)
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tiny), "target_modules": sorted({key.split(".")[-3] for key in adapter}),
    }  # fmt: skip
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


def test_what_cannot_be_served_is_refused_before_weights_are_read(run_engine: Run, tiny: Path, tmp_path: Path) -> None:
    """Each error names the flag and what to use; those that vLLM finds itself name it too."""

    def saying(name: str, quantization: dict[str, Any]) -> str:
        """The model with another `quantization_config`."""
        copied = shutil.copytree(tiny, tmp_path / name)
        raw = json.loads((copied / "config.json").read_text()) | {"quantization_config": quantization}
        (copied / "config.json").write_text(json.dumps(raw))
        return str(copied)

    weight = {"dtype": "int4", "group_size": 128}
    unknown = {
        "quant_method": "quark", "export": {"kv_cache_group": []}, "global_quant_config": {"weight": weight}
    }  # fmt: skip
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    quantize_checkpoint(str(tiny), tmp_path / "mxfp4", "mxfp4")
    mxfp4 = str(tmp_path / "mxfp4")
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_backend": "TRITON_ATTN"}, r"--attention-backend is TRITON_ATTN, but .* give CUSTOM"),
        ({"dtype": "float16"}, r"--dtype is float16, .* use bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"--kv-cache-dtype is fp8_e5m2, .* use auto or fp8"),
        ({"block_size": 8}, r"--block-size is 8, .* use a multiple of 16"),
        ({"moe_backend": "marlin"}, r"--moe-backend is marlin, .* use auto or one of .*aiter"),
        (drafts, r"num_speculative_tokens.* is 3|num_speculative_tokens:3"),
        ({"quantization": "fp8"}, r"--quantization is fp8, .* leave the flag out: .* experts are in bf16"),
        ({"quantization": "modelopt_fp4"}, r"Cannot find the config file for modelopt_fp4"),
        ({"model": mxfp4, "quantization": "modelopt_fp4"}, r"quark.* does not match .* `quantization` argument"),
        (
            {"model": mxfp4, "quantization_config": {"moe": {"activation": "mxfp8"}}},
            r"--quantization-config is given, .* use what the checkpoint holds",
        ),
        ({"model": saying("awq", awq)}, r"quant_method is 'awq'; expected ModelOpt NVFP4 .* or Quark MXFP4"),
        ({"model": saying("int4", unknown)}, r"has weights of \(dtype, group_size\) .'int4', 128.; expected .'fp4'"),
    ]
    result = run_engine(tiny, [], refused=[arguments for arguments, _ in cases])
    for (arguments, pattern), said in zip(cases, result["refused"], strict=True):
        assert re.search(pattern, said), f"{arguments}: {said}"
