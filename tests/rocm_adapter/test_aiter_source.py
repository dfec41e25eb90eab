"""AMD's package as it is on the index: what was recorded of it, and what the tests' stand-in for it takes it to mean.

The wheel is fetched and read; nothing of it is imported, since importing AITER needs an AMD GPU. Its layout functions
and its own torch references for the two products are plain torch: they are cut out of the sources, run alone, and
compared with the stand-in's.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from moe_oracle import random_packed

from inkling_kernels.numerics import ExpertWeight

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "data" / "aiter.json").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("aiter")
    name = f"{RECORDED['distribution']}=={RECORDED['version']}"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    ran = subprocess.run([*command, name], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{name} cannot be fetched: {ran.stderr}"
    file = folder / RECORDED["wheel"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == RECORDED["sha256"]
    return zipfile.ZipFile(file)


def functions(wheel: zipfile.ZipFile, file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(wheel.read(file).decode())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def cut_out(wheel: zipfile.ZipFile, file: str, *names: str, **known: Any) -> SimpleNamespace:
    """Some functions of a file, run with the names `known` alone."""
    found = functions(wheel, file)
    tree = ast.Module([found[name] for name in names], [])
    exec(compile(tree, file, "exec"), known)
    return SimpleNamespace(**{name: known[name] for name in names})


def test_what_was_recorded_is_what_the_package_has(wheel: zipfile.ZipFile) -> None:
    for place, recorded in RECORDED["functions"].items():
        file, _, name = place.partition(":")
        function = functions(wheel, file)[name]
        for argument in function.args.args:
            argument.annotation = None
        assert ast.unparse(function.args) == recorded, place
    text = ast.unparse(ast.parse(wheel.read("aiter/fused_moe.py").decode()))
    for name in ("ActivationType.Silu", "QuantType.per_1x32", "getattr(w1, 'is_shuffled', False)", "dtypes.fp4x2"):
        assert name in text + wheel.read("aiter/ops/moe_op.py").decode().replace('"', "'"), name
    dtypes = wheel.read("aiter/utility/dtypes.py").decode()
    assert 'getattr(torch, "float4_e2m1fn_x2"' in dtypes
    assert 'getattr(torch, "float8_e8m0fnu"' in dtypes


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "fake_aiter")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    yield importlib.import_module("aiter.fused_moe")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def test_the_layouts_are_the_packages(wheel: zipfile.ZipFile, stand_in: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = cut_out(wheel, "aiter/ops/shuffle.py", "shuffle_weight", torch=torch).shuffle_weight
    for shape in ((1, 16, 32), (3, 64, 128), (2, 256, 192)):
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        ours = stand_in.shuffle.shuffle_weight(codes)
        assert torch.equal(ours, theirs(codes))
        assert ours.is_shuffled is theirs(codes).is_shuffled is True
    theirs = cut_out(wheel, "aiter/utility/fp4_utils.py", "e8m0_shuffle", torch=torch).e8m0_shuffle
    for rows, columns in ((256, 8), (768, 16), (512, 96)):
        scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
        assert torch.equal(stand_in.fp4_utils.e8m0_shuffle(scale), theirs(scale))


def test_the_meaning_is_the_packages(
    wheel: zipfile.ZipFile, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate rows first, low nibble first, weights applied behind the second product: as in AITER's own references."""
    aiter = sys.modules["aiter"]
    fp4 = cut_out(
        wheel, "aiter/utility/fp4_utils.py", "mxfp4_to_f32", "e8m0_to_f32",
        torch=torch, dtypes=SimpleNamespace(fp32=torch.float32),
    )  # fmt: skip
    for name, function in vars(fp4).items():
        monkeypatch.setattr(stand_in.fp4_utils, name, function, raising=False)
    names = ("get_inter_dim", "swiglu", "torch_moe_stage1", "torch_moe_stage2")
    reference = cut_out(
        wheel, "aiter/fused_moe.py", *names,
        torch=torch, functools=functools, ActivationType=aiter.ActivationType, QuantType=aiter.QuantType,
        dtypes=SimpleNamespace(fp32=torch.float32, fp16=torch.float16), quant_remap={},
        aiter=SimpleNamespace(get_torch_act=lambda kind: {0: F.silu}[int(kind)]),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    w13 = random_packed(rng, "mxfp4", 3, 512, 256, "interleaved")[0]
    w2 = random_packed(rng, "mxfp4", 3, 256, 256, "plain")[0]
    ids = torch.from_numpy(rng.integers(0, 3, (6, 2)).astype(np.int32))
    gammas = torch.from_numpy(rng.uniform(0.1, 2, (6, 2)).astype(np.float32))
    # Activations that are codes with scale 1, so that the package's rounding of them changes nothing.
    codes = torch.from_numpy(rng.integers(0, 256, (6, 128)).astype(np.uint8))
    x, ones = fp4.mxfp4_to_f32(codes).bfloat16(), torch.full((6, 8), 127, dtype=torch.uint8)

    adapter = importlib.import_module("inkling_rocm.aiter_moe")
    found = adapter.moe_experts(x, adapter.prepare(w13), adapter.prepare(w2), ids, gammas)

    def apart(weight: ExpertWeight) -> tuple[torch.Tensor, torch.Tensor]:
        assert weight.scale is not None
        rows = torch.cat([torch.arange(0, 512, 2), torch.arange(1, 512, 2)])
        return weight.data[:, rows], weight.scale[:, rows]

    data13, scale13 = apart(w13)
    kind: Any = {"quant_type": aiter.QuantType.per_1x32, "dtype": torch.float32}
    inner = reference.torch_moe_stage1(
        codes, data13, w2.data, gammas, ids, activation=aiter.ActivationType.Silu, a1_scale=ones, w1_scale=scale13,
        **kind,
    )  # fmt: skip
    exact = reference.torch_moe_stage2(inner, data13, w2.data, gammas, ids, w2_scale=w2.scale, **kind)
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-4 * float(exact.abs().max()))
    sys.modules.pop("inkling_rocm.aiter_moe")
