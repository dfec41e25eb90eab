"""The account of the experts: its expectations against simulated routings, its bytes against real weights, and the
results on file against the plans of today."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from inkling_kernels.moe_gemm import weight_on_meta
from inkling_kernels.target import Target

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def account() -> ModuleType:
    spec = importlib.util.spec_from_file_location("experts_account", ROOT / "benchmarks" / "experts_account.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("tokens", "block_m"), [(1, 16), (8, 16), (64, 16), (512, 16), (512, 64)])
def test_expectations_are_those_of_random_routings(account: ModuleType, tokens: int, block_m: int) -> None:
    shape = account.Shape(64, 6, 64, 64)
    rng = np.random.default_rng(tokens)
    used, tiles = [], []
    for _ in range(300):
        ids = rng.random((tokens, 64)).argpartition(6, 1)[:, :6]
        counts = np.bincount(ids.flatten(), minlength=64)
        used.append((counts > 0).sum())
        tiles.append((-(-counts // block_m)).sum())
    found = account.expected(shape, tokens, block_m)
    np.testing.assert_allclose(found, [np.mean(used), np.mean(tiles)], rtol=0.02)


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_bytes_are_those_of_the_weights(account: ModuleType, format: str) -> None:
    shape = account.Shape(4, 2, 64, 96)
    weights = weight_on_meta(format, 4, 192, 64, "interleaved"), weight_on_meta(format, 4, 64, 96, "plain")
    stored = sum(t.nbytes for w in weights for t in (w.data, w.scale) if isinstance(t, torch.Tensor))
    assert shape.bytes(format) * 4 == stored


def test_ways_differ_as_they_must(account: ModuleType) -> None:
    shape = account.Shape(256, 6, 6144, 768)
    counts = json.loads(account.COUNTS.read_text(encoding="utf-8"))["counts"]["3.9.0"]
    hopper = account.costs(shape, 8, "nvfp4", Target.parse("sm90"), counts)
    assert set(hopper) == {"ours", "dequant", "vllm"}
    assert hopper["dequant"].weight_bytes > 7 * hopper["ours"].weight_bytes
    assert hopper["vllm"].instructions > 3.5 * hopper["ours"].instructions
    assert hopper["ours"].padding > 0.9
    blackwell = account.costs(shape, 8192, "nvfp4", Target.parse("sm100"), counts)
    assert set(blackwell) == {"ours", "dequant", "native"}
    assert blackwell["native"].seconds(Target.parse("sm100")) < blackwell["ours"].seconds(Target.parse("sm100"))
    assert set(account.costs(shape, 8, "nvfp4", Target.parse("gfx950"), counts)) == {"ours", "dequant", "vllm"}
    assert set(account.costs(shape, 8, "bf16", Target.parse("gfx942"), counts)) == {"ours"}


def test_the_results_on_file_are_of_these_plans(account: ModuleType) -> None:
    """Instructions may be of another compilation; bytes, padding and roofline times follow from the plans."""
    stored = json.loads((ROOT / "benchmarks" / "results" / "experts_account.json").read_text(encoding="utf-8"))
    assert stored["computed"]
    assert stored["device"] == "none"
    assert without_instructions(account.account()) == without_instructions(stored["rows"])


def without_instructions(rows: list[dict]) -> list[dict]:
    kept = json.loads(json.dumps(rows))
    for row in kept:
        for ways in row["chips"].values():
            for cost in ways.values():
                del cost["instructions"]
    return kept
