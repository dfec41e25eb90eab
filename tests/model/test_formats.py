"""NVFP4 and MXFP4 copies against the model that holds the same values unpacked, here, from the files' bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tuned_model import tuned_config, tuned_tensors, write_tuned

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable import LLM, SamplingParams
from inkling_portable.cache import Batch
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.ops import Ops
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
COPIES = ("nvfp4", "nvfp4 apart", "mxfp4")
DTYPES = [torch.float32, torch.bfloat16]
Tensors = dict[str, torch.Tensor | ExpertWeight]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with three expert layers, and its 4-bit copies."""
    root = tmp_path_factory.mktemp("formats")
    config = tuned_config(1, num_hidden_layers=4, n_routed_experts=4, num_experts_per_tok=2)
    write_tuned(root / "source", config, tuned_tensors(config, noise=1.0, embed_norm=True))
    for copy in COPIES:
        format, _, apart = copy.partition(" ")
        quantize_checkpoint(root / "source", root / copy, format, separate_gate_up=bool(apart))  # type: ignore[arg-type]
    return {copy: root / copy for copy in ("source", *COPIES)}


def unpacked(codes: torch.Tensor) -> np.ndarray:
    """Bytes [..., K/2] -> values [..., K]: the low nibble is the even element."""
    raw = codes.numpy()
    out = np.empty((*raw.shape[:-1], raw.shape[-1] * 2))
    out[..., 0::2], out[..., 1::2] = E2M1[raw & 15], E2M1[raw >> 4]
    return out


def values_of(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """The float64 values of the expert weight `name`, whatever it is stored as."""
    codes = stored[name]
    if codes.dtype != torch.uint8:
        return codes.double().numpy()
    experts, rows, half = codes.shape
    if f"{name}_scale" in stored:
        exponent = stored[f"{name}_scale"].numpy().astype(np.float64).reshape(experts, rows, half // 16)
        return unpacked(codes) * (2.0 ** (exponent - 127)).repeat(32, -1)
    scale = stored[f"{name}.scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    second = stored[f"{name}.scale2"].double().numpy()
    if second.ndim == 2 and second.shape[1] == 2:
        second = second[:, np.arange(rows) % 2]
    return unpacked(codes) * scale.repeat(16, -1) * second.reshape(experts, -1, 1)


def load(folder: Path, dtype: torch.dtype) -> Tensors:
    with Checkpoint.open(folder) as checkpoint:
        return dict(load_tensors(checkpoint, dtype, sections=("text",)))


def dequantised(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
    """The tensors of a copy, its experts as plain weights with the values that the files hold, rounded to `dtype`."""
    stored = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for name, value in load(folder, dtype).items():
        if isinstance(value, ExpertWeight):
            exact = torch.from_numpy(values_of(stored, f"model.{name}_weight"))
            value = ExpertWeight("bf16", exact.to(dtype), layout=value.layout)
        yield name, value


def build(folder: Path, tensors: Any, dtype: torch.dtype) -> Inkling:
    with Checkpoint.open(folder) as checkpoint:
        format = max(checkpoint.formats.values(), key=lambda each: each != "bf16")
        facts = Facts(format=format, dtype=str(dtype).removeprefix("torch."))
        # One implementation for packed and plain weights, so that equal values give equal bits.
        ops = Ops.bind(Target.parse("cpu"), facts, {"moe_experts": "torch"})
        model = Inkling(checkpoint.config, ops, dtype=dtype)
    model.load(tensors)
    return model.requires_grad_(False)


@torch.inference_mode()
def logits(model: Inkling, count: int = 60) -> torch.Tensor:
    ids = torch.randint(0, 116, (count,), generator=torch.Generator().manual_seed(0))
    return model.logits(model(model.embedding(ids), Batch.uncached(1, count)))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_computes_what_its_values_say(folders: dict[str, Path], copy: str, dtype: torch.dtype) -> None:
    folder = folders[copy]
    tensors = load(folder, dtype)
    formats = [value.format for value in tensors.values() if isinstance(value, ExpertWeight)]
    expected = ["bf16"] * 2 + ["mxfp4"] * 4 if copy == "mxfp4" else ["nvfp4"] * 6
    assert formats == expected
    packed = logits(build(folder, tensors.items(), dtype))
    assert torch.equal(packed, logits(build(folder, dequantised(folder, dtype), dtype)))
    source = logits(build(folders["source"], load(folders["source"], dtype).items(), dtype))
    difference = (packed - source).abs().mean() / source.std()
    print(f"{copy} {dtype}: mean difference from the source {difference:.3f} of the logits' deviation")
    # Four bits are near enough to be the same model and far enough to show that they were used.
    assert 0.01 < difference < 0.5


@pytest.mark.parametrize("copy", COPIES)
def test_every_expert_unpacks_to_the_bytes_values(folders: dict[str, Path], copy: str) -> None:
    """Bit for bit in float32, expert by expert."""
    plain = dict(dequantised(folders[copy], torch.float32))
    for name, value in load(folders[copy], torch.float32).items():
        if isinstance(value, ExpertWeight):
            reference = plain[name]
            assert isinstance(reference, ExpertWeight)
            for expert in range(value.num_experts):
                assert torch.equal(value.dequant(expert, torch.float32), reference.data[expert]), f"{name} {expert}"


def gates_scale_for_up(w: ExpertWeight) -> tuple[Any, ...]:
    both = w.scale2 is not None and w.scale2.dim() == 2
    return w.data, w.scale, w.scale2[:, :1].expand(-1, 2).contiguous() if both else w.scale2


def rolled(w: ExpertWeight, dim: int) -> tuple[Any, ...]:
    return w.data, w.scale.view(torch.uint8).roll(1, dim).view(w.scale.dtype), w.scale2


BROKEN = {
    "nibbles swapped": (COPIES, lambda w: (w.data >> 4 | w.data << 4, w.scale, w.scale2)),
    "second scale dropped": (COPIES[:2], lambda w: (w.data, w.scale, torch.ones_like(w.scale2))),
    "gate's scale for up": (COPIES[1:2], gates_scale_for_up),
    "scales of the next block": (COPIES, lambda w: rolled(w, -1)),
    "scales of the next row": (COPIES, lambda w: rolled(w, 1)),
}


def test_broken_copies_are_caught(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    caught = []
    cases = [(copy, name) for name, (copies, _) in BROKEN.items() for copy in copies]
    for copy, name in cases:
        tensors = load(folders[copy], torch.float32)
        exact = logits(build(folders[copy], tensors.items(), torch.float32))
        for key, value in tensors.items():
            if isinstance(value, ExpertWeight) and value.format != "bf16":
                data, scale, scale2 = BROKEN[name][1](value)
                tensors[key] = ExpertWeight(value.format, data, scale, scale2, value.layout)
        broken = logits(build(folders[copy], tensors.items(), torch.float32))
        if (broken - exact).abs().max() > 2e-4:
            caught.append((copy, name))
    with capsys.disabled():
        print(f"\n{len(caught)} of {len(cases)} broken 4-bit copies caught")
    assert caught == cases


@pytest.mark.parametrize("copy", COPIES)
def test_the_engine_runs_every_format(folders: dict[str, Path], copy: str) -> None:
    """Cached, batched and in pieces: the tokens are those that the whole text's logits give."""
    llm = LLM(folders[copy], dtype="float32", max_model_len=100, max_num_batched_tokens=16, block_size=8)
    prompts = [list(range(3, 3 + n)) for n in (1, 9, 40)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=12, temperature=0))
    model = build(folders[copy], dequantised(folders[copy], torch.float32), torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor(prompt + output.outputs[0].token_ids)
        with torch.inference_mode():
            best = model.logits(model(model.embedding(ids), Batch.uncached(1, len(ids)))).argmax(-1)
        assert output.outputs[0].token_ids == best[len(prompt) - 1 : -1].tolist()
