"""Canonical tensors out of a stream of stored ones, against the reader of whole checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoint import write_small

from inkling_kernels.numerics import ExpertWeight
from inkling_portable.checkpoint import Checkpoint, CheckpointError
from inkling_portable.config import InklingConfig
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.tensor_table import stored_parts, tensor_table
from inkling_portable.weight_stream import assemble
from inkling_portable.weights import SECTIONS, load_tensors


def stream(folder: Path, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """The stored tensors of every file, in an order of chance."""
    found = [pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items()]
    random.Random(seed).shuffle(found)
    return found


def fields(value: torch.Tensor | ExpertWeight) -> list[object]:
    """What there is to compare: bytes of packed tensors, values of others in the reader's dtype."""
    if isinstance(value, torch.Tensor):
        return [value.bfloat16().tolist()]
    parts = [getattr(value, part) for part in ("data", "scale", "scale2", "input_scale")]
    packed = [None if part is None else part.view(torch.uint8).tolist() for part in parts]
    return [value.format, value.layout, value.data.bfloat16().tolist() if value.format == "bf16" else packed]


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_equal_to_the_reader(tmp_path: Path, format: str) -> None:
    folder = write_small(tmp_path / "bf16", towers=True)
    if format != "bf16":
        quantize_checkpoint(str(folder), tmp_path / format, format)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(tmp_path / format)
    expected = dict(load_tensors(checkpoint, progress=False))
    found = dict(assemble(checkpoint.config, stream(tmp_path / format), SECTIONS))
    assert found.keys() == expected.keys()
    assert [name for name in found if fields(found[name]) != fields(expected[name])] == []


def transformers_stream(config: InklingConfig, spelling: str) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """Every tensor of `config` as the Transformers spelling stores it, with the canonical one it is a part of."""
    generator = torch.Generator().manual_seed(1)
    for spec in tensor_table(config):
        whole = torch.randn(spec.shape, generator=generator)
        for part in stored_parts(spec, spelling):  # type: ignore[arg-type]
            if part.view == "halves":
                value = torch.cat([whole[..., 0::2, :], whole[..., 1::2, :]], -2)
            elif part.view in ("gate", "up"):
                value = whole[..., 0::2, :] if part.view == "gate" else whole[..., 1::2, :]
            else:
                value = whole
            yield part.name, value.reshape(part.shape), spec.name, whole


@pytest.mark.parametrize("spelling", ["transformers", "transformers_nested"])
def test_the_other_spellings(tmp_path: Path, spelling: str) -> None:
    config = Checkpoint.open(write_small(tmp_path / "model")).config
    parts = list(transformers_stream(config, spelling))
    random.Random(2).shuffle(parts)
    wanted = {canonical: whole for _, _, canonical, whole in parts}
    found = dict(assemble(config, ((name, value) for name, value, _, _ in parts), SECTIONS))
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        data = value.data if isinstance(value, ExpertWeight) else value
        assert torch.equal(data, wanted[name]), name


def test_sections_and_adapters_are_passed_over(tmp_path: Path) -> None:
    folder = write_small(tmp_path / "model", towers=True)
    pairs = [*stream(folder), ("model.llm.layers.0.attn.wo_ud.lora_A.weight", torch.zeros(1))]
    names = {name.split(".")[0] for name, _ in assemble(Checkpoint.open(folder).config, pairs, ("mtp",))}
    assert names == {"mtp"}


def test_what_is_missing_or_unknown_is_listed(tmp_path: Path) -> None:
    folder = write_small(tmp_path / "model")
    pairs = dict(stream(folder))
    pairs["model.llm.layers.0.attn.wq_du.renamed"] = pairs.pop("model.llm.layers.0.attn.wq_du.weight")
    with pytest.raises(CheckpointError, match="1 tensors are missing and 1 are unknown") as caught:
        list(assemble(Checkpoint.open(folder).config, pairs.items(), SECTIONS))
    assert caught.value.missing == ("llm.layers.0.attn.wq_du.weight",)
    assert caught.value.unexpected == ("model.llm.layers.0.attn.wq_du.renamed",)


def test_a_wrong_shape_and_a_nan_scale_are_named(tmp_path: Path) -> None:
    folder = write_small(tmp_path / "model")
    config = Checkpoint.open(folder).config
    name = "model.llm.layers.0.attn.wo_ud.weight"
    with pytest.raises(CheckpointError, match=rf"{name}: shape \[3\], expected \[64, 64\]"):
        list(assemble(config, [(name, torch.zeros(3))], SECTIONS))
    quantize_checkpoint(str(folder), tmp_path / "nvfp4", "nvfp4")
    pairs = dict(stream(tmp_path / "nvfp4"))
    packed = "model.llm.layers.1.mlp.experts.w13_weight"
    pairs[f"{packed}.scale"].view(torch.uint8)[2, 3, 1] = 0x7F
    with pytest.raises(CheckpointError, match=f"{packed}: scale: NaN at expert 2, row 3, block 1"):
        list(assemble(Checkpoint.open(tmp_path / "nvfp4").config, pairs.items(), SECTIONS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_quantised_module_is_named_and_not_taken_for_a_plain_one(tmp_path: Path, dtype: torch.dtype) -> None:
    """A dense projection, whatever its shape, and experts of a model whose configuration knows no format."""
    config = Checkpoint.open(write_small(tmp_path / "model")).config
    for name in ("model.llm.layers.0.attn.wo_ud.weight", "model.llm.layers.1.mlp.experts.w13_weight"):
        shape = dict(stream(tmp_path / "model"))[name].shape
        for stored in (shape, (*shape[:-1], shape[-1] // 2)):
            with pytest.raises(CheckpointError, match=rf"{name}: dtype {dtype_name(dtype)}; .* routed experts alone"):
                list(assemble(config, [(name, torch.zeros(stored).to(dtype))], SECTIONS))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
