"""The tensors that a configuration calls for, against the released files' census and Transformers' vision tower."""

from __future__ import annotations

import time
from collections import Counter
from math import prod

import pytest
from transformers.models.inkling.modeling_inkling import plan_out_scales

from inkling_portable.config import VisionConfig, preset
from inkling_portable.tensor_table import stored_parts, tensor_table, vision_scales


def test_the_table_of_a_released_model_has_its_census() -> None:
    """Tensor counts and bytes of the public NVFP4 files of Inkling-Small (1,360 tensors; its first expert layer is
    bf16, its convolutions and dense scales bf16 too)."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for spec in tensor_table(preset("inkling-small")):
        (part,) = stored_parts(spec, "original")
        values = prod(part.shape)
        kind = spec.section
        if spec.experts and ".layers.2." not in spec.name:
            count["auxiliary"] += 4
            size["auxiliary"] += values // 16 + 4 * 256 + 2 + 3 * 8
            kind, stored = "packed", values // 2
        else:
            stored = values * (4 if part.name.endswith(("gate.bias", "gate.global_scale")) else 2)
        count[kind] += 1
        size[kind] += stored
    assert count == {"text": 800, "packed": 78, "auxiliary": 312, "mtp": 160, "visual": 8, "audio": 2}
    assert size["text"] == 21505668260 + 3293577216
    assert size["packed"] == 125627793408
    assert size["auxiliary"] == 15703556076
    assert (size["mtp"], size["visual"], size["audio"]) == (4463824912, 128160768, 10493952)


@pytest.mark.parametrize("layers", range(2, 9))
@pytest.mark.parametrize(("patch", "frames"), [(40, 2), (4, 2), (14, 3), (16, 1), (30, 4)])
def test_stages_of_the_vision_tower(patch: int, frames: int, layers: int) -> None:
    stages = vision_scales(VisionConfig(patch_size=patch, temporal_patch_size=frames, n_layers=layers))
    oracle = plan_out_scales(frames, patch, layers, 3).tolist()
    assert [(t, h) for t, h, _ in stages] == [(t, h) for t, h, _, _ in oracle]
    # The oracle's width of a stage that covers several frames is another, which no released model reaches.
    assert [c for t, _, c in stages if t == 1] == [c for t, _, _, c in oracle if t == 1]


def test_the_table_of_the_largest_model_is_quick() -> None:
    started = time.perf_counter()
    assert len(tensor_table(preset("inkling"))) > 1000
    assert time.perf_counter() - started < 1
