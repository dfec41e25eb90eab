"""Experts converted at load, against float64 values of the bytes, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import values
from safetensors.torch import load_file, save_file
from small_checkpoint import write_small

from inkling_kernels.numerics import ExpertWeight, Format, pack_e2m1, unpack_e2m1
from inkling_portable import LLM, SamplingParams
from inkling_portable.checkpoint import Checkpoint, CheckpointError
from inkling_portable.cli import main
from inkling_portable.conversion import Conversion
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.shards import ShardFile
from inkling_portable.weights import load_tensors

FORMATS = ("bf16", "nvfp4", "mxfp4")
Weights = dict[str, ExpertWeight]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("conversion")
    write_small(root / "bf16", depths=0, moe_intermediate_size=96)
    quantize_checkpoint(root / "bf16", root / "nvfp4", "nvfp4", separate_gate_up=True)
    quantize_checkpoint(root / "bf16", root / "mxfp4", "mxfp4")
    return {format: root / format for format in FORMATS}


def load(folder: Path, to: str | None, dtype: torch.dtype = torch.float32) -> tuple[Weights, Conversion | None]:
    with Checkpoint.open(folder) as checkpoint:
        conversion = Conversion.of(checkpoint, to)
        tensors = load_tensors(checkpoint, dtype, sections=("text",), conversion=conversion)
        return {name: value for name, value in tensors if isinstance(value, ExpertWeight)}, conversion


def exact(weight: ExpertWeight) -> np.ndarray:
    """float64 `[E, N, K]`, by the test's own decoding."""
    if weight.format == "bf16" or weight.scale is None:
        return weight.data.double().numpy()
    codes = np.stack([weight.data.numpy() & 15, weight.data.numpy() >> 4], -1).reshape(*weight.data.shape[:2], -1)
    scale2 = None if weight.scale2 is None else weight.scale2.numpy()
    return values(weight.format, codes, weight.scale.view(torch.uint8).numpy(), scale2)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_from_every_other(folders: dict[str, Path], source: str, to: str) -> None:
    before, _ = load(folders[source], None)
    after, conversion = load(folders[source], to)
    error = square = 0.0
    for name, weight in after.items():
        kept = before[name].format == to or (before[name].format == "bf16" and source != "bf16")
        assert weight.format == (before[name].format if kept else to)
        assert weight.layout == before[name].layout
        old, new = exact(before[name]), exact(weight)
        if kept:
            assert np.array_equal(old, new)
        else:
            error, square = error + ((new - old) ** 2).sum(), square + (old**2).sum()
    if conversion is None:
        assert source == to
        return
    # Four bits are off by about a tenth; unpacking to float32, and MXFP4's codes with NVFP4's scales, by nothing.
    assert conversion.relative_rms == pytest.approx((error / square) ** 0.5, rel=1e-3, abs=1e-7)
    lossless = (to == "bf16") or (source, to) == ("mxfp4", "nvfp4")
    assert (conversion.relative_rms < 1e-7) if lossless else (0.03 < conversion.relative_rms < 0.15)
    said = json.loads(json.dumps(conversion.to_dict()))
    assert (said["from"], said["to"], said["tensors"]) == ([source], to, len(conversion.errors))
    assert said["worst"]["relative_rms"] >= said["relative_rms"] > -1


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_converting_gives_what_quantising_writes(folders: dict[str, Path], format: str) -> None:
    written, converted = load(folders[format], None)[0], load(folders["bf16"], format)[0]
    names = [name for name, weight in written.items() if weight.format == format]
    assert names
    for name in names:
        for part in ("data", "scale", "scale2"):
            one, other = getattr(written[name], part), getattr(converted[name], part)
            assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (name, part)


def test_bf16_is_rounded_once(folders: dict[str, Path]) -> None:
    converted, conversion = load(folders["nvfp4"], "bf16", torch.bfloat16)
    for name, weight in load(folders["nvfp4"], None)[0].items():
        assert converted[name].data.dtype == torch.bfloat16
        assert torch.equal(converted[name].data, torch.from_numpy(exact(weight)).float().bfloat16())
    assert conversion is not None
    assert 1e-4 < conversion.relative_rms < 2**-8


@given(seed=st.integers(0, 999), spread=st.integers(0, 30), apart=st.booleans(), middle=st.integers(1, 252))
@settings(max_examples=40, deadline=None)
def test_mxfp4_keeps_its_codes_in_nvfp4(seed: int, spread: int, apart: bool, middle: int) -> None:
    """Whatever its scales, to within 2**17 of the largest block; below, no value is off by more than half a step."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (1, 6, 64)).astype(np.uint8)
    codes[0, 2, :32] = 0
    scale = np.clip(rng.integers(middle - spread, middle + 1, (1, 6, 2)), 0, 252).astype(np.uint8)
    scale[0, 2, 0] = 252
    source = ExpertWeight("mxfp4", pack_e2m1(torch.from_numpy(codes)), torch.from_numpy(scale))
    conversion = Conversion(("mxfp4",), "nvfp4")
    found = conversion.convert("w", source, "interleaved" if apart else "plain", torch.float32)
    assert found.scale2 is not None
    assert found.scale2.shape == ((1, 2) if apart else (1,))
    old, new = exact(source), exact(found)
    live = np.where((codes.reshape(1, 6, 2, 32) & 7).any(-1), scale.astype(int), -1)
    largest = np.stack([live[0, n % 2 :: 2] if apart else live[0] for n in range(6)]).reshape(6, -1).max(-1)
    near = ((largest[None, :, None] - live <= 17) & (largest >= 18)[None, :, None]).repeat(32, -1)
    assert np.array_equal(old[near], new[near])
    kept = unpack_e2m1(found.data).numpy()
    assert np.array_equal(kept[near], codes[near])
    step = 2.0 ** np.maximum(largest.astype(float) - 8 - 9, 1) * 2.0**-127
    assert (np.abs(new - old) <= step[None, :, None]).all()


def test_one_expert_is_read_at_a_time(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    original = ShardFile.read_rows

    def noted(self: ShardFile, tensor: Any, out: torch.Tensor, start: int = 0) -> None:
        read[tensor.name] = max(read.get(tensor.name, 0), len(out))
        original(self, tensor, out, start)

    monkeypatch.setattr(ShardFile, "read_rows", noted)
    for source in FORMATS:
        read.clear()
        load(folders[source], "mxfp4" if source != "mxfp4" else "nvfp4")
        rows = {name: count for name, count in read.items() if name.endswith((".w13_weight", ".w2_weight"))}
        converted = {name: count for name, count in rows.items() if source != "mxfp4" or "layers.1" not in name}
        assert converted
        assert all(count == (192 if "w13" in name else 64) for name, count in converted.items()), rows


# What is refused.


@pytest.mark.parametrize(
    ("to", "match"),
    [("fp8", "moe_format is 'fp8'; expected one of bf16, nvfp4, mxfp4"), ("", "moe_format is ''; expected")],
)
def test_unknown_formats(folders: dict[str, Path], to: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(folders["bf16"], moe_format=to)


def test_a_width_without_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path, depths=0, moe_intermediate_size=48)
    monkeypatch.setattr(ShardFile, "read_rows", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=r"block of 32 does not divide llm\.layers\.1\.mlp\.experts\.w2's width of 48"):
        LLM(tmp_path, moe_format="mxfp4")


def test_a_model_without_experts(tmp_path: Path) -> None:
    write_small(tmp_path, depths=0, dense_layer_ids=(0, 1, 2))
    with pytest.raises(ValueError, match="has no routed experts to hold in it"):
        LLM(tmp_path, moe_format="nvfp4")


def spoil(folder: Path, to: Path, name: str, change: Any) -> Path:
    """A copy of a checkpoint with one tensor changed in place."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    (found,) = [key for key in tensors if key.endswith(name)]
    tensors[found] = change(tensors[found].clone())
    save_file(tensors, to / "model.safetensors")
    return to


def with_nan_scale(scale: torch.Tensor) -> torch.Tensor:
    flat = scale.view(torch.uint8)
    flat.view(4, -1, flat.shape[-1])[3, 5, 1] = 0x7F if scale.dtype == torch.float8_e4m3fn else 0xFF
    return scale


@pytest.mark.parametrize(("source", "to"), [("nvfp4", "mxfp4"), ("mxfp4", "nvfp4"), ("nvfp4", None), ("mxfp4", None)])
def test_nan_scales_are_named(folders: dict[str, Path], tmp_path: Path, source: str, to: Format | None) -> None:
    suffix = "w13_weight.scale" if source == "nvfp4" else "w13_weight_scale"
    folder = spoil(folders[source], tmp_path / "nan", f"layers.2.mlp.experts.{suffix}", with_nan_scale)
    with pytest.raises(CheckpointError, match="NaN at expert 3, row 5, block 1"):
        load(folder, to)


def test_weights_that_are_not_finite_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    def with_inf(weight: torch.Tensor) -> torch.Tensor:
        weight[2, 7, 3] = float("inf")
        return weight

    folder = spoil(folders["bf16"], tmp_path / "inf", "layers.1.mlp.experts.w2_weight", with_inf)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.w2, expert 2: NaN or infinity in row 7"):
        load(folder, "nvfp4")


# Scales of the activations.


@pytest.mark.parametrize("shape", [(1,), (), (4,), (4, 1)])
def test_input_scales_are_kept(folders: dict[str, Path], tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As the checkpoint has them, one a tensor or one an expert, of which the largest holds for all."""
    amax = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 50 + 1
    folder = spoil(folders["nvfp4"], tmp_path / "amax", "layers.1.mlp.experts.w13_weight.input_amax", lambda _: amax)
    weights, _ = load(folder, None)
    calibrated = weights["llm.layers.1.mlp.experts.w13"].input_scale
    assert calibrated is not None
    torch.testing.assert_close(calibrated, (amax.max() / (6 * 448)).view(1))
    plain = weights["llm.layers.1.mlp.experts.w2"].input_scale
    assert plain is not None
    assert plain.tolist() == [1.0]


@pytest.mark.parametrize("value", [float("nan"), 0.0, float("inf"), -1.0])
def test_bad_input_scales(folders: dict[str, Path], tmp_path: Path, value: float) -> None:
    bad = torch.tensor([3.0, value])
    folder = spoil(folders["nvfp4"], tmp_path / "amax", "layers.2.mlp.experts.w2_weight.input_amax", lambda _: bad)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.w2_weight: input_amax: .* at 1, expected pos"):
        load(folder, None)


# People's ends of it.


def tokens(llm: LLM) -> list[int]:
    return (
        llm.generate({"prompt_token_ids": [5, 9, 33, 2]}, SamplingParams(max_tokens=6, temperature=0))[0]
        .outputs[0]
        .token_ids
    )


def test_a_model_in_another_format(folders: dict[str, Path]) -> None:
    kept = LLM(folders["mxfp4"], dtype="float32", max_model_len=32)
    llm = LLM(folders["mxfp4"], dtype="float32", max_model_len=32, moe_format="nvfp4")
    assert kept.conversion is None
    assert (kept.ops.facts.format, llm.ops.facts.format) == ("mxfp4", "nvfp4")
    assert {weights.w13.format for weights in llm.model.experts().values()} == {"bf16", "nvfp4"}
    # Nothing is lost on this way.
    assert tokens(llm) == tokens(kept)


def test_the_command_says_what_it_added(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    ids = ["--prompt-token-ids", "5,9,33", "--max-tokens", "2"]
    assert main(["generate", "--model", str(folders["nvfp4"]), *ids, "--json", "--moe-format", "mxfp4"]) == 0
    out, err = capsys.readouterr()
    assert "routed experts converted from nvfp4 to mxfp4: relative RMS error added " in err
    record = json.loads(out)["moe_conversion"]
    assert (record["from"], record["to"], record["tensors"]) == (["nvfp4"], "mxfp4", 4)
    assert 0.03 < record["relative_rms"] < 0.15
    assert main(["generate", "--model", str(folders["nvfp4"]), *ids, "--moe-format", "int4"]) == 2
    assert "moe_format is 'int4'" in capsys.readouterr().err
