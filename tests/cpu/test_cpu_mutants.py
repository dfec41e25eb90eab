"""Broken copies of the CPU kernels, each of which its operation's case must catch."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from cpu_cases import CASES
from mutants import broken

FOLDER = Path(__file__).resolve().parents[2] / "inkling_portable" / "cpu"
FILES = ("tiles", "packed", "rows", "conv", "attention", "experts")

# op, what is wrong, file, text, what stands there instead
BROKEN = [
    ("linear", "the next row's product", "rows", "found[4 * i + j])", "found[4 * i + (j ^ 1)])"),
    ("linear", "one row too far", "tiles", "min(first + 2, last)", "min(first + 3, last)"),
    ("linear", "tokens 4 to 7 are 0 to 3", "rows", "wide[t : t + 4]", "wide[0:4]"),
    ("rms_norm", "no eps", "rows", " + np.float32(eps)", " + np.float32(0)"),
    ("silu_mul", "up gates", "tiles", "exp_fn(-x[2 * i])) * x[2 * i + 1]", "exp_fn(-x[2 * i + 1])) * x[2 * i + 1]"),
    ("silu_mul", "exponent off", "tiles", "+ 127) << 23", "+ 126) << 23"),
    ("silu_mul", "no scale", "rows", "gated[i] *= factors[i]", "gated[i] *= 1"),
    ("routing", "the last of equals wins", "rows", "scores[e] > scores[best]", "scores[e] >= scores[best]"),
    ("routing", "bias lost", "rows", " + biases[e]", ""),
    ("routing", "no log-sigmoid", "rows", "min(value, 0.0) - math.log1p(math.exp(-abs(value)))", "value"),
    ("routing", "sinks left out of the sum", "rows", "total += logs[k]", "total += logs[k] * (k < top_k)"),
    ("short_conv", "taps reversed", "conv", "w[c * width + width - 1 - back]", "w[c * width + back - 1]"),
    ("short_conv", "no inner residual", "conv", "width - 1] + widen_fn(own[c])", "width - 1]"),
    ("short_conv", "ring one late", "conv", "(position - back) % ring", "(position - back + 1) % ring"),
    ("short_conv", "reads before the start", "conv", "position >= back and state", "position >= 0 and state"),
    ("short_conv", "slot -1 is a slot", "conv", "if state and slot[b] >= 0 else 0", "if state else 0"),
    ("short_conv", "keeps too little", "conv", "min(ring, length)", "min(1, length)"),
    ("short_conv", "padding left as it was", "conv", "t >= starts[batch]", "t > rows"),
    ("qkvr_prep", "tau one late", "conv", "math.log(np.float32(position + 1)", "math.log(np.float32(position)"),
    ("qkvr_prep", "no tau on r", "conv", "widen_fn(old[i]) * tau", "widen_fn(old[i])"),
    ("qkvr_prep", "k by q's weight", "conv", "key, k_weight", "key, q_weight"),
    ("qkvr_prep", "page and offset exchanged", "conv",
     "at * k_page + offset * k_token", "offset * k_page + at * k_token"),
    ("rel_attention", "no bias", "attention", "row[count - 1 - d] += own[d]", "row[count - 1 - d] += 0 * own[d]"),
    ("rel_attention", "bias one off", "attention", "row[count - 1 - d]", "row[max(count - 2 - d, 0)]"),
    ("rel_attention", "window one wider", "attention", "low, count = max(0, end - window), min(end, window)",
     "low, count = max(0, end - window - 1), min(end, window + 1)"),
    ("rel_attention", "sees the next token", "attention", "(starts[b + 1] - 1 - t) if", "(starts[b + 1] - 2 - t) if"),
    ("rel_attention", "heads of the first group", "attention", "k_pages + g * k_head * size", "k_pages"),
    ("rel_attention", "keys past the page's end weigh", "attention", "if j + c <= last else 0", "if True else 0"),
    ("rel_attention", "no scale", "attention", "own_q[i, c] *= np.float32(scale)", "own_q[i, c] *= np.float32(1)"),
    ("moe_experts", "halves", "tiles", "out[i] = x[2 * i] /", "out[i] = x[i] /"),
    ("moe_experts", "unweighted", "experts", "*= weight[order[first + i]]", "*= 1"),
    ("moe_experts", "weights in sorted order", "experts", "*= weight[order[first + i]]", "*= weight[first + i]"),
    ("moe_experts", "the first expert's weights", "experts", "place, scales, e, 0)", "place, scales, 0, 0)"),
    ("moe_experts", "nibbles exchanged", "packed", "out[2 * k + 1] =", "out[2 * k] ="),
    ("moe_experts", "scale of the block before", "packed", "factors[2 * k // block]", "factors[0]"),
    ("moe_experts", "second scale lost", "packed", "if second:", "if False:"),
    ("moe_experts", "gate's second scale for up", "packed", "(first + n) % 2", "(first + n) * 0"),
    ("moe_experts", "groups of 4 overlap", "experts", "range(min(4, tokens.size - p))", "range(3)"),
    ("moe_experts", "odd width cut", "experts", "range(0, width, 4)", "range(0, width - 3, 4)"),
]  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_the_kernels_pass(op: str) -> None:
    modules = {file: importlib.import_module(f"inkling_portable.cpu.{file}") for file in FILES}
    assert CASES[op](modules) < 1


def test_every_operation_has_broken_copies() -> None:
    assert len(BROKEN) == 39
    assert {op for op, *_ in BROKEN} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "what", "file", "text", "instead"), BROKEN, ids=[f"{b[0]}: {b[1]}" for b in BROKEN])
def test_a_broken_copy_is_caught(op: str, what: str, file: str, text: str, instead: str, tmp_path: Path) -> None:
    name = f"broken_cpu_{BROKEN.index((op, what, file, text, instead))}"
    modules = broken(tmp_path, name, FILES, file, text, instead, FOLDER, "inkling_portable.cpu.")
    assert CASES[op](modules) > 1
