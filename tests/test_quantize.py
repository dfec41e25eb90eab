"""Writing checkpoints and quantising them: round trips, layouts, refusals, and what is left behind when it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import InklingForCausalLM, InklingForConditionalGeneration, InklingTextConfig

from inkling_kernels.numerics import ExpertWeight
from inkling_portable import checkpoint_writer
from inkling_portable.checkpoint import Checkpoint, CheckpointError
from inkling_portable.checkpoint_writer import CheckpointWriteError, write_checkpoint
from inkling_portable.cli import main
from inkling_portable.config import InklingConfig, QuantizationConfig
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS, HIDDEN, WIDTH = 4, 64, 32
FORMATS = ("nvfp4", "mxfp4")


def text_config(**changes: Any) -> InklingTextConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 96, "unpadded_vocab_size": 90, "hidden_size": HIDDEN, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_head_dim": 16, "sliding_window_size": 8, "rel_extent": 16, "local_layer_ids": [0, 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "intermediate_size": 80, "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 2,
    }  # fmt: skip
    return InklingTextConfig(**sizes | changes)


def save_source(folder: Path, **changes: Any) -> InklingForCausalLM:
    torch.manual_seed(7)
    model = InklingForCausalLM(text_config(**changes)).bfloat16()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_source(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def canonical(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor | ExpertWeight]:
    with Checkpoint.open(folder) as checkpoint:
        return dict(load_tensors(checkpoint, dtype))


def same(left: torch.Tensor | ExpertWeight, right: torch.Tensor | ExpertWeight) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("data", "scale", "scale2")]
    equal = all(a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return equal and (left.format, left.layout) == (right.format, right.layout)


def tokens() -> torch.Tensor:
    return torch.randint(0, 90, (1, 30), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("spelling", ["original", "transformers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_reads_back_equal(source: Path, tmp_path: Path, dtype: torch.dtype, spelling: Any) -> None:
    before = canonical(source, torch.float32)
    config = InklingConfig.from_pretrained(source)
    raw = json.loads((source / "config.json").read_text()) if spelling == "transformers" else None
    out = tmp_path / "deep" / "out"
    backwards = reversed(before.items())
    write_checkpoint(out, config, backwards, dtype=dtype, spelling=spelling, config_dict=raw, max_shard_bytes=60_000)
    after = canonical(out, torch.float32)
    assert list(before) == list(after)
    assert all(same(before[name], after[name]) for name in before)
    assert InklingConfig.from_pretrained(out) == config

    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(out).values())
    for file in files:
        with safe_open(file, "pt") as shard:
            names = list(shard.keys())
            assert all(index["weight_map"][name] == file.name for name in names)
            assert len(names) == 1 or sum(t.nbytes for t in load_file(file).values()) <= 60_000
    kept = {name for name, t in tensors_of(out).items() if t.dtype == torch.float32}
    if dtype == torch.bfloat16:
        assert all("sconv" in name or "global_scale" in name or name.endswith("bias") for name in kept)
        assert len(kept) == 3 * 4 + 1 + 2 * 2


@pytest.mark.parametrize("spelling", ["original", "transformers"])
def test_transformers_reads_what_is_written(source: Path, tmp_path: Path, spelling: Any) -> None:
    config = InklingConfig.from_pretrained(source)
    oracle = InklingForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    raw = json.loads((source / "config.json").read_text())
    if spelling == "original":
        towers = {"vision_config": {"patch_size": 4, "num_hidden_layers": 2}, "audio_config": {"mel_vocab_size": 4}}
        raw = {"model_type": "inkling_mm_model", "text_config": raw, **towers}
    tensors = canonical(source, torch.float32).items()
    write_checkpoint(tmp_path / "out", config, tensors, dtype=torch.float32, spelling=spelling, config_dict=raw)
    kind = InklingForConditionalGeneration if spelling == "original" else InklingForCausalLM
    model = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(model(tokens()).logits, oracle(tokens()).logits)


def unpacked(tensors: dict[str, torch.Tensor], key: str, format: str) -> np.ndarray:
    """[E, N, K] float64 from the stored tensors by the formulas of the formats."""
    codes = tensors[key].numpy()
    value = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(*codes.shape[:2], -1)
    if format == "mxfp4":
        scale = tensors[f"{key}_scale"].numpy()
        assert scale.shape == (codes.shape[0] * codes.shape[1], value.shape[-1] // 32)
        decoded = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).reshape(*codes.shape[:2], -1)
        return value * np.repeat(decoded, 32, axis=-1)
    decoded = tensors[f"{key}.scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    second = tensors[f"{key}.scale2"].numpy().reshape(len(codes), -1)
    rows = np.stack([second[:, row % second.shape[1]] for row in range(codes.shape[1])], axis=1)
    return value * np.repeat(decoded, 16, axis=-1) * rows[:, :, None]


@pytest.mark.parametrize(("format", "apart"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
def test_quantised_experts(source: Path, tmp_path: Path, format: Any, apart: bool) -> None:
    quantize_checkpoint(source, tmp_path / "out", format, separate_gate_up=apart)
    before, after, stored = canonical(source), canonical(tmp_path / "out"), tensors_of(tmp_path / "out")
    for name, tensor in before.items():
        kept = after[name]
        if "mlp.experts" not in name or (format == "mxfp4" and ".layers.1." in name):
            assert same(tensor, kept), name
            continue
        assert kept.format == format
        assert kept.layout == tensor.layout
        key = f"model.{name}_weight"
        want = unpacked(stored, key, format)
        for expert in range(EXPERTS):
            exact = tensor.dequant(expert).double().numpy()
            have = kept.dequant(expert).numpy()
            assert (have == want[expert].astype(np.float32)).all()
            error = np.linalg.norm(have - exact) / np.linalg.norm(exact)
            assert 0.02 < error < (0.11 if format == "nvfp4" else 0.15), (name, expert, error)
        if format == "nvfp4":
            shape = (EXPERTS, 2) if apart and name.endswith("w13") else (EXPERTS,)
            assert tuple(stored[f"{key}.scale2"].shape) == shape
            assert stored[f"{key}.scale2"].dtype == torch.float32
            assert stored[f"{key}.scale"].dtype == torch.float8_e4m3fn
            assert stored[f"{key}.original_shape"].tolist() == list(want.shape)
            assert float(stored[f"{key}.input_amax"].max()) / (448 * 6) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_the_quantised_checkpoint_as_a_whole(source: Path, tmp_path: Path, format: Any) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, format, max_shard_bytes=60_000)
    names = {file.name for file in out.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json"} <= names
    assert "adapter_model.safetensors" not in names
    assert not [name for name in names if "partial" in name]
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    first = {f"model.llm.layers.1.mlp.experts.{name}_weight" for name in ("w13", "w2")}
    if format == "nvfp4":
        assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "NVFP4")
        assert not first & set(quantization["ignore"])
    else:
        assert quantization["quant_method"] == "quark"
        assert first <= set(quantization["exclude"])
    listed = quantization["ignore" if format == "nvfp4" else "exclude"]
    assert {"model.llm.unembed", "model.llm.layers.0.mlp.w13_dn", "model.llm.layers.2.mlp.shared_experts"} <= set(
        listed
    )
    assert {"model.llm.layers.2.mlp.gate", "model.llm.layers.1.attn.wq_du"} <= set(listed)
    stored = tensors_of(out)
    assert stored["model.llm.layers.1.mlp.gate.bias"].dtype == torch.float32
    assert stored["model.llm.layers.1.mlp.shared_experts.shared_w13_weight"].dtype == torch.bfloat16
    config = InklingConfig.from_pretrained(out)
    assert config.quantization is not None
    assert config.quantization.format == format
    assert config.replace(quantization=None) == InklingConfig.from_pretrained(source)


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_checkpoint_is_written_from_packed_tensors(source: Path, tmp_path: Path, format: Any) -> None:
    """With scales given as `float8_e4m3fn` and as the bytes of it."""
    quantize_checkpoint(source, tmp_path / "first", format, separate_gate_up=format == "nvfp4")
    config, tensors = InklingConfig.from_pretrained(tmp_path / "first"), canonical(tmp_path / "first")
    for number, scale_dtype in enumerate((None, torch.uint8)):
        given = {
            name: ExpertWeight(w.format, w.data, w.scale.view(scale_dtype), w.scale2, w.layout)
            if isinstance(w, ExpertWeight) and w.scale is not None and scale_dtype
            else w
            for name, w in tensors.items()
        }
        out = tmp_path / f"again{number}"
        write_checkpoint(out, config, given.items(), separate_gate_up=format == "nvfp4")
        again = canonical(out)
        assert all(same(tensors[name], again[name]) for name in tensors)
    if format == "nvfp4":
        with pytest.raises(ValueError, match="gate and up apart"):
            write_checkpoint(tmp_path / "together", config, tensors.items())
        assert not (tmp_path / "together").exists()


def test_writing_refuses_tensors_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    config, tensors = InklingConfig.from_pretrained(source), canonical(source)
    w13, embed = "llm.layers.1.mlp.experts.w13", "llm.embed.weight"
    plain = ExpertWeight("bf16", tensors[w13].data, layout="plain")
    packed = config.replace(quantization=QuantizationConfig(format="mxfp4"))
    cases: list[tuple[InklingConfig, dict[str, Any], str]] = [
        (config, {embed: torch.zeros(95, HIDDEN)}, r"shape \[95, 64\], expected \[96, 64\]"),
        (config, {w13: plain}, "layout is 'plain'"),
        (config, {"llm.other": torch.zeros(1)}, "llm.other is no tensor"),
        (packed, {}, "bf16, expected an ExpertWeight of format mxfp4"),
    ]
    for used, change, message in cases:
        with pytest.raises(ValueError, match=message):
            write_checkpoint(tmp_path / "out", used, (tensors | change).items())
        assert not (tmp_path / "out").exists()
    few = [item for item in tensors.items() if item[0] != embed]
    with pytest.raises(CheckpointWriteError, match=r"1 of \d+ tensors are incomplete.*llm\.embed\.weight: 0 of"):
        write_checkpoint(tmp_path / "out", config, few)
    with pytest.raises(ValueError, match="given twice"):
        write_checkpoint(tmp_path / "out", config, [*tensors.items(), (embed, tensors[embed])])
    with pytest.raises(ValueError, match=r"dtype: torch\.float16"):
        write_checkpoint(tmp_path / "out", config, tensors.items(), dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def nan_in_expert(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.gate_up_proj"][3, 5, 1] = torch.nan
    save_file(tensors, folder / "model.safetensors")


REFUSALS: dict[str, tuple[Callable[[Path], Any], Any, str]] = {
    "width": (lambda folder: save_source(folder, moe_intermediate_size=48), "mxfp4", "w2 has width 48, no multiple of"),
    "one expert layer": (
        lambda folder: save_source(folder, mlp_layer_types=["dense", "dense", "sparse"]), "mxfp4", "one expert layer"),
    "no expert layer": (
        lambda folder: save_source(folder, mlp_layer_types=["dense"] * 3), "nvfp4", "no expert layers"),
    # Row 5 of the gate half is row 10 of the interleaved weight.
    "NaN": (nan_in_expert, "nvfp4", r"2\.mlp\.experts\.w13_weight: weight: NaN or infinity at expert 3, row 10"),
    "format": (lambda folder: None, "int4", "format: 'int4', expected nvfp4 or mxfp4"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_sources_that_cannot_be_quantised(source: Path, tmp_path: Path, case: str) -> None:
    change, format, message = REFUSALS[case]
    folder = Path(shutil.copytree(source, tmp_path / "in"))
    change(folder)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_destinations_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is the source itself"):
        quantize_checkpoint(source, source / ".." / source.name, "nvfp4")
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, used, "nvfp4")
    assert (used / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is a file"):
        quantize_checkpoint(source, used / "notes.txt", "nvfp4")
    with pytest.raises(CheckpointWriteError, match="Not a directory"):
        quantize_checkpoint(source, used / "notes.txt" / "out", "nvfp4")
    quantize_checkpoint(source, tmp_path / "fp4", "nvfp4")
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "fp4", tmp_path / "again", "mxfp4")


def test_an_empty_destination_is_used_and_left_when_it_fails(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.os, "pwrite", no_space_after(5))
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            quantize_checkpoint(source, out, "nvfp4")
    assert list(out.iterdir()) == []
    quantize_checkpoint(source, out, "nvfp4")
    canonical(out)


def no_space_after(writes: int) -> Callable[..., int]:
    real, count = os.pwrite, iter(range(10**9))

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if next(count) >= writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: max(1, len(data) // 2)], offset)

    return pwrite


@pytest.mark.parametrize("writes", [0, 1, 7, 60])
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, writes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint_writer.os, "pwrite", no_space_after(writes))
    with pytest.raises(CheckpointWriteError, match=r"out: No space left on device"):
        quantize_checkpoint(source, tmp_path / "a" / "out", "nvfp4", max_shard_bytes=60_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["fsync", "rename", "interrupt"])
def test_failures_at_the_end_leave_nothing(source: Path, tmp_path: Path, where: str, monkeypatch: Any) -> None:
    real, count = Path.rename, iter(range(100))

    def fails(*args: Any) -> Any:
        if where == "interrupt":
            raise KeyboardInterrupt
        if where == "rename" and next(count) < 2:
            return real(*args)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    place = (Path, "rename") if where == "rename" else (checkpoint_writer.os, "fsync")
    monkeypatch.setattr(*place, fails)
    with pytest.raises(KeyboardInterrupt if where == "interrupt" else CheckpointWriteError):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", max_shard_bytes=60_000)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_told_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointWriteError, match=r"out needs 0\.2 MiB but its disk has 0\.0 MiB free"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4")
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys
from inkling_portable.checkpoint_writer import CheckpointWriteError
from inkling_portable.quantize import quantize_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    quantize_checkpoint(sys.argv[1], sys.argv[2], "nvfp4")
except CheckpointWriteError as error:
    sys.exit(str(error))
"""


def test_a_limit_of_the_system_leaves_nothing(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cannot write the checkpoint {tmp_path / 'out'}: File too large; nothing was left there\n"
    assert list(tmp_path.iterdir()) == []


def test_the_command(source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out, no = tmp_path / "out", tmp_path / "no"
    options = ["--format", "nvfp4", "--separate-gate-up", "--max-shard-gib", "0.0001"]
    assert main(["quantize", str(source), str(out), *options]) == 0
    assert "routed experts in nvfp4" in capsys.readouterr().out
    assert canonical(out)["llm.layers.1.mlp.experts.w13"].scale2.shape == (EXPERTS, 2)
    for place, words, message in (
        (source, ["--format", "fp8"], "--format is 'fp8'; expected nvfp4 or mxfp4"),
        (source, ["--format", "mxfp4", "--separate-gate-up"], "belongs to nvfp4"),
        (source, ["--format", "mxfp4", "--max-shard-gib", "0"], "--max-shard-gib is 0"),
        (tmp_path / "absent", ["--format", "nvfp4"], "absent does not exist"),
        (out, ["--format", "nvfp4"], "is quantised already"),
    ):
        assert main(["quantize", str(place), str(no), *words]) == 2
        assert message in (error := capsys.readouterr().err)
        assert error.count("\n") == 1
    monkeypatch.setattr(checkpoint_writer.os, "pwrite", no_space_after(3))
    assert main(["quantize", str(source), str(no), "--format", "nvfp4"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not no.exists()
