"""GiB by part against counts made by hand and against a model that was loaded; what fits, and what would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoint import write_small

from inkling_kernels.target import TARGETS, Target
from inkling_portable import LLM
from inkling_portable import plan as plans
from inkling_portable.cli import main
from inkling_portable.config import preset
from inkling_portable.plan import GIB, MEMORY, SIZES, Plan, Wish
from inkling_portable.quantize import quantize_checkpoint

BIG, SMALL = preset("inkling"), preset("inkling-small")
# Bits that a value of the experts takes, block scales included.
BITS = {"bf16": 16.0, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32}


def counts(name: str) -> dict[str, int]:
    """Sizes by hand, as the model's description gives them."""
    return {
        "inkling": {"hidden": 6144, "layers": 66, "width": 3072, "heads": 64, "dense": 24576, "full": 11, "kv": 16},
        "inkling-small": {"hidden": 4096, "layers": 42, "width": 2048, "heads": 32, "full": 7, "kv": 8},
    }[name]


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("format", BITS)
@pytest.mark.parametrize("name", ["inkling", "inkling-small"])
def test_experts_are_what_they_are_by_hand(name: str, format: Any, size: int) -> None:
    n = counts(name)
    found = plans.plan(preset(name), Wish(size=size, format=format))
    layer = 256 * 3 * n["hidden"] * n["width"]
    layers = n["layers"] - 2
    bits = layer * layers * BITS[format]
    if format == "mxfp4":
        bits = layer * ((layers - 1) * BITS["mxfp4"] + 16)
    second = 2 * 256 * 4 * layers if format == "nvfp4" else 0
    assert found.parts["routed experts"] == bits / 8 / size + second


@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize("name", ["inkling", "inkling-small"])
def test_attention_and_caches_are_what_they_are_by_hand(name: str, size: int) -> None:
    n, length, count = counts(name), 32768, 4
    found = plans.plan(preset(name), Wish(size=size, max_model_len=length, max_num_seqs=count))
    sliding = n["layers"] - n["full"]
    # A head is on several ranks where there are more ranks than heads.
    full_heads, sliding_heads = max(8 / size, 1), max(n["kv"] / size, 1)
    assert found.parts["cache of full layers"] == n["full"] * 2 * full_heads * 128 * 2 * length * count
    pages = -(-(512 + 8192) // 64) + 1
    assert found.parts["cache of sliding layers"] == sliding * 2 * sliding_heads * 128 * 2 * 64 * 2 * pages * count
    rows = 3 * 2 * count
    rings = sum(
        k * (2 * heads * 128 + 2 * n["hidden"]) for k, heads in ((n["full"], full_heads), (sliding, sliding_heads))
    )
    assert found.parts["rings of convolutions"] == rows * rings
    q, r = n["heads"] * 128 / size, n["heads"] * 16 / size
    matrices = sum(
        k * n["hidden"] * (2 * q + r + 2 * heads * 128) * 2
        for k, heads in ((n["full"], full_heads), (sliding, sliding_heads))
    )
    # Norms, convolutions and relative projections are the small rest.
    assert matrices < found.parts["attention and norms"] < 1.02 * matrices + 1e8


def test_fp8_halves_the_cache_and_drafts_add_to_it() -> None:
    whole = plans.plan(BIG, Wish(size=8))
    half = plans.plan(BIG, Wish(size=8, kv_itemsize=1))
    for kind in ("full", "sliding"):
        assert 2 * half.parts[f"cache of {kind} layers"] == whole.parts[f"cache of {kind} layers"]
    drafting = plans.plan(BIG, Wish(size=8, drafts=8))
    assert "prediction depths" not in whole.parts
    assert drafting.parts["prediction depths"] > 8 * 3 * 6144 * 24576 * 2 / 8
    assert drafting.parts["cache of full layers"] > whole.parts["cache of full layers"]


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_a_loaded_model_is_as_large_as_planned(tmp_path: Path, format: str) -> None:
    write_small(tmp_path / "bf16", towers=True)
    if format != "bf16":
        quantize_checkpoint(tmp_path / "bf16", tmp_path / format, format)  # type: ignore[arg-type]
    llm = LLM(tmp_path / format, num_speculative_tokens=2, max_model_len=64)
    held = [tensor for module in (llm.model, llm.mtp, llm.towers) if module for tensor in module.parameters()]
    held += list(llm.model.buffers())
    config = plans.model_config(str(tmp_path / format))
    found = plans.plan(config, Wish(max_model_len=64, drafts=2))
    weights = sum(
        size
        for part, size in found.parts.items()
        if "cache" not in part and part not in ("reserve", "rings of convolutions")
    )
    # Rows of the padded vocabulary are not kept by this engine, and NVFP4's input scales are 4 bytes a tensor.
    padding = 2 * 64 * (config.vocab_size - config.unpadded_vocab_size)
    scales = 4 * 4 if format == "nvfp4" else 0
    assert sum(tensor.nbytes for tensor in held) == weights - padding + scales
    assert found.wish.format is None


def test_where_it_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="64, which 3 ranks cannot share evenly"):
        plans.plan(BIG, Wish(size=3))
    assert "cannot share" in str(plans.attempt(BIG, Wish(size=3), None))
    for change, match in (
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 2 << 20}, "the model has 1048576 at most"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"drafts": 9}, "drafts are 9; expected 0 to 8"),
    ):
        with pytest.raises(ValueError, match=match):
            plans.plan(BIG, replace(Wish(), **change))


@pytest.mark.parametrize("gib", [80, 141, 192, 288])
@pytest.mark.parametrize("config", [BIG, SMALL], ids=["inkling", "small"])
def test_what_is_offered_instead_fits(config: Any, gib: int) -> None:
    wish = Wish(size=1, format="bf16", max_model_len=131072)
    found = plans.plan(config, wish, gib * GIB)
    others = list(plans.alternatives(config, wish, gib * GIB))
    assert not found.fits
    assert others
    for other in others:
        assert other.fits
        changed = {name for name in vars(wish) if getattr(wish, name) != getattr(other.wish, name)}
        assert len(changed) == 1
    (more,) = [each for each in others if each.wish.size > 1]
    # The next smaller number of devices does not do.
    smaller = plans.attempt(config, replace(wish, size=more.wish.size // 2), gib * GIB)
    assert isinstance(smaller, Plan)
    assert not smaller.fits


def test_the_longest_context_is_the_last_that_fits() -> None:
    for target, lengths in list(plans.survey(SMALL, Wish(format="nvfp4")))[:4]:
        memory = plans.memory_of(target)
        assert set(lengths) == set(SIZES)
        for size, length in lengths.items():
            wish = Wish(format="nvfp4", size=size)
            if length > 0:
                assert plans.plan(SMALL, replace(wish, max_model_len=length), memory).fits
            if 0 <= length < SMALL.max_position_embeddings:
                assert not plans.plan(SMALL, replace(wish, max_model_len=length + 1024), memory).fits


def test_a_device_that_is_too_small_is_refused_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Wish(1, "nvfp4", 65536, 8, chunk=512)
    with pytest.raises(
        ValueError, match=r"needs 1\d\d\.\d\d GiB and the device has 120.00 free: .*routed experts 1"
    ) as told:
        plans.require(SMALL, wish, 120 * GIB, 4 * GIB)
    assert "caches 4.00" in str(told.value)
    assert "2 devices, nvfp4 experts" in str(told.value)
    found = plans.plan(SMALL, wish)
    caches = sum(size for name, size in found.parts.items() if name.startswith("cache"))
    plans.require(SMALL, wish, found.needed - caches + 4 * GIB, 4 * GIB)
    with pytest.raises(ValueError, match="free: "):
        plans.require(SMALL, wish, found.needed - caches + 4 * GIB - 1, 4 * GIB)

    write_small(tmp_path, depths=0, head_dim=32, swa_head_dim=32)
    monkeypatch.setattr("inkling_portable.llm.load_tensors", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr("inkling_portable.llm.usable_target", lambda _: Target.parse("sm90"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    with pytest.raises(ValueError, match=r"the model needs 2\.\d\d GiB and the device has 1\.00 free"):
        LLM(tmp_path, max_model_len=64)


def test_every_gpu_has_a_memory() -> None:
    assert set(MEMORY) == {target.arch for target in TARGETS if target.is_gpu}
    with pytest.raises(ValueError, match="the memory of cpu is not known"):
        plans.memory_of(Target.parse("cpu"))


def test_what_no_implementation_takes_is_told() -> None:
    # Half of an MXFP4 block on every rank.
    assert "cannot share" in str(plans.attempt(SMALL, Wish(size=48, format="nvfp4"), None))
    target = Target.parse("gfx950")
    assert plans.unsupported(BIG, Wish(size=8, format="mxfp4"), target) is None
    narrow = BIG.replace(head_dim=96, swa_head_dim=96)
    assert plans.unsupported(narrow, Wish(format="mxfp4"), target) == "no implementation of rel_attention"


# The command.


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["plan", *map(str, args)])
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--format", "mxfp4", "--target", "gfx950", "--tensor-parallel-size", 4)
    assert code == 0
    assert "4 devices, mxfp4 experts, 8 sequences of 32768 tokens: fits hip:gfx950 (AMD Instinct MI355X)." in out
    code, out, _ = run(capsys, "--format", "bf16", "--target", "gfx942")
    assert code == 1
    assert "does not fit hip:gfx942" in out
    assert "This would fit: " in out
    code, out, _ = run(capsys, "--memory", 1)
    assert "Nothing near it fits" in out
    code, out, _ = run(
        capsys, "--target", "gfx950", "--memory", "300", "--format", "nvfp4", "--json", "--speculative", 2
    )
    record = json.loads(out)
    assert (code, record["fits"], record["target"], record["unsupported"]) == (1, False, "hip:gfx950", None)
    assert record["memory"] == 300 * GIB
    assert record["needed"] == sum(record["parts"].values())
    assert {each["fits"] for each in record["alternatives"]} == {True}


def test_the_survey(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "inkling-small", "--format", "mxfp4")
    assert code == 0
    assert "hip:gfx950 288" in out
    code, out, _ = run(capsys, "--model", "inkling-small", "--format", "mxfp4", "--json")
    assert json.loads(out)["hip:gfx1201"]["1"] == 0


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--format", "int4"], "--format is 'int4'; expected one of bf16, nvfp4, mxfp4"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype is 'fp4'"),
        (["--memory", "-1"], "--memory is -1"),
        (["--target", "cpu"], "the memory of cpu is not known"),
        (["--target", "gfx950", "--tensor-parallel-size", "3"], "64, which 3 ranks cannot share evenly"),
        (["--model", "/nowhere", "--target", "sm90"], "/nowhere"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], args: list[str], match: str) -> None:
    code, _, err = run(capsys, *args)
    assert code == 2
    assert match in err


def test_planning_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path, depths=0)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "empty", lambda *a, _empty=torch.empty, **k: _empty(*a, **{**k, "device": "meta"}))
    assert plans.plan(plans.model_config(str(tmp_path)), Wish(max_model_len=64)).needed > plans.RUNTIME
