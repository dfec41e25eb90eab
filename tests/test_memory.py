"""Peak resident memory of loading and of quantising, measured by the kernel in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import InklingForCausalLM, InklingTextConfig

HIDDEN, WIDTH, EXPERTS = 512, 768, 80

LOAD = """
import sys, torch
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.weights import load_tensors

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

warm = dict(load_tensors(Checkpoint.open(sys.argv[1]), torch.bfloat16))
before = peak()
held = dict(load_tensors(Checkpoint.open(sys.argv[2]), torch.bfloat16))
print(sum(t.nbytes for t in held.values()), peak() - before)
"""

QUANTISE = """
import sys
from inkling_portable.quantize import quantize_checkpoint

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

quantize_checkpoint(sys.argv[1], sys.argv[3] + "-warm", "nvfp4")
before = peak()
quantize_checkpoint(sys.argv[2], sys.argv[3], "nvfp4")
print(peak() - before)
"""


def write_model(folder: Path, hidden: int, width: int, experts: int, dtype: torch.dtype) -> Path:
    config = InklingTextConfig(
        vocab_size=1024, hidden_size=hidden, num_hidden_layers=2, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=16,
        sliding_window_size=8, rel_extent=16, local_layer_ids=[0], mlp_layer_types=["dense", "sparse"],
        intermediate_size=64, moe_intermediate_size=width, n_routed_experts=experts, num_experts_per_tok=2,
        n_shared_experts=2,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = InklingForCausalLM(config)
    tensors = {name: torch.full(t.shape, 0.5, dtype=dtype) for name, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`large`: 190 MB in bf16, nearly all of it the experts of one layer; `small` warms a process up."""
    root = tmp_path_factory.mktemp("memory")
    return {
        "small": write_model(root / "small", 64, 32, 4, torch.bfloat16),
        "large": write_model(root / "large", HIDDEN, WIDTH, EXPERTS, torch.bfloat16),
        "large_f32": write_model(root / "large_f32", HIDDEN, WIDTH, EXPERTS, torch.float32),
    }


def run(script: str, *paths: Path) -> list[int]:
    command = [sys.executable, "-c", script, *map(str, paths)]
    return list(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


@pytest.fixture(scope="module")
def quantised(folders: dict[str, Path]) -> tuple[Path, int]:
    """`large` in NVFP4, and the peak of making it."""
    out = folders["large"].with_name("packed")
    (peak,) = run(QUANTISE, folders["small"], folders["large"], out)
    return out, peak


def test_quantising_holds_a_few_experts(quantised: tuple[Path, int]) -> None:
    expert = 2 * WIDTH * HIDDEN * 4
    assert quantised[1] < 20 * expert, f"{quantised[1] / expert:.1f} experts of {EXPERTS} in float32"


@pytest.mark.parametrize("source", ["large", "large_f32", "packed"])
def test_loading_holds_the_weights_and_little_more(
    folders: dict[str, Path], quantised: tuple[Path, int], source: str
) -> None:
    held, peak = run(LOAD, folders["small"], quantised[0] if source == "packed" else folders[source])
    assert held > (180e6 if source != "packed" else 50e6)
    assert peak <= 1.15 * held, f"{peak / held:.3f} of the weights"
    assert peak > 0.8 * held, "nothing was measured"
