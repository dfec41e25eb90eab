"""Broken copies of the expert kernels, each of which the comparison with numpy in float64 must catch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from moe_oracle import oracle, random_packed, stored, values
from mutants import broken

from inkling_kernels.numerics import ExpertWeight

FILES = ("target", "compile_case", "ragged", "activation", "moe_words", "numerics", "expert_sort", "moe_gemm_fp4",
         "moe_gemm_plan", "moe_gemm")  # fmt: skip
GEMM, FP4, PLAN = "moe_gemm", "moe_gemm_fp4", "moe_gemm_plan"

# checked with, name, file, text, what stands there instead
BROKEN = [
    ("bf16", "contiguous w13", GEMM, "row * 2 + 1, live", "row + rows, live"),
    ("bf16", "gate and up exchanged", GEMM, "silu_mul_fn(gate, up)", "silu_mul_fn(up, gate)"),
    ("bf16", "no gate", GEMM, "silu_mul_fn(gate, up) if GATED", "up if GATED"),
    ("bf16", "weights dropped", GEMM, "weight[:, None] * tl.load", "tl.load"),
    ("bf16", "weights of the first choice", GEMM, "weights_row + k * weights_col", "weights_row"),
    ("bf16", "absent experts added", GEMM, "held = (expert >= 0) & (expert < experts)", "held = expert >= -1"),
    ("bf16", "first choice alone", GEMM, "for k in range(top_k)", "for k in range(1)"),
    ("bf16", "x taken in the sorted order", GEMM, "pair // top_k if GATED", "member // top_k if GATED"),
    ("bf16", "x taken by pair", GEMM, "pair // top_k if GATED", "pair if GATED"),
    ("bf16", "results left in the sorted order", GEMM, "to = member if GATED else pair", "to = member"),
    ("bf16", "first expert for all", GEMM, "w_ptr += expert * w_expert", "w_ptr += 0 * expert"),
    ("bf16", "last row of an expert lost", GEMM,
     "paired = member < tl.load(offsets_ptr + expert + 1)", "paired = member + 1 < tl.load(offsets_ptr + expert + 1)"),
    ("bf16", "tiles of half the length", GEMM,
     "(last - here)[None, :]) * BLOCK_M", "(last - here)[None, :]) * (BLOCK_M // 2)"),
    ("bf16", "a tile too few", GEMM, "here = (count + (BLOCK_M - 1)) // BLOCK_M", "here = count // BLOCK_M"),
    ("bf16", "tiles counted short", PLAN, "pairs // chosen.block_m + experts", "pairs // chosen.block_m"),
    ("bf16", "columns past the last", GEMM, "mask = mask & (col < columns)[None, :]", "mask = mask"),
    ("bf16", "tail of the columns lost", GEMM,
     "for first in range(0, columns, BLOCK_K)", "for first in range(0, columns - BLOCK_K + 1, BLOCK_K)"),
    ("nvfp4", "swapped nibbles", FP4,
     "tl.join(tl.join(p0, p2), tl.join(p1, p3))", "tl.join(tl.join(p1, p3), tl.join(p0, p2))"),
    ("nvfp4", "halves of a word exchanged", FP4,
     "tl.join(low * scale, high * scale)", "tl.join(high * scale, low * scale)"),
    ("nvfp4", "bytes out of order", FP4,
     "tl.join(tl.join(p0, p2), tl.join(p1, p3))", "tl.join(tl.join(p0, p1), tl.join(p2, p3))"),
    ("nvfp4", "signs of codes lost", FP4, "p1 = (word << 3) & 0x81C081C0", "p1 = (word << 3) & 0x01C001C0"),
    ("nvfp4", "a code's lowest bit lost", FP4, "((word >> 4) & 0x00C000C0)", "((word >> 4) & 0x00800080)"),
    ("nvfp4", "a shift too far", FP4, "p2 = (word << 6)", "p2 = (word << 5)"),
    ("nvfp4", "pairs read as words", GEMM, "ORDER=weight.order", 'ORDER="pairs"'),
    ("mxfp4 pairs", "words read as pairs", GEMM, "ORDER=weight.order", 'ORDER="words"'),
    ("mxfp4 pairs", "low codes without sign", FP4, "((word >> 12) & 0x8000)", "((word >> 12) & 0x0000)"),
    ("mxfp4 pairs", "bytes backwards", FP4, "p0 = _placed_byte_fn(word << 24)", "p0 = _placed_byte_fn(word)"),
    ("nvfp4", "second scale dropped", GEMM, "gate *= tl.load(scale2_ptr + expert * scale2_expert) *", "gate *="),
    ("nvfp4", "gate's scale for up", GEMM, "expert * scale2_expert + scale2_up)", "expert * scale2_expert)"),
    ("nvfp4", "up's scale for gate", GEMM,
     "gate *= tl.load(scale2_ptr + expert * scale2_expert)",
     "gate *= tl.load(scale2_ptr + expert * scale2_expert + scale2_up)"),
    ("nvfp4", "first expert's second scale", GEMM, "scale2_ptr + expert * scale2_expert)", "scale2_ptr)"),
    ("nvfp4", "first expert's block scales", GEMM, "scale_ptr += expert * scale_expert", "scale_ptr += 0 * expert"),
    ("nvfp4", "scales without sign", FP4, "| ((bits & 0x80) << 24)", "| ((bits & 0x00) << 24)"),
    ("nvfp4", "FNUZ scales", FP4, "_TWO_120 * _TWO_119", "_TWO_119 * _TWO_119"),
    ("nvfp4", "a scale for 32", FP4, "32 if MX else 16", "32 if MX else 32"),
    ("nvfp4", "padding blocks read", FP4, "(block < columns // SIZE)", "(block <= columns // SIZE + 1)"),
    ("mxfp4", "a scale for 16", FP4, "32 if MX else 16", "16 if MX else 16"),
    ("mxfp4", "scales one off", FP4, "_TWO_126 = tl.constexpr(2.0**126)", "_TWO_126 = tl.constexpr(2.0**125)"),
    ("mxfp4", "scales of the first row", FP4, "(row * scale_row)[:, None]", "(row * 0)[:, None]"),
    ("mxfp4 ends", "E8M0 0 as zero", FP4, "bits == 0, 0x00400000", "bits == 0, 0"),
    ("mxfp4 ends", "E8M0 255 as infinity", FP4, "0x7FC00000", "0x7F800000"),
    ("nvfp4 ends", "NaN scale as 480", FP4,
     '(bits & 0x7F) == 0x7F, float("nan")', '(bits & 0x7F) == 0x80, float("nan")'),
    ("nvfp4 ends", "small scales as zero", FP4, "placed.to(tl.float32, bitcast=True)",
     "tl.where((bits & 0x78) == 0, 0, placed).to(tl.uint32).to(tl.float32, bitcast=True)"),
]  # fmt: skip


def ordinary(kind: str, order: str) -> tuple[list, np.ndarray]:
    """Arguments and result: experts with several tiles and with none, absent ids, widths that no tile divides, and
    padding that is NaN or large."""
    rng = np.random.default_rng(1)
    tokens, experts, hidden, width = 30, 4, 96, 32
    ids = rng.choice([-1, 0, 2, 3], (tokens, 2), p=[0.2, 0.5, 0.2, 0.1]).astype(np.int32)
    # Rows behind the last token, for copies that read there.
    x = np.full((3 * tokens, hidden), np.nan, np.float32)[:tokens]
    x[:] = rng.standard_normal((tokens, hidden))
    gammas = rng.standard_normal((tokens, 2)).astype(np.float32)
    if kind == "bf16":
        large = [
            np.full((experts, n + 8, k + 8), np.nan, np.float32) for n, k in ((2 * width, hidden), (hidden, width))
        ]
        exact = [rng.standard_normal(a[:, :-8, :-8].shape).astype(np.float32) / 8 for a in large]
        for a, b in zip(large, exact, strict=True):
            a[:, :-8, :-8] = b
        held = [torch.from_numpy(a)[:, :-8, :-8] for a in large]
        weights = [ExpertWeight("bf16", held[0], layout="interleaved"), ExpertWeight("bf16", held[1])]
    else:
        (w13, a), (w2, b) = (
            random_packed(rng, kind, experts, rows, columns, layout, padding=2, order=order)
            for rows, columns, layout in ((2 * width, hidden, "interleaved"), (hidden, width, "plain"))
        )
        weights, exact = [w13, w2], [a, b]
    args = [torch.from_numpy(x), *weights, torch.from_numpy(ids), torch.from_numpy(gammas)]
    return args, oracle(x, *exact, ids, gammas)


def ends(format: str) -> tuple[list, np.ndarray]:
    """Scale bytes at both ends, a row of w2 each."""
    one, bytes_ = (0x38, [0x7F, 0x01, 0x05, 0x38]) if format == "nvfp4" else (127, [255, 0, 1, 127])
    second = np.ones(1, np.float32) if format == "nvfp4" else None
    codes13, codes2 = np.full((1, 64, 32), 2, np.uint8), np.full((1, 32, 32), 3, np.uint8)
    blocks = 2 if format == "nvfp4" else 1
    scale13 = np.full((1, 64, blocks), one, np.uint8)
    scale2 = np.array(bytes_ * 8, np.uint8)[None, :, None].repeat(blocks, 2)
    x, gammas = np.full((1, 32), 0.1, np.float32), np.full((1, 1), 2.0**60, np.float32)
    exact = values(format, codes13, scale13, second), values(format, codes2, scale2, second)
    args = [
        torch.from_numpy(x), stored(format, codes13, scale13, second, "interleaved"),
        stored(format, codes2, scale2, second, "plain"), torch.zeros(1, 1, dtype=torch.int32), torch.from_numpy(gammas),
    ]  # fmt: skip
    return args, oracle(x, *exact, np.zeros((1, 1), int), gammas)


def passes(modules: dict[str, ModuleType], kind: str) -> bool:
    format, _, detail = kind.partition(" ")
    at_ends = detail == "ends"
    args, expected = ends(format) if at_ends else ordinary(format, detail or "words")
    # 64 columns of float32 at a time, which divide neither the hidden size nor the width.
    config = modules[PLAN].MoeConfig(block_k=128)
    found = modules[GEMM].moe_experts(*args, config=config).double().numpy()
    tolerance = 0.0 if at_ends else 1e-5 * np.abs(expected).max()
    return bool(np.allclose(found, expected, rtol=1e-5, atol=tolerance, equal_nan=True))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.usefixtures("poisoned_memory")
def test_every_broken_copy_is_caught(
    kernel_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip(
            "tensors of this test are in host memory: the interpreter and drivers of INKLING_TEST_DRIVER run it"
        )
    whole = broken(tmp_path, "unbroken_moe", FILES, GEMM, "tl.dot", "tl.dot")
    for kind in dict.fromkeys(each[0] for each in BROKEN):
        assert passes(whole, kind), kind
    missed = []
    for number, (kind, name, file, text, instead) in enumerate(BROKEN):
        if passes(broken(tmp_path, f"broken_moe_{number}", FILES, file, text, instead), kind):
            missed.append(name)
    with capsys.disabled():
        print(f"\n{len(BROKEN) - len(missed)} of {len(BROKEN)} broken copies of the experts caught")
    assert missed == []
