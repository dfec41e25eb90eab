"""The text model against Transformers' Inkling, on checkpoints that either of them wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import InklingConfig as OracleConfig
from transformers import InklingForCausalLM, InklingForConditionalGeneration, InklingTextConfig

from inkling_kernels.target import Target
from inkling_portable import LLM, SamplingParams
from inkling_portable.cache import FULL, SLIDING, Batch, Cache
from inkling_portable.checkpoint import Checkpoint
from inkling_portable.checkpoint_writer import write_checkpoint
from inkling_portable.facts import Facts
from inkling_portable.model import Inkling
from inkling_portable.ops import Ops
from inkling_portable.weights import load_tensors

VOCABULARY, WINDOW, EXTENT, FLOOR = 120, 64, 128, 100
TOLERANCE = 2e-4
OPS = Ops.bind(Target.parse("cpu"), Facts(dtype="float32", kv_dtype="float32"), {})


def text_config(**changes: Any) -> InklingTextConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 128, "unpadded_vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_head_dim": 16, "sliding_window_size": WINDOW, "rel_extent": EXTENT,
        "log_scaling_n_floor": FLOOR, "local_layer_ids": [0, 2], "intermediate_size": 96, "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "logits_mup_width_multiplier": 2.0, "max_position_embeddings": 2048,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return InklingTextConfig(**(sizes | changes))


def randomise(model: torch.nn.Module) -> None:
    """Values that make every part matter: with ones and zeros a lost norm, scale or bias would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "scale" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "conv1d" in name:
                parameter.normal_(0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.uniform_(-0.2, 0.2, generator=generator)


@pytest.fixture(scope="module")
def oracle() -> InklingForCausalLM:
    torch.manual_seed(0)
    model = InklingForCausalLM(text_config()).eval()
    model.set_attn_implementation("eager")
    randomise(model)
    return model


@pytest.fixture(scope="module")
def folders(oracle: InklingForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, as Transformers saves it and as we write it in both spellings."""
    root = tmp_path_factory.mktemp("checkpoints")
    oracle.save_pretrained(root / "saved")
    for spelling in ("original", "transformers"):
        with Checkpoint.open(root / "saved") as source:
            write_checkpoint(
                root / spelling, source.config, load_tensors(source, torch.float32), dtype=torch.float32,
                spelling=spelling, config_dict=None if spelling == "original" else oracle.config.to_dict(),
            )  # fmt: skip
    return {name: root / name for name in ("saved", "original", "transformers")}


def load(folder: Path, ops: Ops = OPS, **changes: Any) -> Inkling:
    with Checkpoint.open(folder) as checkpoint:
        model = Inkling(checkpoint.config.replace(**changes), ops, dtype=torch.float32)
        model.load(load_tensors(checkpoint, torch.float32, sections=("text",)))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Inkling:
    return load(folders["original"])


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def whole(model: Inkling, ids: Sequence[int]) -> torch.Tensor:
    """Logits of all positions in one pass that keeps nothing."""
    return model.logits(model(model.embedding(torch.tensor(ids)), Batch.uncached(1, len(ids))))


@torch.inference_mode()
def expected(oracle: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    return oracle(input_ids=torch.tensor([ids])).logits[0, :, :VOCABULARY]


@pytest.mark.parametrize("kind", ["saved", "original", "transformers"])
def test_logits(oracle: InklingForCausalLM, folders: dict[str, Path], kind: str) -> None:
    loaded = load(folders[kind])
    for length in (1, 3, 4, 63, 64, 65, 200, 1100):
        ids = tokens(length, length)
        reference = expected(oracle, ids)
        assert reference.abs().max() > 1
        torch.testing.assert_close(whole(loaded, ids), reference, rtol=0, atol=TOLERANCE)


def test_transformers_reads_what_we_write(oracle: InklingForCausalLM, folders: dict[str, Path]) -> None:
    again = InklingForCausalLM.from_pretrained(folders["transformers"]).eval()
    ids = tokens(70, 0)
    assert torch.equal(expected(again, ids), expected(oracle, ids))


def test_both_config_spellings_read_the_same_file(tmp_path: Path) -> None:
    """Transformers' multimodal model saves the released tensor names beside its own spelling of the configuration."""
    torch.manual_seed(3)
    towers = {"vision_config": {"patch_size": 40, "num_hidden_layers": 2}, "audio_config": {"mel_vocab_size": 16}}
    config = OracleConfig(text_config=text_config(num_mtp_layers=1).to_dict(), **towers)
    multimodal = InklingForConditionalGeneration(config).eval()
    randomise(multimodal)
    multimodal.save_pretrained(tmp_path / "theirs")
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    loaded = load(tmp_path / "theirs")
    (tmp_path / "ours/config.json").write_text(json.dumps(loaded.config.to_dict()))
    spelt = [json.loads((tmp_path / name / "config.json").read_text())["text_config"] for name in ("theirs", "ours")]
    assert ["moe_intermediate_size" in text for text in spelt] == [True, False]
    ids = tokens(130, 4)
    logits = whole(loaded, ids)
    torch.testing.assert_close(logits, expected(multimodal, ids), rtol=0, atol=TOLERANCE)
    assert torch.equal(whole(load(tmp_path / "ours"), ids), logits)


LENGTHS = (1, 3, 4, 63, 64, 65, 200, 700)


@pytest.mark.parametrize(("chunk", "page", "rounds"), [(512, 16, 2), (30, 128, 1)])
def test_greedy_tokens_of_a_batch(
    oracle: InklingForCausalLM, folders: dict[str, Path], chunk: int, page: int, rounds: int
) -> None:
    """Eight prompts at once, 128 tokens each; in a second round behind their own prefixes.

    Greedy decoding is right if, given the prompt and our tokens, Transformers' likeliest token is ours at each place.
    """
    llm = LLM(
        folders["original"], dtype="float32", max_model_len=900, max_num_batched_tokens=chunk, block_size=page,
        max_num_seqs=8,
    )  # fmt: skip
    prompts = [tokens(n, 10 + n) for n in LENGTHS]
    params = SamplingParams(max_tokens=128, temperature=0)
    for repeat in range(rounds):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for prompt, output in zip(prompts, outputs, strict=True):
            found = output.outputs[0].token_ids
            assert len(found) == 128
            best = expected(oracle, prompt + found)[len(prompt) - 1 : -1].argmax(-1)
            assert found == best.tolist(), f"prompt of {len(prompt)}"
            # State is kept at the last page boundary of a prompt, and the last token is always computed again.
            known = len(prompt) // page * page if len(prompt) % page else 0
            assert output.timings["reused_tokens"] >= known * repeat


def test_greedy_tokens_of_transformers_own_loop(oracle: InklingForCausalLM, folders: dict[str, Path]) -> None:
    prompt = tokens(70, 17)
    reference = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 70:].tolist()
    llm = LLM(folders["saved"], dtype="float32", max_model_len=100)
    output = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=24, temperature=0))
    assert output[0].outputs[0].token_ids == reference


@torch.inference_mode()
def in_pieces(model: Inkling, cache: Cache, ids: Sequence[int], pieces: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits of the positions that were computed: `pieces[i]` rows in step i, behind what the cache still knew."""
    seq = cache.open(ids, len(ids), chunk)
    outs, plan = [], list(pieces)
    while seq.length < len(ids):
        n = min(plan.pop(0) if plan else chunk, len(ids) - seq.length)
        batch = cache.batch([seq], [n])
        outs.append(model.logits(model(model.embedding(torch.tensor(ids[seq.length :][:n])), batch)))
        cache.advance(seq, n)
        cache.retire(seq)
        cache.register(seq, ids)
    cache.close(seq)
    return torch.cat(outs)


def new_cache(model: Inkling, page: int, room: int = 1200) -> Cache:
    """A cache whose every number is NaN until it is written."""
    cache = Cache(
        model.config, page_size=page, num_pages={FULL: room // page + 1, SLIDING: room // page + 1}, max_seqs=1,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    for layer in cache.layers:
        for tensor in (layer.k_pages, layer.v_pages, *layer.rings):
            tensor.fill_(float("nan"))
    return cache


def close_to(found: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)
    assert torch.equal(found.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("pieces", [[1030], [1029, 1], [3, 1027], [512, 512, 6], [1] * 8 + [1022]], ids=str)
def test_named_chunkings(model: Inkling, pieces: list[int]) -> None:
    ids = tokens(1030, 20)
    close_to(in_pieces(model, new_cache(model, 32), ids, pieces, 1030), whole(model, ids))


def test_token_by_token(model: Inkling) -> None:
    ids = tokens(150, 21)
    close_to(in_pieces(model, new_cache(model, 16), ids, [1] * 150, 1), whole(model, ids))


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 260),
    shared=st.integers(0, 260),
    pieces=st.lists(st.integers(1, 90), max_size=12),
    others=st.lists(st.integers(1, 90), max_size=12),
    page=st.sampled_from([4, 16, 64]),
    seed=st.integers(0, 2**31),
)
def test_any_chunking_and_any_prefix(
    model: Inkling, length: int, shared: int, pieces: list[int], others: list[int], page: int, seed: int
) -> None:
    """A prompt in pieces; then another with the same beginning, behind what is left of the first, in other pieces."""
    first = tokens(length, seed)
    second = first[:shared] + tokens(30, seed + 1)
    cache = new_cache(model, page)
    close_to(in_pieces(model, cache, first, pieces, 90), whole(model, first))
    found = in_pieces(model, cache, second, others, 90)
    close_to(found, whole(model, second)[len(second) - len(found) :])


def contiguous(weight: torch.Tensor) -> None:
    """Order the rows so that an interleaved reader takes the halves of what was there for gate and up."""
    gate, up = weight.chunk(2, -2)
    weight.copy_(torch.stack([gate, up], -2).flatten(-3, -2))


def edit(change: Callable[[Any], None]) -> Callable[[Inkling], None]:
    def apply(model: Inkling) -> None:
        for layer in model.layers:
            change(layer)

    return apply


def sparse(change: Callable[[Any], None]) -> Callable[[Inkling], None]:
    return edit(lambda layer: change(layer.mlp) if layer.spec.sparse else None)


def shifted(layer: Any, by: int) -> None:
    proj = torch.roll(layer.attn.rel_proj, by, 1)
    proj[:, :by] = 0
    proj[:, proj.shape[1] + min(by, 0) :] = 0
    layer.attn.rel_proj.copy_(proj)


def taps(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Callable[[Inkling], None]:
    """Change the weights `[C, 4]` of the convolutions `names` of every layer (none named: all)."""

    def apply(layer: Any) -> None:
        for name in names or ("attn.kv_sconv", "attn_sconv", "mlp_sconv"):
            weight = layer.get_parameter(name)
            weight.copy_(change(weight))

    return edit(apply)


def swap_scales(model: Inkling) -> None:
    dense, routed = model.layers[0].mlp.global_scale, model.layers[1].mlp.gate_scale
    kept = dense.clone()
    dense.copy_(routed)
    routed.copy_(kept)


def attention(change: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Operations whose attention gets `change(q, r, proj, window, scale)` instead of some of its arguments."""

    def broken(
        q: Any, r: Any, k: Any, v: Any, proj: Any, *where: Any, window: int | None, scale: float, **bounds: Any
    ) -> torch.Tensor:
        given = {"q": q, "r": r, "proj": proj, "window": window, "scale": scale}
        given |= change(**given)
        return OPS.rel_attention(
            given["q"], given["r"], k, v, given["proj"], *where, window=given["window"], scale=given["scale"], **bounds
        )

    return {"rel_attention": broken}


def preparation(**changes: Any) -> dict[str, Any]:
    return {"qkvr_prep": lambda *args, **kwargs: OPS.qkvr_prep(*args, **kwargs | changes)}


def tau_on_q_only(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    q, _, k, v = OPS.qkvr_prep(*args, **kwargs)
    return q, OPS.qkvr_prep(*args, **kwargs | {"log_scaling_n_floor": None})[1], k, v


def tau_one_late(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return OPS.qkvr_prep(*args[:8], args[8] - 1, *args[9:], **kwargs)


def other_groups(q: torch.Tensor, r: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Query head h reads key head h % key heads."""
    order = torch.arange(q.shape[1]).view(-1, k.shape[2]).T.flatten()
    return OPS.rel_attention(q[:, order], r[:, order], k, *rest, **options)[:, order.argsort()]


def routing(weigh: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Operations whose router keeps its choice and weighs with `weigh(chosen logits, sinks' logits, chosen biases)`."""

    def broken(logits: Any, bias: Any, scale: Any, *, top_k: int, route_scale: float) -> tuple[torch.Tensor, ...]:
        ids, _, _ = OPS.routing(logits, bias, scale, top_k=top_k, route_scale=route_scale)
        weights = weigh(logits.gather(1, ids.long()), logits[:, len(bias) :], bias[ids.long()]) * scale * route_scale
        return ids, weights[:, :top_k], weights[:, top_k:]

    return {"routing": broken}


def softmax(*logits: torch.Tensor) -> torch.Tensor:
    return F.logsigmoid(torch.cat(logits, 1)).softmax(1)


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Inkling], None] | None]] = {
    "dense w13 contiguous": ({}, lambda model: contiguous(model.layers[0].mlp.w13.weight)),
    "expert w13 contiguous": ({}, sparse(lambda mlp: contiguous(mlp.experts.w13.data))),
    "shared w13 contiguous": ({}, sparse(lambda mlp: contiguous(mlp.shared_w13.weight))),
    "no bias": ({}, edit(lambda layer: layer.attn.rel_proj.zero_())),
    "bias + 1": ({}, edit(lambda layer: shifted(layer, 1))),
    "bias - 1": ({}, edit(lambda layer: shifted(layer, -1))),
    "window + 1": (attention(lambda window, **_: {"window": window and window + 1}), None),
    "window - 1": (attention(lambda window, **_: {"window": window and window - 1}), None),
    "extent + 1": (attention(lambda proj, **_: {"proj": torch.cat([proj, proj[:, -1:]], 1)}), None),
    "extent - 1": (attention(lambda proj, **_: {"proj": proj[:, :-1]}), None),
    "1 / sqrt(d)": (attention(lambda scale, **_: {"scale": scale**0.5}), None),
    "no tau": (preparation(log_scaling_n_floor=None), None),
    "tau on sliding layers too": (preparation(log_scaling_n_floor=FLOOR), None),
    "tau on q only": ({"qkvr_prep": tau_on_q_only}, None),
    "tau one position late": ({"qkvr_prep": tau_one_late}, None),
    "heads grouped otherwise": ({"rel_attention": other_groups}, None),
    "k's norm on q": ({}, edit(lambda layer: layer.attn.q_norm.copy_(layer.attn.k_norm))),
    "no inner residual": ({}, taps(lambda w: w - torch.eye(4)[3])),
    "taps reversed": ({}, taps(lambda w: w.flip(1))),
    "taps of another channel": ({}, taps(lambda w: w.roll(1, 0))),
    "K's and V's taps swapped": ({}, taps(lambda w: w.roll(len(w) // 2, 0), "attn.kv_sconv")),
    "no convolution of the attention": ({}, edit(lambda layer: layer.attn_sconv.zero_())),
    "no convolution of the MLP": ({}, edit(lambda layer: layer.mlp_sconv.zero_())),
    "router bias weighs": (routing(lambda chosen, sinks, bias: softmax(chosen + bias, sinks)), None),
    "router bias lost": ({}, sparse(lambda mlp: mlp.gate_bias.zero_())),
    "sinks dropped": (routing(lambda chosen, sinks, _: F.pad(softmax(chosen), (0, sinks.shape[1]))), None),
    "sinks weigh 1": (routing(lambda chosen, sinks, _: torch.cat([softmax(chosen), torch.ones_like(sinks)], 1)), None),
    "no log-sigmoid": (routing(lambda chosen, sinks, _: torch.cat([chosen, sinks], 1).softmax(1)), None),
    "scores not normalised": (routing(lambda chosen, sinks, _: torch.cat([chosen, sinks], 1).sigmoid()), None),
    "router in bfloat16": ({"routing": lambda logits, *a, **k: OPS.routing(logits.bfloat16().float(), *a, **k)}, None),
    "global scales swapped": ({}, swap_scales),
    "router's global scale lost": ({}, sparse(lambda mlp: mlp.gate_scale.fill_(1))),
    "embedding norm's weight lost": ({}, lambda model: model.embed_norm.fill_(1)),
    "final norm's weight lost": ({}, lambda model: model.norm.fill_(1)),
}  # fmt: skip


def test_broken_copies_are_caught(
    oracle: InklingForCausalLM, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tokens(300, 30)
    reference = expected(oracle, ids)
    signals = {"multiplier lost": (whole(load(folders["original"], logits_mup_width_multiplier=1.0), ids) - reference)}
    for name, (ops, change) in BROKEN.items():
        broken = load(folders["original"], replace(OPS, **ops))
        with torch.no_grad():
            if change is not None:
                change(broken)
        signals[name] = whole(broken, ids) - reference
    lines = [f"{name}: error / tolerance {error.abs().max() / TOLERANCE:.0f}" for name, error in signals.items()]
    caught = [name for name, error in signals.items() if error.abs().max() > TOLERANCE]
    with capsys.disabled():
        print(f"\n{len(caught)} of {len(signals)} broken copies of the model caught", *lines, sep="\n  ")
    assert list(signals) == caught
