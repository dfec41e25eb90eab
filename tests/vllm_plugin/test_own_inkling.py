"""vLLM's own Inkling as the oracle: the same checkpoint through vLLM with its model and with this package's.

See `own_inkling.py` for what a CPU makes of vLLM's. Head width 128, relative width 16 and bfloat16 are what it takes.
It indexes the convolutions' state by the width of their kernel, also where vLLM has enlarged that state's blocks
(vllm#51951): here sizes are such that their pages are the largest, and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import small_checkpoint
import soundfile
import torch
from comparison import Follower
from engines import Run, tokens
from PIL import Image
from reference import Reference
from safetensors.torch import load_file, save_file

from inkling_kernels.target import Target
from inkling_portable.facts import Facts
from inkling_portable.ops import Ops
from inkling_portable.vllm_plugin.policy import VARIABLE

SIZES: dict[str, Any] = {
    "hidden_size": 512, "head_dim": 128, "swa_head_dim": 128, "num_key_value_heads": 1, "swa_num_key_value_heads": 2,
    "d_rel": 16, "rel_extent": 32, "sliding_window_size": 16, "log_scaling_n_floor": 24, "n_routed_experts": 8,
}  # fmt: skip
ENGINE: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 48, "max_logprobs": -1}


class Both:
    """Runs a checkpoint with vLLM's own model and then with ours, which follows it where the router ties."""

    def __init__(self, run_engine: Run, model: Path, folder: Path, **options: Any) -> None:
        self.run_engine, self.model, self.engine = run_engine, model, ENGINE | options
        self.choices = str(folder / "choices")

    def own(self, *steps: dict[str, Any], **job: Any) -> dict[str, Any]:
        engine = self.engine | {"attention_backend": None}
        result = self.run_engine(self.model, list(steps), {VARIABLE: "off"}, engine=engine, own=self.choices, **job)
        assert "rows of its table" not in result["log"]
        return result

    def ours(self, *steps: dict[str, Any], **job: Any) -> dict[str, Any]:
        result = self.run_engine(self.model, list(steps), engine=self.engine, follow=self.choices, **job)
        assert "rows of its table" in result["log"]
        return result


def rms(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().mean(-1).sqrt()


def changed(*names: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if name.endswith(names):
                    value.copy_(by(value))

    return change


def no_log_scaling(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.log_scaling_n_floor = None


# Faults that another model of the same weights could have.
BROKEN: dict[str, Callable[[torch.nn.Module], None]] = {
    "bias + 1": changed("rel_logits_proj.proj", by=lambda value: value.roll(1, 1)),
    "taps reversed": changed("conv1d.weight", by=lambda value: value.flip(-1)),
    "router bias lost": changed("e_score_correction_bias", by=torch.zeros_like),
    "global scale lost": changed("gate.global_scale", by=torch.ones_like),
    "gate and up swapped": changed("experts.gate_up_proj", by=lambda value: value.roll(value.shape[1] // 2, 1)),
    "no tau": no_log_scaling,
}


def test_a_choice_is_followed_in_a_tie_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other model chose experts 0 and 2 for three tokens: where 1 and 2 tie, where 1 is clearly better, and for one
    that this model has not. Weights follow from the experts chosen."""
    logits = torch.tensor([[2, 1.001, 1, -1, 0.3, 0.2], [2, 1.5, 1, -1, 0.3, 0.2], [5, 1.001, 1, -1, 0.3, 0.2]])
    save_file({"logits": logits[:2].clone(), "ids": torch.tensor([[2, 0], [2, 0]])}, tmp_path / "choices")
    monkeypatch.setattr(Ops, "bind", Ops.bind)
    follower = Follower(str(tmp_path / "choices"))
    ops = Ops.bind(Target.parse("cpu"), Facts(dtype="float32", kv_dtype="float32"), {})
    ids, weights, sinks = ops.routing(logits, torch.zeros(4), torch.ones(1), top_k=2, route_scale=1.0)
    assert [set(row) for row in ids.tolist()] == [{0, 2}, {0, 1}, {0, 1}]
    assert len(follower.ties) == 1
    right = torch.nn.functional.logsigmoid(logits[0, [0, 2, 4, 5]]).softmax(0)
    torch.testing.assert_close(torch.cat([weights[0][ids[0].argsort()], sinks[0]]), right)


@pytest.mark.slow
@pytest.mark.usefixtures("in_torch")
def test_text(run_engine: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ragged prompts in chunks, longer than window, extent and floor of the log scaling, and ten steps of decoding.

    How far vLLM's log-probabilities lie from those of Transformers in float32, in the median of all positions, is what
    bfloat16 costs. At every position, of prompts and of what was generated, ours lie within three times that of vLLM's;
    those of faulty models do not. Greedy tokens are equal up to one at which the two likeliest are as close as that."""
    config = small_checkpoint.small_config(depths=0, **SIZES)
    model = checkpoints.write_random(tmp_path / "model", config, small_checkpoint.small_tokenizer())
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (n,), generator=generator).tolist() for n in (70, 23, 3, 1)]
    both, step = Both(run_engine, model, tmp_path), {"prompts": prompts, "max_tokens": 10}
    said = tokens(both.own(step | {"scores": str(tmp_path / "theirs")})["steps"][0])
    texts = [[*prompt, *found] for prompt, found in zip(prompts, said, strict=True)]
    told = {"prompts": [text[:-1] for text in texts], "max_tokens": 1, "scores": str(tmp_path / "ours")}
    result = both.ours(step, told)

    def together(scores: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([scores[str(i)] for i in range(len(prompts))])

    def exact(change: Callable[[torch.nn.Module], None] | None = None) -> torch.Tensor:
        reference = Reference(model)
        if change is not None:
            change(reference.model)
        return torch.cat([reference.scores(text) for text in texts])

    scores = load_file(tmp_path / "theirs")
    theirs, ours = together(scores), together(load_file(tmp_path / "ours"))
    bound = 3 * rms(theirs - exact()).median()
    apart = {"ours": rms(theirs - ours)} | {name: rms(theirs - exact(change)) for name, change in BROKEN.items()}
    lines = [f"{name}: {error.max() / bound:.2f} of the tolerance" for name, error in apart.items()]
    lines.append(f"router ties followed, scores apart by {[round(tie, 5) for tie in result['ties']]}")
    for i, (found, greedy) in enumerate(zip(said, tokens(result["steps"][0]), strict=True)):
        first = next((j for j, pair in enumerate(zip(found, greedy, strict=False)) if len(set(pair)) > 1), None)
        if first is not None:
            row = scores[str(i)][len(prompts[i]) - 1 + first]
            margin = row[found[first]] - row[greedy[first]]
            lines.append(f"request {i}, token {first}: {found[first]} or {greedy[first]}, apart by {margin:.5f}")
            assert margin < bound
    with capsys.disabled():
        print("", *lines, sep="\n  ")
    caught = [name for name, error in apart.items() if error.max() > bound]
    assert caught == list(BROKEN)


@pytest.mark.slow
@pytest.mark.usefixtures("in_torch")
def test_drafts(run_engine: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two prediction depths: the same tokens from the same drafts, and the logits behind every draft, of either depth,
    within three hundredths of their spread; one depth's are not the other's. Drafts that are refused are the business
    of test_engine.py: here both models' are all accepted."""
    model = small_checkpoint.write_small(tmp_path / "model", depths=2, **SIZES)
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    both = Both(run_engine, model, tmp_path, speculative_config=speculative)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 257, (n,), generator=generator).tolist() for n in (40, 5)]
    step = {"prompts": prompts, "max_tokens": 12}
    files = [str(tmp_path / name) for name in ("theirs", "mine")]
    own, ours = both.own(step, drafts=files[0]), both.ours(step, drafts=files[1])
    assert tokens(own["steps"][0]) == tokens(ours["steps"][0])
    names = [f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted")]
    counts = [[result["metrics"][name] for name in names] for result in (own, ours)]
    assert counts[0] == counts[1]
    assert counts[0][1] > 10
    theirs, mine = (list(load_file(file).values()) for file in files)
    assert len(theirs) == len(mine) > 8
    spread = torch.cat(theirs).std()
    apart = [float((rms(a - b) / spread).max()) for a, b in zip(theirs, mine, strict=True)]
    with capsys.disabled():
        print(f"\n  {len(apart)} times drafted, logits / spread apart by {min(apart):.4f} to {max(apart):.4f}")
        print(f"  router ties followed, scores apart by {[round(tie, 5) for tie in ours['ties']]}")
    assert max(apart) < 0.03
    assert (rms(theirs[0] - theirs[1]) / spread).min() > 0.3


@pytest.mark.slow
@pytest.mark.usefixtures("in_torch")
def test_media(run_engine: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two images and a sound, through vLLM's towers and through ours: the likeliest of 200 058 tokens behind each have
    the same log-probabilities, as far as bfloat16's rounding of them goes, and one image's are not the other's."""
    sizes = SIZES | {"hidden_size": 192, "swa_num_key_value_heads": 1}
    model = checkpoints.write_media(tmp_path / "model", **sizes)
    rng = np.random.default_rng(3)
    prompts: list[dict[str, Any]] = []
    for i in range(2):
        file = tmp_path / f"{i}.png"
        Image.fromarray(rng.integers(0, 256, (40, 30 + 20 * i, 3), dtype=np.uint8)).save(file)
        prompts.append({"tokens": [5, 200005, 7, 9], "image": str(file)})
    soundfile.write(tmp_path / "sound.wav", rng.standard_normal(12_000).clip(-1, 1) * 0.3, 16_000)
    prompts.append({"tokens": [5, 200020, 7, 9], "audio": str(tmp_path / "sound.wav")})
    step = {"prompts": prompts, "max_tokens": 4, "top": 16}
    both = Both(run_engine, model, tmp_path, max_num_batched_tokens=64, skip_mm_profiling=True)
    own, ours = both.own(step)["steps"][0], both.ours(step)["steps"][0]

    def distance(one: dict[str, float], other: dict[str, float]) -> float:
        """The mean over tokens that are among the likeliest of both; infinite where these are not most of them."""
        shared = one.keys() & other.keys()
        return sum(abs(one[token] - other[token]) for token in shared) / len(shared) if len(shared) > 12 else np.inf

    found = []
    for theirs, mine in zip(own, ours, strict=True):
        same = [*takewhile(lambda pair: pair[0] == pair[1], zip(theirs["tokens"], mine["tokens"], strict=True))]
        rows = range(min(len(same) + 1, len(mine["tokens"])))
        found += [distance(theirs["top"][row], mine["top"][row]) for row in rows]
    with capsys.disabled():
        print("\n  log-probabilities apart by", [round(each, 4) for each in found])
    assert max(found) < 0.02
    assert distance(own[0]["top"][0], own[1]["top"][0]) > 0.1
