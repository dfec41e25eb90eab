"""Train the small Inkling that comes with the package, on the standard library of the Python that runs this.

    python benchmarks/train_tiny.py train --minutes 50 --out OUT      # tokenizer, weights, results/tiny_training.json
    python benchmarks/train_tiny.py evaluate --model OUT              # perplexity of its bf16, NVFP4 and MXFP4 copies

The text is every `.py` file of the standard library (sources and docstrings). One file in twenty, chosen by the hash
of its name, is held out: it is seen neither by the tokenizer nor by the model. The model has every feature of the
large ones: full and sliding layers, a dense and several expert layers with sinks, log scaling inside the training
length, a padded vocabulary, and two multi-token-prediction depths, all trained together through the reference
operations of the shared model.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.cache import Batch
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.config import InklingConfig, MTPConfig
from inkling_portable.facts import Facts
from inkling_portable.heldout import held_out, sources
from inkling_portable.llm import facts_of
from inkling_portable.model import Inkling
from inkling_portable.mtp import MultiTokenPrediction
from inkling_portable.ops import Ops
from inkling_portable.quantize import quantize_checkpoint
from inkling_portable.weights import load_tensors

RESULTS = Path(__file__).parent / "results" / "tiny_training.json"
END, VOCABULARY, PADDED = "<|endoftext|>", 4096, 4160
LENGTH, SEQUENCES = 512, 4
DEPTHS = 2
HELD_OUT_TOKENS = 65_536

CONFIG = InklingConfig(
    vocab_size=PADDED,
    unpadded_vocab_size=VOCABULARY,
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=32,
    sliding_window_size=128,
    d_rel=16,
    rel_extent=256,
    log_scaling_n_floor=256,
    log_scaling_alpha=0.1,
    conv_kernel_size=4,
    local_layer_ids=(0, 1, 3, 4),
    dense_layer_ids=(0,),
    intermediate_size=384,
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=2,
    route_scale=2.0,
    rms_norm_eps=1e-6,
    logits_mup_width_multiplier=2.0,
    max_position_embeddings=4096,
    eos_token_id=(0,),
    mtp=MTPConfig(num_layers=DEPTHS, local_layer_ids=(0,), chain_hidden_post_norm=True),
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` tokens; id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts one after another, each ended by token 0."""
    ids: list[int] = []
    for item in tokenizer.encode_batch(texts):
        ids += item.ids
        ids.append(0)
    return torch.tensor(ids)


def build(ops: Ops) -> tuple[Inkling, MultiTokenPrediction]:
    """The model with its depths, initialised for training."""
    model = Inkling(CONFIG, ops, dtype=torch.float32)
    mtp = MultiTokenPrediction(CONFIG, ops, DEPTHS, dtype=torch.float32)
    for experts in model.experts().values():
        for name in ("w13", "w2"):
            weight = getattr(experts, name)
            data = nn.Parameter(torch.empty(weight.data.shape))
            experts.hold(name, ExpertWeight("bf16", data, layout=weight.layout))
    deep = (2 * CONFIG.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *mtp.named_parameters()]:
            leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
            if leaf in ("q_norm", "k_norm"):
                p.fill_(32**0.25)  # with scores scaled by 1/d this starts attention where 1/sqrt(d) would
            elif leaf.endswith(("norm", "scale")):
                p.fill_(1.0)
            elif leaf.endswith("sconv"):
                p.normal_(0, 0.1)
            elif leaf == "gate_bias":
                p.zero_()
            elif leaf in ("embed", "unembed"):
                p.normal_(0, 0.05)
            else:
                shrink = deep if leaf in ("wo", "w2", "w2_data", "shared_w2") else 1.0
                p.normal_(0, shrink * p.shape[-1] ** -0.5)
    return model, mtp


def losses(model: Inkling, mtp: MultiTokenPrediction, rows: torch.Tensor) -> list[torch.Tensor]:
    """Cross entropy of the next token and of each depth's token, for `rows` `[B, LENGTH + 1 + DEPTHS]`.

    The depths are scored on every fourth row: their heads are the largest products of a step and share their
    gradient's sense.
    """
    sequences, width = len(rows), rows.shape[1] - 1 - DEPTHS
    batch = Batch.uncached(sequences, width)
    hidden = model(model.embedding(rows[:, :width].flatten()), batch)
    found = [F.cross_entropy(model.logits(hidden), rows[:, 1 : width + 1].flatten())]
    for depth in range(DEPTHS):
        hidden = mtp(depth, hidden, model.embedding(rows[:, 1 + depth : 1 + depth + width].flatten()), batch)
        some = slice(depth, None, 4) if model.training else slice(None)
        target = rows[:, 2 + depth : 2 + depth + width].flatten()
        found.append(F.cross_entropy(model.logits(hidden[some]), target[some]))
    return found


class Balance:
    """Keeps expert loads even by moving the routers' selection biases, which never weigh (no auxiliary loss)."""

    def __init__(self, model: Inkling, step: float = 2e-3) -> None:
        self.step, self.layers = step, [layer for layer in model.layers if layer.spec.sparse]
        self.calls: list[torch.Tensor] = []
        route = model.ops.routing

        def routing(*args, **kwargs):  # type: ignore[no-untyped-def]
            found = route(*args, **kwargs)
            self.calls.append(found[0])
            return found

        object.__setattr__(model.ops, "routing", routing)

    def update(self) -> float:
        """Move the biases after a step; returns the largest load relative to an even one."""
        worst = 0.0
        for layer, ids in zip(self.layers, self.calls, strict=True):
            load = torch.bincount(ids.flatten().long(), minlength=CONFIG.n_routed_experts).float()
            load /= load.mean()
            layer.mlp.gate_bias += self.step * torch.sign(1 - load)
            worst = max(worst, float(load.max()))
        self.calls.clear()
        return worst


def canonical(model: Inkling, mtp: MultiTokenPrediction) -> Iterator[tuple[str, torch.Tensor | ExpertWeight]]:
    """The trained weights under their canonical names, the head padded again."""
    for name, tensor in (model.tensors() | mtp.tensors()).items():
        tensor = tensor.detach()
        yield name, F.pad(tensor, (0, 0, 0, PADDED - VOCABULARY)) if name == "llm.unembed.weight" else tensor
    for prefix, experts in model.experts().items():
        for name in ("w13", "w2"):
            weight = getattr(experts, name)
            yield f"{prefix}.{name}", ExpertWeight("bf16", weight.data.detach(), layout=weight.layout)


def train(out: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    files = list(sources())
    training = [text for name, text in files if not held_out(name)]
    tokenizer = train_tokenizer(training)
    data = encode(tokenizer, training)
    test = encode(tokenizer, [text for name, text in files if held_out(name)])
    print(f"{len(files)} files, {len(data):,} training tokens, {len(test):,} held out")
    ops = Ops.bind(Target.parse("cpu"), Facts(dtype="float32"))
    model, mtp = build(ops)
    balance = Balance(model)
    parameters = [p for p in [*model.parameters(), *mtp.parameters()] if p.requires_grad]
    print(f"{sum(p.numel() for p in parameters):,} parameters")
    matrices = [p for p in parameters if p.dim() >= 2 and p.shape[-1] > CONFIG.conv_kernel_size]
    others = [p for p in parameters if not any(p is m for m in matrices)]
    peak = 4e-3
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        fused=True,
    )
    curve: list[dict[str, float]] = []
    started, step, width = time.perf_counter(), 0, LENGTH + 1 + DEPTHS
    with Progress(
        TextColumn("step {task.fields[step]} loss {task.fields[loss]:.3f}"), BarColumn(), TimeElapsedColumn()
    ) as bar:
        task = bar.add_task("train", total=1.0, step=0, loss=float("nan"))
        while (done := (time.perf_counter() - started) / (60 * minutes)) < 1:
            rate = peak * min(1.0, (step + 1) / 100) * max(0.02, 1 - done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            at = torch.randint(len(data) - width, (SEQUENCES,))
            rows = torch.stack([data[a : a + width] for a in at.tolist()])
            found = losses(model, mtp, rows)
            loss = found[0] + 0.3 * sum(found[1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            load = balance.update()
            step += 1
            if step % 25 == 0:
                point = {"step": step, "seconds": round(time.perf_counter() - started, 1), "load": round(load, 2)}
                point |= {f"loss{i}": round(float(x.detach()), 4) for i, x in enumerate(found)} | {
                    "grad_norm": round(float(norm), 3)
                }
                curve.append(point)
                bar.update(task, completed=done, step=step, loss=point["loss0"])
                if step % 200 == 0:
                    print(point, flush=True)
    write_checkpoint(out, CONFIG, canonical(model, mtp))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    RESULTS.write_text(
        json.dumps(
            {
                "what": "training of the small Inkling that comes with the package",
                "device": "cpu",
                "threads": torch.get_num_threads(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "parameters": sum(p.numel() for p in parameters),
                "training_tokens": len(data),
                "held_out_tokens": len(test),
                "tokens_seen": step * SEQUENCES * LENGTH,
                "minutes": round((time.perf_counter() - started) / 60, 1),
                "seed": seed,
                "curve": curve,
            },
            indent=1,
        )
        + "\n"
    )


def perplexity(folder: Path, tokens: torch.Tensor) -> dict[str, float]:
    """Perplexity of the next token and of each depth's over `tokens`, in windows of the training length."""
    checkpoint = Checkpoint.open(folder)
    ops = Ops.bind(Target.parse("cpu"), facts_of(checkpoint.config, "bf16", torch.float32, 16))
    model = Inkling(checkpoint.config, ops, dtype=torch.float32).eval()
    mtp = MultiTokenPrediction(checkpoint.config, ops, DEPTHS, dtype=torch.float32).eval()
    for name, value in load_tensors(checkpoint, torch.float32, "cpu"):
        (mtp if name.startswith("mtp.") else model).load([(name, value)])
    width = LENGTH + 1 + DEPTHS
    windows = [tokens[a : a + width] for a in range(0, len(tokens) - width, LENGTH)]
    total = [0.0] * (1 + DEPTHS)
    with torch.inference_mode():
        for i in range(0, len(windows), SEQUENCES):
            group = torch.stack(windows[i : i + SEQUENCES])
            for j, loss in enumerate(losses(model, mtp, group)):
                total[j] += float(loss) * len(group)
    names = ["next token", *(f"depth {d}" for d in range(DEPTHS))]
    return {name: round(math.exp(t / len(windows)), 3) for name, t in zip(names, total, strict=True)}


def evaluate(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = encode(tokenizer, [text for name, text in sources() if held_out(name)])[:HELD_OUT_TOKENS]
    found = {"bf16": perplexity(folder, tokens)}
    with tempfile.TemporaryDirectory() as scratch:
        for fmt in ("nvfp4", "mxfp4"):
            quantize_checkpoint(folder, Path(scratch) / fmt, fmt)
            found[fmt] = perplexity(Path(scratch) / fmt, tokens)
    for fmt, values in found.items():
        print(fmt, values)
    results = json.loads(RESULTS.read_text())
    results["perplexity"] = {"held_out_tokens": len(tokens), **found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="train and write a checkpoint")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--minutes", type=float, default=50.0)
    one.add_argument("--seed", type=int, default=0)
    two = commands.add_parser("evaluate", help="perplexity on held-out files in three formats")
    two.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "train":
        train(args.out, args.minutes, args.seed)
    else:
        evaluate(args.model)


if __name__ == "__main__":
    main()
