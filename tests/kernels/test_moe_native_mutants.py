"""Broken copies of the experts on hardware block scales and of the quantisation of their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from moe_oracle import native_oracle, random_packed
from mutants import broken

FILES = ("target", "compile_case", "ragged", "activation", "moe_words", "numerics", "expert_sort", "fp8",
         "moe_gemm_fp4", "moe_gemm_plan", "moe_gemm", "moe_check", "act_quant", "moe_native")  # fmt: skip
NATIVE, QUANT = "moe_native", "act_quant"

# checked with (format of the weights, of the tokens), name, file, text, what stands there instead
BROKEN = [
    ("mxfp4 mxfp8", "contiguous w13", NATIVE,
     "tl.trans(tl.reshape(total, [BLOCK_N, 2, BLOCK_M]), 0, 2, 1)",
     "tl.trans(tl.reshape(total, [2, BLOCK_N, BLOCK_M]), 1, 2, 0)"),
    ("mxfp4 mxfp8", "gate and up exchanged", NATIVE, "silu_mul_fn(gate, up)", "silu_mul_fn(up, gate)"),
    ("mxfp4 mxfp8", "first expert's codes", NATIVE, "w_ptr += expert * w_expert", "w_ptr += 0 * expert"),
    ("mxfp4 mxfp8", "first expert's scales", NATIVE, "scale_ptr += expert * scale_expert", "scale_ptr += 0 * expert"),
    ("mxfp4 mxfp8", "scales of the first row", NATIVE, "(w_row * scale_row)[:, None]", "(w_row * 0)[:, None]"),
    ("mxfp4 mxfp8", "padding blocks read", NATIVE,
     "inside = (block < columns // SIZE)[None, :]", "inside = (block >= 0)[None, :]"),
    ("mxfp4 mxfp8", "scales of other tokens", NATIVE, "(source * x_scale_row)[:, None]", "(source * 0)[:, None]"),
    ("mxfp4 mxfp8", "other tokens", NATIVE, "(source * x_row)[None, :]", "(source * 0)[None, :]"),
    ("mxfp4 mxfp8", "results left in the sorted order", "moe_gemm", "to = member if GATED else pair", "to = member"),
    ("mxfp4 mxfp4", "tokens' nibbles exchanged", QUANT, "low | (high << 4)", "high | (low << 4)"),
    ("mxfp4 mxfp4", "tokens' signs lost", QUANT, ">> 28) & 8", ">> 28) & 0"),
    ("mxfp4 mxfp4", "tokens' scales one off", QUANT, "(bits >> 23) - TOP +", "(bits >> 23) - TOP - 1 +"),
    ("nvfp4 nvfp4", "input scale dropped", NATIVE, "scale2 = tl.load(input_ptr)", "scale2 = 1.0"),
    ("nvfp4 nvfp4", "input scale dropped in the codes", QUANT, "* _TWO_M119 * scale2", "* _TWO_M119"),
    ("nvfp4 nvfp4", "another input scale for the codes", NATIVE,
     "quantise_activations(x, kind, given if", "quantise_activations(x, kind, given * 0.5 if"),
    ("nvfp4 nvfp4", "second scale dropped", NATIVE,
     "gate *= tl.load(scale2_ptr + expert * scale2_expert) * scale2", "gate *= scale2"),
    ("nvfp4 nvfp4", "gate's scale for up", NATIVE, "expert * scale2_expert + scale2_up)", "expert * scale2_expert)"),
    ("nvfp4 nvfp4", "signs of scales lost", NATIVE, "weight.data ^ flip", "weight.data"),
    ("nvfp4 nvfp4", "scales of tokens as if codes ended at 4", QUANT, "6.0 * scale2", "12.0 * scale2"),
]  # fmt: skip


def passes(modules: dict[str, ModuleType], kind: str) -> bool:
    """Several tiles, an expert without tokens, absent ids, widths that no tile divides, NaN in padding."""
    format, tokens = kind.split()
    rng = np.random.default_rng(1)
    parts = [
        random_packed(rng, format, 3, rows, columns, layout, padding=2)
        for rows, columns, layout in ((192, 64, "interleaved"), (64, 96, "plain"))
    ]
    inputs = [torch.tensor([0.01]), torch.tensor([0.25])] if format == "nvfp4" else [None, None]
    weights = [
        modules[NATIVE].prepare_native(replace(part[0], input_scale=given))
        for part, given in zip(parts, inputs, strict=True)
    ]
    x = rng.standard_normal((17, 64))
    ids = rng.choice([-1, 0, 2], (17, 2), p=[0.1, 0.3, 0.6]).astype(np.int32)
    gammas = rng.standard_normal((17, 2)).astype(np.float32)
    target = modules["target"].Target.parse("sm120" if tokens == "mxfp4" else "sm100")
    config = modules["moe_gemm_plan"].MoeConfig(block_n=64, block_k=64)
    given_x = torch.from_numpy(x).bfloat16()
    out = modules[NATIVE].moe_experts_native(
        given_x, *weights, torch.from_numpy(ids), torch.from_numpy(gammas), target=target, config=config
    )
    exact = native_oracle(x, [part[1] for part in parts], ids, gammas, tokens, inputs)
    return bool(np.allclose(out.double().numpy(), exact, rtol=0, atol=0.02 * np.abs(exact).max()))


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_every_broken_copy_is_caught(
    kernel_device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("tensors of this test are in host memory: the interpreter and INKLING_TEST_DRIVER's drivers run it")
    whole = broken(tmp_path, "unbroken_native", FILES, NATIVE, "tl.dot_scaled", "tl.dot_scaled")
    for kind in dict.fromkeys(each[0] for each in BROKEN):
        assert passes(whole, kind), kind
    missed = []
    for number, (kind, name, file, text, instead) in enumerate(BROKEN):
        if passes(broken(tmp_path, f"broken_native_{number}", FILES, file, text, instead), kind):
            missed.append(name)
    with capsys.disabled():
        print(f"\n{len(BROKEN) - len(missed)} of {len(BROKEN)} broken copies of the native experts caught")
    assert missed == []
