"""The adapter to AITER against float64 experts, on a stand-in that reads AITER's layouts, and its row of the table.

The stand-in (`tests/fake_aiter`) is held to the signatures recorded from AMD's package, in `tests/data/aiter.json`;
`test_aiter_source.py` holds both to the package itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import oracle, random_packed, stored, values
from small_checkpoint import write_small

from inkling_kernels.moe_check import SelfCheckFailed, self_check
from inkling_kernels.moe_gemm import moe_experts, moe_experts_ref
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.cache import Batch
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.dispatch import ROWS, UnsupportedOnTarget, explain, resolve
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.ops import BrokenImplementation, Ops, experts_op
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors
from inkling_rocm import aiter_support

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fake_aiter"
RECORDED = json.loads((ROOT / "tests" / "data" / "aiter.json").read_text())
MI355X = Target.parse("gfx950")
MXFP4 = Facts(format="mxfp4")


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter" or name == "inkling_rocm.aiter_moe"]:
        del sys.modules[name]


def install(folder: Path, version: str, name: str = "amd_aiter") -> None:
    """The record that pip leaves of an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """AITER at the version recorded, as far as anyone can tell."""
    install(tmp_path / "site", RECORDED["version"])
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(FAKE)
    forget()
    yield tmp_path / "site"
    forget()


@pytest.fixture
def adapter(installed: Path) -> ModuleType:
    return importlib.import_module("inkling_rocm.aiter_moe")


def case(seed: int, experts: int = 3, hidden: int = 256, width: int = 256, tokens: int = 5, top_k: int = 2) -> Any:
    """Activations, weights, their float64 values, ids and gammas."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, hidden)).astype(np.float32)).bfloat16()
    w13, exact13 = random_packed(rng, "mxfp4", experts, 2 * width, hidden, "interleaved")
    w2, exact2 = random_packed(rng, "mxfp4", experts, hidden, width, "plain")
    ids = rng.integers(-1, experts, (tokens, top_k)).astype(np.int32)
    gammas = rng.uniform(0.1, 2, (tokens, top_k)).astype(np.float32)
    return x, (w13, exact13), (w2, exact2), ids, gammas


def run(adapter: ModuleType, x: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, ids: Any, gammas: Any) -> np.ndarray:
    ready = (adapter.prepare(w13), adapter.prepare(w2))
    found = adapter.moe_experts(x, *ready, torch.from_numpy(ids), torch.from_numpy(gammas))
    assert found.dtype == torch.bfloat16
    return found.double().numpy()


def off(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


# What it computes.


@pytest.mark.parametrize(
    ("experts", "hidden", "width", "tokens", "top_k"),
    [(1, 256, 256, 1, 1), (3, 256, 512, 7, 2), (5, 512, 256, 3, 6), (2, 768, 256, 4, 1)],
)
def test_the_experts_are_those_of_the_weights(
    adapter: ModuleType, experts: int, hidden: int, width: int, tokens: int, top_k: int
) -> None:
    x, (w13, exact13), (w2, exact2), ids, gammas = case(1, experts, hidden, width, tokens, top_k)
    exact = oracle(x.double().numpy(), exact13, exact2, ids, gammas)
    np.testing.assert_allclose(run(adapter, x, w13, w2, ids, gammas), exact, rtol=2**-8, atol=1e-6)


@given(seed=st.integers(0, 99), kind=st.sampled_from(["any", "one", "none", "foreign"]), tokens=st.integers(0, 4))
@settings(max_examples=12, deadline=None)
def test_every_routing(seed: int, kind: str, tokens: int) -> None:
    """Ids of no expert add nothing, whatever they are: AITER is given valid ones only (the stand-in asserts it)."""
    adapter = importlib.import_module("inkling_rocm.aiter_moe")
    x, (w13, exact13), (w2, exact2), ids, gammas = case(seed, tokens=tokens)
    choose = {"one": lambda i: np.ones_like(i), "none": lambda i: np.full_like(i, -1), "foreign": lambda i: i * 9 - 1}
    ids = choose.get(kind, lambda i: i)(ids)
    within = np.where((ids >= 0) & (ids < 3), ids, -1)
    exact = oracle(x.double().numpy(), exact13, exact2, within, gammas)
    np.testing.assert_allclose(run(adapter, x, w13, w2, ids, gammas), exact, rtol=2**-8, atol=1e-6)


@pytest.fixture(autouse=True)
def every_test_finds_it(request: pytest.FixtureRequest) -> None:
    """hypothesis takes no fixture of one test for many examples."""
    if request.node.name == "test_every_routing":
        request.getfixturevalue("installed")


def test_extreme_scales_and_a_slice_of_a_wider_weight(adapter: ModuleType) -> None:
    """E8M0 0 is 2**-127 and not zero; what lies around a slice, NaN, is not read."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (2, 256, 256)).astype(np.uint8)
    scale = rng.integers(120, 130, (2, 256, 8)).astype(np.uint8)
    scale[0, 3], scale[1, 7, 2] = 0, 1
    w2 = stored("mxfp4", codes, scale, None, "plain", padding=4)
    x, (w13, exact13), _, ids, gammas = case(6, experts=2)
    exact = oracle(x.double().numpy(), exact13, values("mxfp4", codes, scale, None), ids, gammas)
    found = run(adapter, x, w13, w2, ids, gammas)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-6)


# A mistake in each of the layouts, and the call, has to show.
BROKEN: dict[str, dict[str, Any]] = {
    "gate and up rows left in turn": {"_halves": lambda rows: rows},
    "up before gate": {"_halves": lambda rows: torch.cat([rows[:, 1::2], rows[:, 0::2]], 1)},
    "the first half of the rows taken for gates": {
        "_halves": lambda rows: torch.stack(rows.chunk(2, 1), 2).flatten(1, 2),
    },
    "codes not shuffled": {"shuffle_weight": lambda x, layout: x},
    "scales not shuffled": {"e8m0_shuffle": lambda x: x},
    "not marked as shuffled": {"_codes": lambda w: w.data.view(torch.float4_e2m1fn_x2)},
    "nibbles swapped": {
        "_codes": lambda w: mark((w.data >> 4 | w.data << 4).view(torch.float4_e2m1fn_x2)),
    },
}


def mark(codes: torch.Tensor) -> torch.Tensor:
    codes.is_shuffled = True  # type: ignore[attr-defined]
    return codes


def test_broken_adapters_are_caught(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, (w13, exact13), (w2, exact2), ids, gammas = case(2)
    exact = oracle(x.double().numpy(), exact13, exact2, ids, gammas)
    assert off(run(adapter, x, w13, w2, ids, gammas), exact) < 2**-8
    op = experts_op(next(row for row in ROWS if row.name == "aiter"), MI355X)
    assert self_check(op.on_loaded(torch.bfloat16), w13, w2) < 2**-6
    caught, refused = [], []
    for name, changes in BROKEN.items():
        with monkeypatch.context() as patch:
            for attribute, instead in changes.items():
                patch.setattr(adapter, attribute, instead)
            if off(run(adapter, x, w13, w2, ids, gammas), exact) > 0.05:
                caught.append(name)
            try:
                self_check(op.on_loaded(torch.bfloat16), w13, w2)
            except SelfCheckFailed:
                refused.append(name)
    with capsys.disabled():
        print(f"\n{len(caught)} of {len(BROKEN)} broken adapters caught, {len(refused)} by the self-check alone")
    assert caught == refused == list(BROKEN)


# What it refuses.


def test_a_prepared_weight_is_for_aiter_alone(adapter: ModuleType) -> None:
    x, (w13, _), (w2, _), ids, gammas = case(3)
    ready, routed = (adapter.prepare(w13), adapter.prepare(w2)), (torch.from_numpy(ids), torch.from_numpy(gammas))
    for other in (moe_experts, moe_experts_ref):
        with pytest.raises(ValueError, match="w13: is in AITER's layout"):
            other(x, *ready, *routed)
    with pytest.raises(ValueError, match="AITER's layout"):
        ready[0].dequant(0)
    with pytest.raises(TypeError, match="w13 is in layout 'interleaved'; pass what `prepare` makes"):
        adapter.moe_experts(x, w13, ready[1], *routed)
    with pytest.raises(ValueError, match="w13 was made of a weight in layout 'plain', not 'interleaved'"):
        adapter.moe_experts(x, ready[1], ready[1], *routed)


def test_arguments_are_refused_by_name(adapter: ModuleType) -> None:
    x, (w13, _), (w2, _), ids, gammas = case(3)
    ready, i, g = (adapter.prepare(w13), adapter.prepare(w2)), torch.from_numpy(ids), torch.from_numpy(gammas)
    other = adapter.prepare(w2.part(slice(0, 2)))
    for match, error, args in (
        ("x is torch.float32", TypeError, (x.float(), *ready, i, g)),
        (r"x has shape \[5, 255\]", ValueError, (x[:, 1:], *ready, i, g)),
        ("w2 is \\[2, 256, 256\\]; expected \\[3, 256, 256\\]", ValueError, (x, ready[0], other, i, g)),
        ("ids are torch.int64", TypeError, (x, *ready, i.long(), g)),
        (r"ids \[5, 2\] and weights \[5, 1\]", ValueError, (x, *ready, i, g[:, :1])),
    ):
        with pytest.raises(error, match=match):
            adapter.moe_experts(*args)


@pytest.mark.parametrize("width", [96, 128, 192, 224, 320, 384, 640])
def test_widths_that_aiter_gets_wrong(adapter: ModuleType, width: int) -> None:
    w2 = random_packed(np.random.default_rng(0), "mxfp4", 1, 256, width, "plain")[0]
    with pytest.raises(ValueError, match=f"256 rows of {width}, AITER's experts need multiples of 256"):
        adapter.prepare(w2)
    reason = f"needs an expert width on this rank that is a multiple of 256, not {width}"
    choice = resolve("moe_experts", MI355X, replace(MXFP4, expert_width=width))
    assert choice.row is not None
    assert choice.row.name != "aiter"
    assert reason in {row.name: why for row, why in choice.passed_over}["aiter"]


def test_other_formats(adapter: ModuleType) -> None:
    nvfp4 = random_packed(np.random.default_rng(0), "nvfp4", 1, 256, 256, "plain")[0]
    with pytest.raises(ValueError, match="format is 'nvfp4', AITER's experts need 'mxfp4'"):
        adapter.prepare(nvfp4)


# Its row of the table.


def reason(facts: Facts, target: Target = MI355X) -> str | None:
    """Why the row is passed over, or None where it is chosen."""
    experts = next(choice for choice in explain(target, facts).choices if choice.op == "moe_experts")
    return {row.name: why for row, why in experts.passed_over}.get("aiter")


def test_it_is_chosen_on_an_mi355x(installed: Path) -> None:
    assert reason(MXFP4) is None
    for rank in (1, 2, 4):
        assert reason(replace(MXFP4, expert_width=3072 // rank)) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "nvfp4"}, "is for mxfp4, not nvfp4"),
        ({"dtype": "float32"}, "takes bfloat16 activations, not float32"),
        ({"expert_width": 384}, "needs an expert width on this rank that is a multiple of 256, not 384"),
        ({"hidden_size": 4000}, "needs a hidden size that is a multiple of 256, not 4000"),
        ({"ep_size": 8}, "needs all routed experts on one rank, not on 8"),
    ],
)
def test_every_condition_says_that_it_failed(installed: Path, change: dict[str, Any], why: str) -> None:
    assert reason(replace(MXFP4, **change)) == why
    with pytest.raises(UnsupportedOnTarget, match=why):
        resolve("moe_experts", MI355X, replace(MXFP4, **change), forced="aiter")


def test_it_is_none_for_a_batch_invariant_model(installed: Path) -> None:
    with pytest.raises(UnsupportedOnTarget, match="aiter adds a token's experts in no fixed order"):
        resolve("moe_experts", MI355X, replace(MXFP4, batch_invariant=True), forced="aiter")


@pytest.mark.parametrize("target", ["gfx942", "gfx1201", "sm100", "interpret", "cpu"])
def test_no_other_device_takes_it(installed: Path, target: str) -> None:
    assert reason(MXFP4, Target.parse(target)) == "is for gfx950"


def test_without_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "aiter").exists()])
    forget()
    why = "needs AITER 0.1.7 or later (pip install amd-aiter), which is not installed here"
    assert reason(MXFP4) == why
    with pytest.raises(UnsupportedOnTarget, match="which is not installed here"):
        Ops.bind(MI355X, MXFP4, {"moe_experts": "aiter"})


@pytest.mark.parametrize(("version", "fine"), [("0.1.6", False), ("0.1.7.post2.dev18", True), ("0.2.0+gabc", True)])
def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, fine: bool) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FAKE)
    forget()
    assert (aiter_support.problem() is None) == fine
    assert fine or f"not the {version} that is installed here" in str(reason(MXFP4))


def test_a_package_of_the_same_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    install(tmp_path, "0.13.20191203", "aiter")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    assert "the package `aiter` that is installed here is not AMD's" in str(reason(MXFP4))
    (tmp_path / "aiter" / "fused_moe.py").touch()
    assert reason(MXFP4) is None
    (tmp_path / "aiter-0.13.20191203.dist-info" / "METADATA").unlink()
    (tmp_path / "aiter-0.13.20191203.dist-info").rmdir()
    importlib.invalidate_caches()
    assert "tells no version" in str(reason(MXFP4))


def test_one_that_lacks_a_parameter_is_an_error_at_load(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_moe = importlib.import_module("aiter.fused_moe")
    monkeypatch.setattr(fused_moe, "fused_moe", lambda hidden_states, w1, w2, topk_weight, topk_ids, activation: None)
    with pytest.raises(BrokenImplementation, match="has no parameter quant_type, w1_scale, w2_scale"):
        experts_op(next(row for row in ROWS if row.name == "aiter"), MI355X)


# The call, against what was recorded of AMD's package.


def test_the_call_has_the_recorded_names_in_the_recorded_order() -> None:
    parameters = inspect.signature(eval(f"lambda {RECORDED['functions']['aiter/fused_moe.py:fused_moe']}: 0", Names()))
    tree = ast.parse((ROOT / "rocm" / "aiter_moe.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "fused_moe"]
    (call,) = calls
    given = [*list(parameters.parameters)[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
    assert given[:5] == ["hidden_states", "w1", "w2", "topk_weight", "topk_ids"]
    assert set(given) <= set(parameters.parameters)
    assert len(set(given)) == len(given)
    module = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "KEYWORDS")
    assert tuple(given[5:]) == ast.literal_eval(module)
    # Arguments left to their defaults say what the adapter counts on.
    left = {name: str(p.default) for name, p in parameters.parameters.items() if name not in given}
    assert left["doweight_stage1"] == "False"
    assert left["expert_mask"] == "None"


class Names(dict[str, Any]):
    """Any name as its own text."""

    def __missing__(self, key: str) -> Any:
        return type(key, (), {"__getattr__": lambda _, name: f"{key}.{name}"})()


def test_the_stand_in_has_the_recorded_signatures() -> None:
    for place, recorded in RECORDED["functions"].items():
        file, _, name = place.partition(":")
        tree = ast.parse((FAKE / file).read_text())
        function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        for argument in function.args.args:
            argument.annotation = None
        assert ast.unparse(function.args) == recorded, place


# A whole model, one of whose expert layers an MXFP4 checkpoint keeps in bf16.


def test_a_model_computes_the_same(adapter: ModuleType, tmp_path: Path) -> None:
    write_small(tmp_path / "bf16", hidden_size=256, moe_intermediate_size=256, depths=0)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp4", "mxfp4")
    row = replace(next(row for row in ROWS if row.name == "aiter"), targets=("cpu",), needs=())
    facts = Facts(format="mxfp4", hidden_size=256, expert_width=256, num_experts=4, top_k=2)
    found, references = [], tuple(row for row in ROWS if row.name == "torch")
    for rows in ((row, *references), references):
        with Checkpoint.open(tmp_path / "mxfp4") as checkpoint:
            ops = Ops.bind(Target.parse("cpu"), facts, {}, rows)
            model = Inkling(checkpoint.config, ops, dtype=torch.bfloat16).requires_grad_(False)
            model.load(load_tensors(checkpoint, sections=("text",)))
        ids = torch.arange(3, 40)
        found.append(model.logits(model(model.embedding(ids), Batch.uncached(1, len(ids)))))
        names = {ops.experts[e.w13.format].row.name: type(e.w13).__name__ for e in model.experts().values()}
        assert names == ({"torch": "ExpertWeight"} | ({"aiter": "AiterWeight"} if rows is not references else {}))
    # Two roundings of each expert layer's result to bfloat16, here once and in the reference another time.
    assert (found[0] - found[1]).abs().max() < 0.02 * found[1].abs().max()
