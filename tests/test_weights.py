"""Reading a checkpoint's tensors: names, layouts, dtypes, 4-bit experts, and the memory that it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import InklingConfig as OracleConfig
from transformers import InklingForCausalLM, InklingForConditionalGeneration, InklingTextConfig

from inkling_kernels.numerics import ExpertWeight
from inkling_portable import weights
from inkling_portable.checkpoint import Checkpoint, CheckpointError
from inkling_portable.weights import load_tensors

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
EXPERTS, ROWS, HIDDEN, WIDTH = 4, 64, 64, 32
PREFIX = "model.llm.layers.2.mlp.experts."


def text_config() -> InklingTextConfig:
    return InklingTextConfig(
        vocab_size=96, unpadded_vocab_size=90, hidden_size=HIDDEN, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_head_dim=16, sliding_window_size=8, rel_extent=16, local_layer_ids=[0, 2],
        mlp_layer_types=["dense", "sparse", "sparse"], intermediate_size=80, moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS, num_experts_per_tok=2, n_shared_experts=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[InklingForCausalLM, Path, Path]:
    """One text model saved under Transformers' names and, inside a multimodal one, under the original names."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    text = InklingForCausalLM(text_config())
    for parameter in text.parameters():
        torch.nn.init.normal_(parameter)
    text.save_pretrained(root / "transformers")
    towers = {"vision_config": {"patch_size": 4, "num_hidden_layers": 2}, "audio_config": {"mel_vocab_size": 4}}
    both = InklingForConditionalGeneration(OracleConfig(text_config=text_config().to_dict(), **towers))
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(root / "original")
    return text, root / "transformers", root / "original"


def values(tensor: torch.Tensor | ExpertWeight) -> torch.Tensor:
    return tensor.data if isinstance(tensor, ExpertWeight) else tensor


def read(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor | ExpertWeight]:
    with Checkpoint.open(path) as checkpoint:
        return dict(load_tensors(checkpoint, dtype, **options))


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows gate0, up0, gate1, up1, ... by a loop."""
    rows = [row for pair in zip(gate.unbind(-2), up.unbind(-2), strict=True) for row in pair]
    return torch.stack(rows, dim=-2)


def test_both_spellings_give_the_same_tensors(models: tuple[InklingForCausalLM, Path, Path]) -> None:
    _, transformers, original = models
    left, right = read(transformers), read(original, sections=("text",))
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(values(left[name]), values(right[name])), name
    towers = set(read(original)) - set(right)
    assert towers == {f"visual.{name}.weight" for name in ("layers.linear_0", "layers.norm_0", "layers.linear_1")} | {
        "visual.final_norm.weight", "audio.encoder.weight", "audio.final_norm.weight",
    }  # fmt: skip


def test_tensors_are_those_of_the_model(models: tuple[InklingForCausalLM, Path, Path]) -> None:
    model, transformers, original = models
    state = model.state_dict()
    for path in (transformers, original):
        got = {name: values(tensor) for name, tensor in read(path, sections=("text",)).items()}
        assert torch.equal(got["llm.unembed.weight"], state["lm_head.weight"])
        assert torch.equal(got["llm.layers.1.attn.wr_du.weight"], state["model.layers.1.self_attn.r_proj.weight"])
        conv = state["model.layers.0.self_attn.k_sconv.conv1d.weight"]
        assert torch.equal(got["llm.layers.0.attn.k_sconv.weight"], conv.view(64, 4))
        mlp = {name.removeprefix("model.layers."): tensor for name, tensor in state.items() if ".mlp." in name}
        dense = in_turn(mlp["0.mlp.gate_proj.weight"], mlp["0.mlp.up_proj.weight"])
        assert torch.equal(got["llm.layers.0.mlp.w13_dn.weight"], dense)
        fused = mlp["2.mlp.experts.gate_up_proj"]
        routed = in_turn(fused[:, :WIDTH], fused[:, WIDTH:])
        assert torch.equal(got["llm.layers.2.mlp.experts.w13"], routed)
        assert torch.equal(got["llm.layers.2.mlp.experts.w2"], mlp["2.mlp.experts.down_proj"])
        shared = in_turn(mlp["2.mlp.shared_experts.gate_proj"], mlp["2.mlp.shared_experts.up_proj"])
        assert torch.equal(got["llm.layers.2.mlp.shared_experts.shared_w13_weight"], shared)


def test_the_two_global_scales_are_not_confused(models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path) -> None:
    _, _, original = models
    tensors = load_file(original / "model.safetensors")
    tensors["model.llm.layers.0.mlp.global_scale"] = torch.tensor([3.0])
    tensors["model.llm.layers.1.mlp.gate.global_scale"] = torch.tensor([5.0])
    save(tmp_path, original, tensors)
    got = read(tmp_path, torch.bfloat16)
    assert got["llm.layers.0.mlp.global_scale"].tolist() == [3.0]
    assert got["llm.layers.1.mlp.gate.global_scale"].tolist() == [5.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(models: tuple[InklingForCausalLM, Path, Path], dtype: torch.dtype) -> None:
    exact = read(models[1])
    for name, tensor in read(models[1], dtype).items():
        wanted = torch.float32 if "sconv" in name or ".gate." in name or "global_scale" in name else dtype
        assert values(tensor).dtype == wanted, name
        assert torch.equal(values(tensor), values(exact[name]).to(wanted)), name
        assert values(tensor).is_contiguous(), name


def test_float16_is_refused(models: tuple[InklingForCausalLM, Path, Path]) -> None:
    with Checkpoint.open(models[1]) as checkpoint, pytest.raises(ValueError, match=r"dtype: torch\.float16"):
        next(load_tensors(checkpoint, torch.float16))


def test_large_tensors_arrive_in_pieces_whole(models: tuple[InklingForCausalLM, Path, Path], monkeypatch: Any) -> None:
    """The piece size shrunk to 96 bytes, so that every tensor takes several."""
    whole = {path: read(path) for path in models[1:]}
    narrow = {path: read(path, torch.bfloat16) for path in models[1:]}
    monkeypatch.setattr("inkling_portable.shards.CHUNK_BYTES", 96)
    for path in models[1:]:
        for dtype, want in ((torch.float32, whole[path]), (torch.bfloat16, narrow[path])):
            for name, tensor in read(path, dtype).items():
                assert torch.equal(values(tensor), values(want[name])), name


def test_the_progress_bar_is_shown_only_when_asked(models: tuple[InklingForCausalLM, Path, Path], capfd: Any) -> None:
    read(models[1])
    assert capfd.readouterr() == ("", "")
    read(models[1], progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading transformers" in err


def save(
    folder: Path, source: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> None:
    raw = json.loads((source / "config.json").read_text())
    if quantization:
        raw["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.llm.layers.1.mlp.experts"]}
MXFP4 = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
    "exclude": [f"model.llm.layers.1.mlp.experts.{name}_weight" for name in ("w13", "w2")],
}


def packed(original: Path, format: str, form: str) -> dict[str, torch.Tensor]:
    """The tensors of `original` with layer 2's experts as random 4-bit ones. Written here, not by the code under test.

    `form`: NVFP4's second scales "one", "column" ([E, 1]) or "apart" ([E, 2]); MXFP4's scales "flat" or "stacked".
    """
    generator = np.random.default_rng(11)
    tensors = load_file(original / "model.safetensors")
    for name, rows, columns in (("w13", ROWS, HIDDEN), ("w2", HIDDEN, WIDTH)):
        key = f"{PREFIX}{name}_weight"
        tensors[key] = torch.from_numpy(generator.integers(0, 256, (EXPERTS, rows, columns // 2), dtype=np.uint8))
        if format == "mxfp4":
            scale = generator.integers(0, 255, (EXPERTS, rows, columns // 32), dtype=np.uint8)
            scale[0, 0, 0] = 0
            shape = scale.shape if form == "stacked" else (EXPERTS * rows, columns // 32)
            tensors[f"{key}_scale"] = torch.from_numpy(scale.reshape(shape))
            continue
        scale = generator.integers(0, 0x7F, (EXPERTS, rows, columns // 16), dtype=np.uint8)
        apart = form == "apart" and name == "w13"
        shape = (EXPERTS, 2) if apart else (EXPERTS, 1) if form == "column" else (EXPERTS,)
        tensors[f"{key}.scale"] = torch.from_numpy(scale).view(torch.float8_e4m3fn)
        tensors[f"{key}.scale2"] = torch.from_numpy(generator.uniform(0.01, 2, shape).astype(np.float32))
        tensors[f"{key}.input_amax"] = torch.tensor([3.0], dtype=torch.bfloat16)
        tensors[f"{key}.original_shape"] = torch.tensor([EXPERTS, rows, columns])
    return tensors


def unpacked(tensors: dict[str, torch.Tensor], name: str, format: str) -> np.ndarray:
    """[E, N, K] float32 by the formulas of the formats."""
    key = f"{PREFIX}{name}_weight"
    codes = tensors[key].numpy()
    value = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(*codes.shape[:2], -1)
    if format == "mxfp4":
        scale = tensors[f"{key}_scale"].numpy().reshape(EXPERTS, codes.shape[1], -1)
        with np.errstate(over="ignore"):
            return value * np.repeat(scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=-1)
    scale = tensors[f"{key}.scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    second = tensors[f"{key}.scale2"].numpy().reshape(EXPERTS, -1)
    rows = np.stack([second[:, row % second.shape[1]] for row in range(codes.shape[1])], axis=1)
    return value * np.repeat(scale, 16, axis=-1) * rows[:, :, None]


FORMS = [("nvfp4", "one"), ("nvfp4", "column"), ("nvfp4", "apart"), ("mxfp4", "flat"), ("mxfp4", "stacked")]


def check_packed(module: ModuleType, folder: Path, tensors: dict[str, torch.Tensor], format: str) -> None:
    with Checkpoint.open(folder) as checkpoint:
        got = dict(module.load_tensors(checkpoint, torch.bfloat16))
        for name, layout in (("w13", "interleaved"), ("w2", "plain")):
            kept, weight = (got[f"llm.layers.{layer}.mlp.experts.{name}"] for layer in (1, 2))
            assert (kept.format, weight.format) == ("bf16", format)
            assert kept.layout == weight.layout == layout
            assert torch.equal(kept.data, tensors[f"model.llm.layers.1.mlp.experts.{name}_weight"].bfloat16())
            assert weight.data.dtype == torch.uint8
            want = unpacked(tensors, name, format)
            for expert in range(EXPERTS):
                have = weight.dequant(expert).numpy()
                assert have.dtype == np.float32
                assert (have.view(np.uint32) == want[expert].view(np.uint32)).all(), (name, expert)


@pytest.mark.parametrize(("format", "form"), FORMS)
def test_packed_experts(models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path, format: str, form: str) -> None:
    tensors = packed(models[2], format, form)
    save(tmp_path, models[2], tensors, NVFP4 if format == "nvfp4" else MXFP4)
    check_packed(weights, tmp_path, tensors, format)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_tensor_of_a_packed_expert_is_needed(
    models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path, format: str
) -> None:
    tensors = packed(models[2], format, "one")
    for name in [name for name in tensors if name.startswith(PREFIX)]:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        save(tmp_path, models[2], rest, NVFP4 if format == "nvfp4" else MXFP4)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(tmp_path)
        assert name in caught.value.missing


def test_packed_experts_that_the_configuration_does_not_expect(
    models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path
) -> None:
    tensors = packed(models[2], "nvfp4", "one")
    save(tmp_path, models[2], tensors)
    with pytest.raises(CheckpointError, match="dtype U8, expected BF16 or F32") as caught:
        Checkpoint.open(tmp_path)
    assert len(caught.value.unexpected) == 8
    save(tmp_path, models[2], tensors, {**NVFP4, "ignore": ["*.experts"]})
    with pytest.raises(CheckpointError, match="the configuration excludes it"):
        Checkpoint.open(tmp_path)
    save(tmp_path, models[2], tensors, MXFP4)
    with pytest.raises(CheckpointError, match=r"w13_weight_scale \(renamed\?"):
        Checkpoint.open(tmp_path)


def test_what_is_wrong_with_the_scales_is_named(models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path) -> None:
    tensors = packed(models[2], "nvfp4", "one")
    tensors[f"{PREFIX}w2_weight.scale"].view(torch.uint8)[3, 17, 1] = 0xFF
    save(tmp_path, models[2], tensors, NVFP4)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.w2_weight: scale: NaN at expert 3, row 17"):
        read(tmp_path)
    tensors = packed(models[2], "nvfp4", "one")
    tensors[f"{PREFIX}w13_weight.original_shape"][1] = 128
    save(tmp_path, models[2], tensors, NVFP4)
    with pytest.raises(CheckpointError, match=r"original_shape is \[4, 128, 64\], expected \[4, 64, 64\]"):
        read(tmp_path)


MUTANTS = {
    "contiguous w13 of experts": ("pairs[index, :, half]", "flat.view(-1, 2, rows // 2, spec.shape[-1])[index, half]"),
    "contiguous w13 of dense layers": (
        'flat.view(-1, 2, spec.shape[-1])[:, 0 if part.view == "gate" else 1]',
        'flat.view(2, -1, spec.shape[-1])[0 if part.view == "gate" else 1]',
    ),
    "gate and up exchanged": ('0 if part.view == "gate" else 1', '1 if part.view == "gate" else 0'),
    "one expert's scale2 for all": ("weight.check_values(first)", "scale2[:] = scale2[0].clone()"),
    "router in bf16": ("torch.float32 if spec.float32 else dtype", "dtype"),
}


@pytest.mark.parametrize("mistake", [None, *MUTANTS])
def test_broken_copies_are_caught(
    models: tuple[InklingForCausalLM, Path, Path], tmp_path: Path, mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = packed(models[2], "nvfp4", "apart")
    save(tmp_path, models[2], tensors, NVFP4)
    source = Path(weights.__file__).read_text()
    if mistake is not None:
        old, new = MUTANTS[mistake]
        assert source.count(old) == 1, "the source has changed: adapt the mutant"
        source = source.replace(old, new)
    module = ModuleType("inkling_portable.weights_copy")
    module.__package__ = "inkling_portable"
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    monkeypatch.setattr(sys.modules[__name__], "load_tensors", module.load_tensors)

    def everything() -> None:
        test_both_spellings_give_the_same_tensors(models)
        test_dtypes(models, torch.bfloat16)
        check_packed(module, tmp_path, tensors, "nvfp4")

    if mistake is None:
        everything()
    else:
        with pytest.raises(AssertionError):
            everything()
