"""The `cpu` case: the shared model and engine beside transformers' eager Inkling, on one checkpoint, in one process.

Model: hidden 512, 12 layers (full attention at 5 and 11, the others with a window of 512), 64 experts of which 6 are
routed to and 2 shared, float32. Weights are random: neither side's work depends on their values. Both sides take
turns, a block of one and a block of the other, so that whatever else the machine does falls on both; figures are
medians with the 20th and 80th percentile. `transformers` runs with eager attention and its eager loop over experts.

Peak extra memory is the process's resident high-water mark during a prefill (reset before it, after freed memory was
given back) less what was resident before it: activations, scores and the caches that the prefill fills, on both sides.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from run import GateError

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable import LLM, SamplingParams
from inkling_portable.engine import Engine
from inkling_portable.facts import Facts
from inkling_portable.heldout import sources
from inkling_portable.llm import default_model, pages_for
from inkling_portable.ops import Ops

EXPERTS, TOP_K, EXPERT_WIDTH, HIDDEN, HEAD_DIM = 64, 6, 32, 512, 32
PREFILL, CONTEXT, LONG_CONTEXT = 4096, 1024, 16384
TARGETS = {
    "prefill of 4,096 tokens, times faster": (5.0, "at least"),
    "prefill of 4,096 tokens, part of the peak extra memory": (0.2, "at most"),
    "decode, batch 1, times faster": (3.0, "at least"),
    "decode, batch 8, times faster": (4.0, "at least"),
    "decoded token at context 16,384 over 1,024": (1.6, "at most"),
    "experts alone, 1 token, times faster": (3.0, "at least"),
    "experts alone, 32 tokens, times faster": (3.0, "at least"),
    "experts alone, 512 tokens, times faster": (3.0, "at least"),
    "speculative over plain decode of the small model": (1.0, "at least"),
    "mean accepted length with 2 drafts": (1.5, "at least"),
}


@dataclass(frozen=True)
class Times:
    """Seconds of one thing, measured several times."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.values, n=5) if len(self.values) > 1 else [self.values[0]] * 4
        return {"median": self.median, "p20": cuts[0], "p80": cuts[3], "n": len(self.values)}


class Pair:
    """Both implementations on one random checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import InklingForCausalLM, InklingTextConfig

        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        config = InklingTextConfig(
            vocab_size=2048,
            unpadded_vocab_size=2000,
            hidden_size=HIDDEN,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            swa_num_attention_heads=8,
            swa_num_key_value_heads=2,
            swa_head_dim=HEAD_DIM,
            sliding_window_size=512,
            rel_extent=1024,
            log_scaling_n_floor=2048,
            local_layer_ids=[i for i in range(12) if i not in (5, 11)],
            mlp_layer_types=["dense"] * 2 + ["sparse"] * 10,
            intermediate_size=512,
            moe_intermediate_size=EXPERT_WIDTH,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_shared_experts=2,
            logits_mup_width_multiplier=1.0,
            max_position_embeddings=32768,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=None,
        )
        InklingForCausalLM(config).save_pretrained(folder)
        self.theirs = InklingForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).eval()
        self.llm = LLM(folder, dtype="float32", max_model_len=LONG_CONTEXT + 512, max_num_seqs=1)

    def engine(self, batch: int, context: int) -> Engine:
        """An engine of our model for `batch` sequences of at most `context` tokens, reusing no prefixes."""
        chunk, page = 512, 64
        return Engine(
            self.llm.model,
            None,
            max_model_len=context,
            max_num_seqs=batch,
            max_num_batched_tokens=chunk,
            block_size=page,
            num_pages=pages_for(self.llm.config, batch, context, chunk, page, 0),
            enable_prefix_caching=False,
        )


def prompts(batch: int, length: int, seed: int) -> torch.Tensor:
    """Random token ids `[batch, length]`."""
    return torch.randint(2000, (batch, length), generator=torch.Generator().manual_seed(seed))


def started(engine: Engine, ids: torch.Tensor, tokens: int) -> dict[int, list[int]]:
    """Submit `ids` and step until every prompt is read. The generated tokens grow in the lists that come back."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for row in ids.tolist():
        engine.submit(row, params)
    lists: dict[int, list[int]] = {}
    while len(lists) < len(ids):
        for output, _ in engine.step():
            lists[output.request_id] = output.outputs[0].token_ids
    return lists


@torch.inference_mode()
def their_prefill(pair: Pair, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = pair.theirs(input_ids=ids, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], out.past_key_values


@torch.inference_mode()
def their_step(pair: Pair, token: torch.Tensor, cache: Any) -> torch.Tensor:
    out = pair.theirs(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True)


def gate(pair: Pair) -> None:
    """32 greedy tokens of 3 prompts must be equal before anything is timed."""
    for seed, length in enumerate((5, 300, 1100)):
        ids = prompts(1, length, seed)
        engine = pair.engine(1, length + 64)
        mine = started(engine, ids, 33)
        while engine.unfinished():
            engine.step()
        logits, cache = their_prefill(pair, ids)
        token = logits.argmax(-1, keepdim=True)
        wanted = [int(token)]
        for _ in range(32):
            token = their_step(pair, token, cache)
            wanted.append(int(token))
        if mine[0] != wanted:
            raise GateError(f"greedy tokens after a prompt of {length}: {mine[0]}, transformers has {wanted}")


def peak_extra(work: Callable[[], object]) -> int:
    """Bytes that the process's resident memory rises above its present size while `work` runs."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def our_prefill(pair: Pair, ids: torch.Tensor) -> Engine:
    engine = pair.engine(len(ids), ids.shape[1] + 64)
    started(engine, ids, 1)
    return engine


def prefill(pair: Pair, length: int, rounds: int) -> tuple[Times, Times]:
    """Seconds to read one prompt of `length`: ours, theirs."""
    ids = prompts(1, length, 11)
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(timed(lambda: our_prefill(pair, ids)))
        theirs.append(timed(lambda: their_prefill(pair, ids)))
    return Times(mine), Times(theirs)


def decode(pair: Pair, batch: int, context: int, blocks: int = 5, steps: int = 8) -> tuple[Times, Times]:
    """Seconds a step of `batch` sequences at about `context` tokens: ours, theirs, in alternating blocks of steps."""
    ids = prompts(batch, context, 23)
    engine = pair.engine(batch, context + blocks * steps + 64)
    lists = started(engine, ids, blocks * steps + 32)
    logits, cache = their_prefill(pair, ids)
    token = logits.argmax(-1, keepdim=True)
    chosen, mine, theirs = [token], [], []
    for _ in range(blocks):
        for _ in range(steps):
            mine.append(timed(engine.step))
        for _ in range(steps):
            begin = time.perf_counter()
            token = their_step(pair, token, cache)
            theirs.append(time.perf_counter() - begin)
            chosen.append(token)
    wanted = torch.cat(chosen, 1).tolist()
    for row, tokens in enumerate(wanted):
        if lists[row][: len(tokens)] != tokens:
            raise GateError(f"batch {batch}: tokens of row {row} differ from transformers' while decoding")
    return Times(mine[steps:]), Times(theirs[steps:])


def contexts(pair: Pair, lengths: Sequence[int], blocks: int = 6, steps: int = 8) -> dict[int, Times]:
    """Seconds a decoded token at each context length, one sequence each, in alternating blocks."""
    engines = {}
    for length in lengths:
        engines[length] = pair.engine(1, length + blocks * steps + 64)
        started(engines[length], prompts(1, length, 31), blocks * steps + 32)
    found: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(blocks):
        for length, engine in engines.items():
            found[length] += [timed(engine.step) for _ in range(steps)]
    return {length: Times(values[steps:]) for length, values in found.items()}


@torch.inference_mode()
def experts(tokens: int, rounds: int = 12) -> tuple[Times, Times]:
    """Seconds of one layer's routed experts for `tokens` tokens routed at random: the table's row for a CPU, theirs."""
    from transformers import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingExperts

    torch.manual_seed(5)
    config = InklingTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=EXPERT_WIDTH, n_routed_experts=EXPERTS, num_hidden_layers=1
    )
    config._experts_implementation = "eager"
    module = InklingExperts(config)
    gate_up, down = (torch.randn(w.shape) * 0.05 for w in (module.gate_up_proj, module.down_proj))
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    interleaved = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
    w13 = ExpertWeight("bf16", interleaved, layout="interleaved")
    w2 = ExpertWeight("bf16", down, layout="plain")
    x = torch.randn(tokens, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K)
    small = ids.to(torch.int32)
    moe_experts = Ops.bind(Target.parse("cpu"), Facts(dtype="float32")).moe_experts
    difference = (moe_experts(x, w13, w2, small, weights) - module(x, ids, weights)).abs().max()
    if difference > 1e-4:
        raise GateError(f"experts differ from transformers' by {float(difference):.2g}")
    mine, theirs, inner = [], [], max(1, 64 // tokens)
    for _ in range(rounds):
        mine.append(timed(lambda: [moe_experts(x, w13, w2, small, weights) for _ in range(inner)]) / inner)
        theirs.append(timed(lambda: [module(x, ids, weights) for _ in range(inner)]) / inner)
    return Times(mine[2:]), Times(theirs[2:])


def speculative(files: int = 6, tokens: int = 96) -> tuple[Times, Times, float, list[float]]:
    """Seconds a token of the small trained model on held-out code, plain and with 2 drafts; mean accepted length, and
    the part of the drafts accepted at each position.
    """
    threads = torch.get_num_threads()
    # Products of the small model are so small that threads would wait for each other longer than they work.
    torch.set_num_threads(1)
    texts = [text[1500:2400] for _, text in sources(held=True) if len(text) > 3000][:files]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    models = [LLM(default_model(), dtype="float32", num_speculative_tokens=n, max_model_len=2048) for n in (0, 2)]
    for model in models:
        model.generate(texts[0], params)
    found: list[list[float]] = [[], []]
    accepted, steps = [0, 0], 0
    for text in texts:
        results = []
        for times, model in zip(found, models, strict=True):
            output = model.generate(text, params)[0]
            results.append(output.outputs[0].token_ids)
            times.append(1 / output.timings["tokens_per_second"])
        if results[0] != results[1]:
            raise GateError("speculative decoding changed the greedy tokens")
        accepted = [a + b for a, b in zip(accepted, output.timings["accepted"], strict=True)]
        steps += output.timings["steps"]
    torch.set_num_threads(threads)
    plain, drafted = (Times(times) for times in found)
    return plain, drafted, 1 + sum(accepted) / steps, [a / steps for a in accepted]


def run(console: Console) -> tuple[dict[str, Any], str]:
    """Gate, measure, print; returns the results and a readable report."""
    from cpu_report import render

    figures: dict[str, float] = {}
    series: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("building both models") as status:
        pair = Pair(Path(folder))
        status.update("gate: greedy tokens equal")
        gate(pair)
        for tokens in (1, 32, 512):
            status.update(f"experts alone, {tokens} tokens")
            mine, theirs = experts(tokens)
            figures[f"experts alone, {tokens} token{'s' * (tokens > 1)}, times faster"] = theirs.median / mine.median
            series[f"experts, {tokens} tokens"] = {"ours": mine.to_dict(), "transformers": theirs.to_dict()}
        for batch in (1, 2, 4, 8):
            status.update(f"decode, batch {batch}")
            mine, theirs = decode(pair, batch, CONTEXT if batch == 1 else 256)
            series[f"decode step, batch {batch}"] = {"ours": mine.to_dict(), "transformers": theirs.to_dict()}
            if batch in (1, 8):
                figures[f"decode, batch {batch}, times faster"] = theirs.median / mine.median
        for length in (512, 1024, 2048, PREFILL):
            status.update(f"prefill of {length} tokens")
            mine, theirs = prefill(pair, length, 3)
            series[f"prefill, {length} tokens"] = {"ours": mine.to_dict(), "transformers": theirs.to_dict()}
        figures["prefill of 4,096 tokens, times faster"] = theirs.median / mine.median
        ids = prompts(1, PREFILL, 11)
        memory = {
            "ours": peak_extra(lambda: our_prefill(pair, ids)),
            "transformers": peak_extra(lambda: their_prefill(pair, ids)),
        }
        series[f"peak extra bytes, prefill of {PREFILL}"] = memory
        figures["prefill of 4,096 tokens, part of the peak extra memory"] = memory["ours"] / memory["transformers"]
        status.update("decode at long contexts")
        long = contexts(pair, (CONTEXT, 4096, LONG_CONTEXT))
        series |= {f"decoded token, context {length}": {"ours": times.to_dict()} for length, times in long.items()}
        figures["decoded token at context 16,384 over 1,024"] = long[LONG_CONTEXT].median / long[CONTEXT].median
        status.update("speculative decoding of the small model")
        plain, drafted, length, accepted = speculative()
        series["small model, token"] = {"plain": plain.to_dict(), "2 drafts": drafted.to_dict()}
        series["small model, drafts accepted at each position"] = accepted
        figures["speculative over plain decode of the small model"] = plain.median / drafted.median
        figures["mean accepted length with 2 drafts"] = length
    table = Table("figure", "measured", "to reach", "", title="CPU, medians of interleaved runs")
    verdicts = {}
    for name, (bound, sense) in TARGETS.items():
        met = figures[name] >= bound if sense == "at least" else figures[name] <= bound
        verdicts[name] = {"measured": figures[name], "target": f"{sense} {bound:g}", "met": met}
        table.add_row(name, f"{figures[name]:.2f}", f"{sense} {bound:g}", "met" if met else "[red]missed[/red]")
    console.print(table)
    results = {"device": "cpu", "dtype": "float32", "figures": verdicts, "series": series}
    return results, render(results)
