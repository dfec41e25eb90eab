"""How to serve a model on given devices: the `vllm serve` command, its environment, and why each part is there.

Sizes come from `inkling_portable.plan`: on one node the smallest number of devices that holds the model and its cache;
on several, tensor parallelism over all of them. vLLM's options are those of vLLM 0.33 (`vllm/engine/arg_utils.py`).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Any

from inkling_kernels.target import Target
from inkling_portable import plan as plans
from inkling_portable.config import InklingConfig
from inkling_portable.plan import GIB, USABLE, Plan, Wish
from inkling_rocm.environment import LAUNCH


@dataclass(frozen=True)
class Recipe:
    """`commands`: one for each node. `environment`: name -> value. `notes`: a sentence for whatever is no matter of
    course."""

    plan: Plan
    target: Target
    environment: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "target": str(self.target), "environment": self.environment, "commands": [list(c) for c in self.commands],
            "notes": list(self.notes), "plan": self.plan.to_dict(),
        }  # fmt: skip

    def script(self) -> str:
        """Shell lines, one block a node."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        blocks = []
        for node, command in enumerate(self.commands):
            title = [f"# on node {node}"] if len(self.commands) > 1 else []
            blocks.append("\n".join([*title, *exports, _folded(command)]))
        return "\n\n".join(blocks)


def recipe(
    model: str,
    config: InklingConfig,
    wish: Wish,
    target: Target,
    *,
    nodes: int = 1,
    gpus: int = 8,
    memory: int | None = None,
) -> Recipe:
    """How to serve `model` (a folder or hub id, of configuration `config`) on `nodes` nodes of `gpus` devices.

    `wish.size` is worked out. ValueError, with what would fit, where nothing does, or where the table has no
    implementation for the device.
    """
    for name, value in (("nodes", nodes), ("gpus", gpus)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    memory = plans.memory_of(target) if memory is None else memory
    found = _fitting(config, wish, target, nodes, gpus, memory)
    size = found.wish.size
    arguments = ["vllm", "serve", model, "--attention-backend", "CUSTOM", "--tensor-parallel-size", str(size)]
    arguments += ["--max-model-len", str(wish.max_model_len), "--max-num-seqs", str(wish.max_num_seqs)]
    arguments += ["--gpu-memory-utilization", f"{USABLE:g}"]
    if wish.kv_itemsize == 1:
        arguments += ["--kv-cache-dtype", "fp8"]
    if wish.drafts:
        arguments += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": wish.drafts})]
    commands = [tuple(arguments)]
    if nodes > 1:
        shared = [*arguments, "--nnodes", str(nodes), "--master-addr", "$NODE_0"]
        commands = [(*shared, "--node-rank", str(node), *(("--headless",) if node else ())) for node in range(nodes)]
    environment = {"VLLM_PLUGINS": "inkling_portable"}
    if target.vendor == "hip":
        environment |= {name: value for name, (value, _) in LAUNCH.items()}
    return Recipe(found, target, environment, tuple(commands), tuple(_notes(found, target, nodes, memory)))


def _fitting(config: InklingConfig, wish: Wish, target: Target, nodes: int, gpus: int, memory: int) -> Plan:
    sizes = [nodes * gpus] if nodes > 1 else [size for size in plans.SIZES if size <= gpus]
    refusals = []
    for size in sizes:
        found = plans.attempt(config, replace(wish, size=size), memory)
        if isinstance(found, str):
            refusals.append(f"x {size}: {found}")
        elif missing := plans.unsupported(config, found.wish, target):
            refusals.append(f"x {size}: {missing}")
        elif found.fits:
            return found
        else:
            refusals.append(f"x {size}: {found.needed / GIB:.0f} GiB on each of {memory * USABLE / GIB:.0f}")
    # Fewer devices than asked for are no answer: what would fit is looked for from the largest on.
    largest = replace(wish, size=sizes[-1])
    others = (
        plans.alternatives(config, largest, memory) if isinstance(plans.attempt(config, largest, memory), Plan) else ()
    )
    offers = [f"{plans.words(other.wish)} would fit" for other in others]
    raise ValueError(f"the model fits no number of {target} here ({'; '.join([*refusals, *offers])})")


def _notes(found: Plan, target: Target, nodes: int, memory: int) -> list[str]:
    wish = found.wish
    notes = [f"each device holds {found.needed / GIB:.0f} GiB of {memory / GIB:.0f}: {plans.words(wish)}"]
    if nodes > 1:
        notes.append("NODE_0 is the address of the first node, which is the one that answers requests")
    if target.vendor == "hip":
        notes += [f"{name}: {why}" for name, (_, why) in LAUNCH.items()]
    return notes


def _folded(command: tuple[str, ...]) -> str:
    """One option with its value a line; a variable of the shell stays one."""
    words = [word if word.startswith("$") else shlex.quote(word) for word in command]
    lines, current = [], words[:3]
    for word, plain in zip(words[3:], command[3:], strict=True):
        if plain.startswith("--"):
            lines.append(" ".join(current))
            current = [word]
        else:
            current.append(word)
    return " \\\n    ".join([*lines, " ".join(current)])
