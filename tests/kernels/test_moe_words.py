"""Orders of codes: the documented bits, the way back, and what refuses an order that it does not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_oracle import in_words, random_packed

from inkling_kernels.moe_gemm_fp4 import prepare_experts, unpack_asm
from inkling_kernels.moe_words import to_pairs, to_words
from inkling_kernels.numerics import ExpertWeight
from inkling_kernels.target import TARGETS, Target


def test_words_have_the_documented_bits() -> None:
    """Every code at every place."""
    rng = np.random.default_rng(0)
    codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (3, 5, 8)), axis=2)
    packed = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
    words = to_words(packed)
    assert np.array_equal(words.numpy(), in_words(codes))
    assert torch.equal(to_pairs(words), packed)
    assert to_words(packed[:0]).shape == (0, 5, 64)
    # Slices at multiples of eight columns commute with it, strided ones too.
    assert torch.equal(to_words(packed[:, 1:, 4:32]), words[:, 1:, 4:32])


def test_dequantising_does_not_depend_on_the_order() -> None:
    for format in ("nvfp4", "mxfp4"):
        weight, _ = random_packed(np.random.default_rng(1), format, 2, 8, 64, "interleaved")
        prepared = prepare_experts(weight, Target.parse("sm90"))
        assert prepared.order == "words"
        assert not torch.equal(prepared.data, weight.data)
        assert torch.equal(prepared.dequant(1), weight.dequant(1))
        assert torch.equal(prepared.dequant(1, rows=slice(2, 4)), weight.dequant(1)[2:4])
        assert prepare_experts(prepared, Target.parse("sm90")) is prepared


def test_each_target_gets_the_order_that_it_unpacks_fastest() -> None:
    weight, _ = random_packed(np.random.default_rng(2), "mxfp4", 1, 8, 64, "plain")
    orders = {target.arch: prepare_experts(weight, target).order for target in TARGETS if target.is_gpu}
    assert {arch for arch, order in orders.items() if order == "pairs"} == {"gfx950"}
    asm = {target.arch: unpack_asm(target) for target in TARGETS}
    assert all(found == "ptx" for arch, found in asm.items() if arch.startswith("sm"))
    assert {arch for arch, found in asm.items() if found == "cdna4"} == {"gfx950"}
    assert asm["cpu"] == asm["interpret"] == unpack_asm(None) == ""
    plain = ExpertWeight("bf16", torch.zeros(1, 2, 2))
    assert prepare_experts(plain, Target.parse("sm90")) is plain


def test_a_wrong_order_is_refused() -> None:
    weight, _ = random_packed(np.random.default_rng(3), "nvfp4", 1, 8, 32, "plain")
    with pytest.raises(ValueError, match="order: 'rows' is unknown, expected one of pairs, words"):
        replace(weight, order="rows")
    with pytest.raises(ValueError, match="order: 'words' is of packed codes"):
        ExpertWeight("bf16", torch.zeros(1, 2, 8), order="words")
    with pytest.raises(ValueError, match="w2: codes are in the order 'pairs', this operation needs 'words'"):
        weight.require_order("words", "w2")
    with pytest.raises(ValueError, match="multiple of 4"):
        to_words(torch.zeros(1, 2, 6, dtype=torch.uint8))
