"""Which implementation of an operation runs on which device: one table, read once when a model is built.

`ROWS` holds a row for every implementation of every operation, grouped by operation and most specific first. The
first row whose families, capabilities and condition all hold is taken (`resolve`); the rows before it are passed
over, each for a reason that is kept and shown (`explain`, `inkling explain`). Nothing is chosen a token at a
time, nothing falls back: where no row holds, `UnsupportedOnTarget` lists them all, and a row that was chosen and
does not work is an error.

Implementations are strings (`module:function`) that `inkling_portable.ops` imports, so the table loads and
explains itself for any device on any machine, without torch and without the implementations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from inkling_kernels.target import CAPABILITIES, TARGETS, Target
from inkling_portable.facts import (
    FORMATS,
    Condition,
    Facts,
    aiter_mxfp4,
    cpu_cache,
    cpu_floats,
    groupable,
    invariant,
    invariant_experts,
    invariant_rel,
    native_fp4,
    native_mxfp4,
    rel_shapes,
    to_float32,
)

#: The operations that a model is made of, in the order of a forward pass.
OPS: Final = (
    "embedding",
    "linear",
    "rms_norm",
    "qkvr_prep",
    "rel_attention",
    "short_conv",
    "routing",
    "moe_experts",
    "silu_mul",
    "logits",
)
#: The chips on whose emulators every row was executed that says `emulated`.
EMULATED: Final = ("sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950")

#: The environment variable that forces rows: `INKLING_IMPL=rms_norm=torch,moe_experts=unpack`.
FORCE_VARIABLE: Final = "INKLING_IMPL"


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of one operation and where it may run.

    * `targets`: families (`Target.families`), each listed by name: an architecture, `cuda`, `hip`, `gpu`
      or `cpu`. Newer chips are not supersets of older ones, so no row says "from sm100 on".
    * `needs`: capabilities (`CAPABILITIES`), all of them.
    * `when`: a `Condition`, or None.
    * `impl`: `module:function`; `name`: the short name by which `INKLING_IMPL` forces it.
    * `prepare`: for experts whose implementation reads weights in a layout of its own, the `module:function` that
      rearranges each at load.
    * `why`: what this implementation is and why it stands where it does.
    * `evidence`: what was seen of it: `ran DEVICE`, `emulated` (its compiled code was executed on an emulator),
      `compiled` or `none`. A JSON file in `benchmarks/results/` or `rocm/evidence/` backs each but the last: for
      `ran DEVICE` one whose `device` is DEVICE, else one with that word as `evidence` and `op=name` in `rows`.
    """

    op: str
    targets: tuple[str, ...]
    needs: tuple[str, ...]
    when: Condition | None
    impl: str
    name: str
    why: str
    evidence: str
    prepare: str | None = None

    def evidence_on(self, target: Target) -> str:
        """The evidence for one device: what was emulated was so on the chips of `EMULATED`, and compiled for all. The
        interpreter runs in tests what a GPU would run."""
        if target.vendor == "interpret":
            return f"ran {target}"
        return "compiled" if self.evidence == "emulated" and target.arch not in EMULATED else self.evidence

    def problem(self, target: Target, facts: Facts) -> str | None:
        """Why this row does not hold on `target` for `facts`, or None where it does."""
        if not set(self.targets) & set(target.families):
            return f"is for {', '.join(self.targets)}"
        missing = [need for need in self.needs if need not in target.capabilities]
        if missing:
            return "needs " + ", ".join(f"{need} ({CAPABILITIES[need]})" for need in missing)
        return self.when(facts) if self.when is not None else None


# fmt: off
ROWS: Final[tuple[Row, ...]] = (
    #   op               targets    needs when        implementation                                        name
    #   why, evidence
    Row("embedding",     ("gpu",),  (),   to_float32, "inkling_kernels.embedding:embedding",                "triton",
        "gather and norm in one launch, a program a token", "emulated"),
    Row("embedding",     ("cpu",),  (),   None,       "inkling_kernels.embedding:embedding_ref",            "torch",
        "a gather and a norm, in torch", "ran cpu"),
    Row("linear",        ("gpu",),  (),   invariant,  "inkling_kernels.linear:linear",                 "fixed_tiles",
        "one tile shape and one order of sums: equal bits in every batch", "emulated"),
    Row("linear",        ("gpu",),  (),   None,       "inkling_kernels.linear:linear_ref",                  "torch",
        "torch's own product: cuBLAS or rocBLAS", "none"),
    Row("linear",        ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.rows:linear",                   "numba",
        "few rows in one pass over the weight, 4 at a time, on all cores", "ran cpu"),
    Row("linear",        ("cpu",),  (),   None,       "inkling_kernels.linear:linear_ref",                  "torch",
        "torch's own product", "ran cpu"),
    Row("rms_norm",      ("gpu",),  (),   to_float32, "inkling_kernels.norm:rms_norm",                      "triton",
        "whole rows in registers, read once; a row's bits do not depend on the batch", "emulated"),
    Row("rms_norm",      ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.rows:rms_norm",                 "numba",
        "few rows in one call, read once", "ran cpu"),
    Row("rms_norm",      ("cpu",),  (),   None,       "inkling_kernels.norm:rms_norm_ref",                  "torch",
        "float32 statistics, in torch: Triton compiles nothing for a CPU", "ran cpu"),
    Row("qkvr_prep",     ("gpu",),  (),   to_float32, "inkling_kernels.kv_cache:qkvr_prep",                 "triton",
        "convolution, norms, tau and cache write (fp8 too) in one launch; only q and r leave it", "emulated"),
    Row("qkvr_prep",     ("cpu",),  (),   cpu_cache,  "inkling_portable.cpu.conv:qkvr_prep",                "numba",
        "convolution, norms, tau and cache write in one call", "ran cpu"),
    Row("qkvr_prep",     ("cpu",),  (),   None,       "inkling_kernels.kv_cache:qkvr_prep_ref",             "torch",
        "convolution, norms, tau and cache write in turn, in torch", "ran cpu"),
    Row("rel_attention", ("gpu",), (), invariant_rel, "inkling_kernels.batch_invariant:rel_attention", "fixed_splits",
        "the kernels of the row below, decode rows in splits of one size: equal bits in every batch", "none"),
    Row("rel_attention", ("gpu",),  (),   rel_shapes, "inkling_kernels.rel_attention:rel_attention",        "triton",
        "no tensor of relative logits: the bias comes out of the matrix unit in place, a tile at a time", "emulated"),
    Row("rel_attention", ("cpu",),  (),   cpu_cache,  "inkling_portable.cpu.attention:rel_attention",       "numba",
        "few rows in one call, 4 heads that share keys at a time, on all cores", "ran cpu"),
    Row("rel_attention", ("cpu",),  (),   None,       "inkling_kernels.rel_attention:rel_attention_ref",    "torch",
        "tiles of query rows over the keys that they may see, in torch matrix products", "ran cpu"),
    Row("short_conv",    ("gpu",),  (),   to_float32, "inkling_kernels.short_conv:short_conv",              "triton",
        "one launch for prefill, decode and verify, on a ring that needs no roll-back", "emulated"),
    Row("short_conv",    ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.conv:short_conv",               "numba",
        "one call for prefill, decode and verify, the ring in place", "ran cpu"),
    Row("short_conv",    ("cpu",),  (),   None,       "inkling_kernels.short_conv:short_conv_ref",          "torch",
        "a float32 sum of W shifted products, in torch", "ran cpu"),
    Row("routing",       ("gpu",),  (),   to_float32, "inkling_kernels.routing:routing",                    "triton",
        "float32; the maximum taken k times over keys that hold score and index", "emulated"),
    Row("routing",       ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.rows:routing",                  "numba",
        "few rows in one call; float64 rounded to float32 scores", "ran cpu"),
    Row("routing",       ("cpu",),  (),   None,       "inkling_kernels.routing:routing_ref",                "torch",
        "float32 in torch; a stable sort, so that the lowest index wins a tie", "ran cpu"),
    Row("moe_experts", ("gpu",), (), invariant_experts, "inkling_kernels.batch_invariant:moe_experts", "fixed_tiles",
        "the kernels of the row triton in one tile shape: equal bits in every batch", "none",
        "inkling_kernels.moe_gemm_fp4:prepare_experts"),
    Row("moe_experts",   ("gfx950",), ("mfma_scale",), aiter_mxfp4, "inkling_rocm.aiter_moe:moe_experts",       "aiter",
        "AMD's fused kernels; activations rounded to MXFP4 as well, sums by atomics", "none",
        prepare="inkling_rocm.aiter_moe:prepare"),
    Row("moe_experts",   ("sm100", "sm103", "sm120"), ("native_nvfp4", "native_mxfp4"), native_fp4,
        "inkling_kernels.moe_native:moe_experts_native", "native",
        "hardware block scales; NVFP4 takes tokens in NVFP4, MXFP4 in MXFP8 (sm120: in MXFP4)", "compiled",
        "inkling_kernels.moe_native:prepare_native"),
    Row("moe_experts",   ("gfx950",), ("mfma_scale",), native_mxfp4, "inkling_kernels.moe_native:moe_experts_native",
        "native", "hardware block scales; MXFP4 takes tokens in MXFP8", "emulated"),
    Row("moe_experts",   ("gpu",),  (),   groupable,  "inkling_kernels.moe_gemm:moe_experts",               "triton",
        "grouped products on sorted tokens; fp4 is unpacked in registers; summed without atomics", "emulated",
        "inkling_kernels.moe_gemm_fp4:prepare_experts"),
    Row("moe_experts",   ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.experts:moe_experts",           "numba",
        "grouped: each expert's weights read or unpacked once, on all cores, summed in one order", "ran cpu"),
    Row("moe_experts",   ("cpu",),  (),   None,       "inkling_kernels.moe_gemm:moe_experts_ref",           "torch",
        "one matrix product an expert that has tokens; fp4 is dequantised an expert at a time", "ran cpu"),
    Row("silu_mul",      ("gpu",),  (),   to_float32, "inkling_kernels.activation:silu_mul",                "triton",
        "elementwise on the interleaved columns, in float32", "emulated"),
    Row("silu_mul",      ("cpu",),  (),   cpu_floats, "inkling_portable.cpu.rows:silu_mul",                 "numba",
        "few rows in one call", "ran cpu"),
    Row("silu_mul",      ("cpu",),  (),   None,       "inkling_kernels.activation:silu_mul_ref",            "torch",
        "elementwise on the interleaved columns, in torch", "ran cpu"),
    Row("logits",        ("gpu",),  (),   to_float32, "inkling_kernels.logits:logits",                      "triton",
        "muP scale, float32 and a flag for rows that are not finite, in one launch", "emulated"),
    Row("logits",        ("cpu",),  (),   None,       "inkling_kernels.logits:logits_ref",                  "torch",
        "muP scale, float32 and a flag for rows that are not finite, in torch", "ran cpu"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Choice:
    """What the table says of one operation on one target: the row taken, or None, and the rows passed over first."""

    op: str
    row: Row | None
    passed_over: tuple[tuple[Row, str], ...]

    def to_dict(self, target: Target) -> dict[str, Any]:
        """A form for JSON; `target` is the device that the choice is for."""
        row, seen = self.row, self.row.evidence_on(target) if self.row else None
        return {
            "op": self.op,
            "chosen": row and {"name": row.name, "impl": row.impl, "why": row.why, "evidence": seen},
            "passed_over": [
                {"name": other.name, "impl": other.impl, "targets": list(other.targets), "reason": reason}
                for other, reason in self.passed_over
            ],
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the table says of every operation on one target, one `Choice` an operation."""

    target: Target
    facts: Facts
    choices: tuple[Choice, ...]

    @property
    def missing(self) -> tuple[Choice, ...]:
        """The operations that have no row here. A model can be built on the target where there are none."""
        return tuple(choice for choice in self.choices if choice.row is None)

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "target": str(self.target),
            "name": self.target.name,
            "facts": asdict(self.facts),
            "supported": not self.missing,
            "operations": [choice.to_dict(self.target) for choice in self.choices],
        }


class UnsupportedOnTarget(ValueError):
    """No row holds: the message lists, for each operation, every row with the reason it was passed over."""

    def __init__(self, target: Target, missing: tuple[Choice, ...]) -> None:
        self.target = target
        self.missing = missing
        listing = ", ".join(
            f"{choice.op} (" + "; ".join(f"{row.name} {reason}" for row, reason in choice.passed_over) + ")"
            for choice in missing
        )
        super().__init__(f"{target} ({target.name}) has no implementation of {listing}")


def explain(
    target: Target, facts: Facts, forced: Mapping[str, str] | None = None, rows: tuple[Row, ...] = ROWS
) -> Explanation:
    """What the table says of every operation. Imports nothing, so it answers for any target on any machine.

    `forced` maps operations to names of implementations; a forced one is held to the same conditions as if it had been
    alone in the table. Raises ValueError when it names an operation or an implementation that does not exist.
    """
    forced = forced or {}
    ops = tuple(dict.fromkeys(row.op for row in rows))
    for op, name in forced.items():
        if op not in ops:
            raise ValueError(f"cannot force {op}={name}: there is no operation {op!r}, only {', '.join(ops)}")
        names = list(dict.fromkeys(row.name for row in rows if row.op == op))
        if name not in names:
            raise ValueError(f"cannot force {op}={name}: the implementations of {op} are {', '.join(names)}")
    return Explanation(target, facts, tuple(_choose(op, target, facts, forced.get(op), rows) for op in ops))


def resolve_all(
    target: Target, facts: Facts, forced: Mapping[str, str] | None = None, rows: tuple[Row, ...] = ROWS
) -> dict[str, Choice]:
    """The row of every operation. Raises `UnsupportedOnTarget` for all those that have none, in one error."""
    explanation = explain(target, facts, forced, rows)
    if explanation.missing:
        raise UnsupportedOnTarget(target, explanation.missing)
    return {choice.op: choice for choice in explanation.choices}


def resolve(op: str, target: Target, facts: Facts, forced: str | None = None, rows: tuple[Row, ...] = ROWS) -> Choice:
    """The row of one operation. Raises `UnsupportedOnTarget` where it has none, ValueError on an unknown name."""
    own = tuple(row for row in rows if row.op == op)
    if not own:
        raise ValueError(f"there is no operation {op!r}, only {', '.join(dict.fromkeys(row.op for row in rows))}")
    return resolve_all(target, facts, None if forced is None else {op: forced}, own)[op]


def _choose(op: str, target: Target, facts: Facts, forced: str | None, rows: tuple[Row, ...]) -> Choice:
    passed_over: list[tuple[Row, str]] = []
    for row in rows:
        if row.op != op:
            continue
        reason = row.problem(target, facts)
        if reason is None and forced not in (None, row.name):
            reason = f"is set aside: {op}={forced} is forced"
        if reason is None:
            return Choice(op, row, tuple(passed_over))
        passed_over.append((row, reason))
    return Choice(op, None, tuple(passed_over))


def forced_from_environment() -> dict[str, str]:
    """The rows that the variable `INKLING_IMPL` forces: the only reading of the environment in dispatch.

    Raises ValueError when the variable is not a comma-separated list of `operation=implementation`.
    """
    text = os.environ.get(FORCE_VARIABLE, "")
    forced: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, name = (part.strip() for part in item.partition("="))
        if not (op and equals and name) or op in forced:
            raise ValueError(f"{FORCE_VARIABLE}={text!r}: expected op=impl,op2=impl with each op once, got {item!r}")
        forced[op] = name
    return forced


def support_table() -> str:
    """The support table of the README, in Markdown: every target in every format, then every implementation.

    A target's cell holds the evidence of the rows that it would take, weakest first, or how many operations have none.
    """
    strength = {"none": 0, "compiled": 1, "emulated": 2}
    lines = ["| target | chip | " + " | ".join(FORMATS) + " |", "|---" * (2 + len(FORMATS)) + "|"]
    for target in TARGETS:
        cells = []
        for format_ in FORMATS:
            explanation = explain(target, Facts(format=format_))
            seen = {choice.row.evidence_on(target) for choice in explanation.choices if choice.row is not None}
            absent = [f"no row for {len(explanation.missing)} of {len(OPS)} operations"] if explanation.missing else []
            cells.append("; ".join(absent + sorted(seen, key=lambda word: (strength.get(word, 3), word))))
        lines.append(f"| `{target}` | {target.name} | " + " | ".join(cells) + " |")
    lines += ["", "| operation | implementation | targets | what it is | evidence |", "|---|---|---|---|---|"]
    for row in ROWS:
        where = ", ".join((*row.targets, *row.needs))
        lines.append(f"| {row.op} | {row.name} | {where} | {row.why} | {row.evidence} |")
    return "\n".join(lines)
