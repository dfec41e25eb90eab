"""Tensor-parallel parts: which heads and rows a rank holds, and that the ranks' partial sums make the whole."""

from __future__ import annotations

import pytest
import torch

from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import Target
from inkling_portable.cache import Batch
from inkling_portable.config import InklingConfig, MTPConfig, preset
from inkling_portable.facts import Facts
from inkling_portable.model import DecoderLayer, Inkling
from inkling_portable.ops import Ops
from inkling_portable.parallel import Rank

CONFIG = InklingConfig(
    vocab_size=96,
    unpadded_vocab_size=83,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    swa_num_attention_heads=8,
    swa_num_key_value_heads=4,
    swa_head_dim=16,
    sliding_window_size=8,
    rel_extent=16,
    log_scaling_n_floor=8,
    local_layer_ids=(0, 2),
    dense_layer_ids=(0,),
    intermediate_size=64,
    moe_intermediate_size=64,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    route_scale=2.0,
    logits_mup_width_multiplier=1.0,
    mtp=MTPConfig(num_layers=1),
)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["inkling", "inkling-small"])
def test_heads_of_the_released_models(name: str, size: int) -> None:
    config = preset(name)
    for index in (0, 5):
        spec = config.layer(index)
        seen: list[int] = []
        for rank in range(size):
            queries, keys = Rank(size, rank).heads(spec)
            assert len(queries) == spec.num_heads // size
            # Every query head finds the key head it reads on its own rank.
            assert {head // spec.group for head in queries} == set(keys)
            seen += queries
        assert seen == list(range(spec.num_heads))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, "64, which 3 ranks cannot share evenly; use one of \\[1, 2, 4, 8"), (128, "64, which 128 ranks")],
)
def test_query_heads_that_cannot_be_shared(size: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Rank(size, 0).config(preset("inkling"))


def test_key_heads_that_can_neither_be_shared_nor_copied() -> None:
    config = CONFIG.replace(num_attention_heads=12, num_key_value_heads=6, swa_num_attention_heads=12)
    with pytest.raises(ValueError, match="full layers have 6 key/value heads, which 4 ranks can neither share nor"):
        Rank(4, 0).heads(config.layer(1))
    with pytest.raises(ValueError, match="rank is 4 of 4"):
        Rank(4, 4)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_no_rank_computes_a_padded_logit(size: int) -> None:
    config = preset("inkling")
    ids = [token for rank in range(size) for token in Rank(size, rank).vocabulary(config)]
    assert ids == list(range(config.unpadded_vocab_size))


def _random(config: InklingConfig) -> dict[str, torch.Tensor | ExpertWeight]:
    generator = torch.Generator().manual_seed(7)
    model = Inkling(config, Ops.bind(Target.parse("cpu"), Facts(dtype="float32"), {}), dtype=torch.float32)
    tensors: dict[str, torch.Tensor | ExpertWeight] = {
        name: torch.randn(place.shape, generator=generator) * 0.3 for name, place in model.tensors().items()
    }
    for prefix, experts in model.experts().items():
        for which in ("w13", "w2"):
            weight = getattr(experts, which)
            data = torch.randn(weight.data.shape, generator=generator) * 0.3
            tensors[f"{prefix}.{which}"] = ExpertWeight("bf16", data, layout=weight.layout)
    return tensors


def _model(config: InklingConfig, tensors: dict[str, torch.Tensor | ExpertWeight]) -> Inkling:
    model = Inkling(config, Ops.bind(Target.parse("cpu"), Facts(dtype="float32"), {}), dtype=torch.float32)
    model.load((name, value) for name, value in tensors.items() if "embed" not in name and name != "llm.norm.weight")
    return model.requires_grad_(False)


@pytest.mark.parametrize("size", [2, 4])
def test_partial_sums_make_the_whole(size: int) -> None:
    """Attention with shared and with copied key heads, dense MLP, routed and shared experts, each summed over ranks."""
    tensors = _random(CONFIG)
    whole = _model(CONFIG, tensors)
    ranks = [Rank(size, rank) for rank in range(size)]
    parts = [
        _model(rank.config(CONFIG), {name: rank.tensor(CONFIG, name, value) for name, value in tensors.items()})
        for rank in ranks
    ]
    x = torch.randn(2 * 21, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    batch = Batch.uncached(2, 21)
    for i, layer in enumerate(whole.layers):
        assert isinstance(layer, DecoderLayer)
        others = [part.layers[i] for part in parts]
        torch.testing.assert_close(
            sum(other.attn(x, batch, None) for other in others), layer.attn(x, batch, None), rtol=1e-5, atol=1e-4
        )
        torch.testing.assert_close(sum(other.mlp(x) for other in others), layer.mlp(x), rtol=1e-5, atol=1e-4)


def test_a_contiguous_split_of_w13_would_be_noticed() -> None:
    """The partial sums tell a rank's interleaved rows from the first half of the matrix."""
    tensors = _random(CONFIG)
    whole, rank = _model(CONFIG, tensors), Rank(2, 0)
    cut = {name: rank.tensor(CONFIG, name, value) for name, value in tensors.items()}
    w13 = tensors["llm.layers.0.mlp.w13_dn.weight"]
    assert isinstance(w13, torch.Tensor)
    gate, up = w13[0::2], w13[1::2]
    cut["llm.layers.0.mlp.w13_dn.weight"] = torch.cat([gate, up])[: len(w13) // 2]
    wrong = _model(rank.config(CONFIG), cut)
    right = _model(Rank(2, 1).config(CONFIG), {n: Rank(2, 1).tensor(CONFIG, n, v) for n, v in tensors.items()})
    x = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
    first, second, both = (model.layers[0].mlp(x) for model in (wrong, right, whole))
    assert (first + second - both).abs().max() > 0.5
