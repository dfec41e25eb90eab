"""The parts of a configuration that stand on their own (MTP, vision, audio, quantisation) and how rules report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .config_files import ConfigError

Size = Annotated[int, Field(strict=True, ge=1, description="a positive integer")]
Count = Annotated[int, Field(strict=True, ge=0, description="an integer of at least 0")]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a positive finite number")]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False, description="a finite number")]
LayerIds = Annotated[tuple[Count, ...], Field(description="a list of layer indices")]
TokenId = Annotated[
    Annotated[int, Field(strict=True, ge=0)] | None, Field(description="a token id of at least 0, or null")
]


class FrozenConfig(BaseModel):
    """An immutable group of fields whose construction raises ConfigError, one sentence a broken rule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_sentences(error, type(self), data)) from None


def _sentences(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> list[str]:
    found: dict[str, None] = {}
    for item in error.errors():
        if not item["loc"]:
            found.update(dict.fromkeys(str(item["ctx"]["error"]).splitlines()))
            continue
        name = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            found[f"{name} is not a field of {model.__name__}."] = None
            continue
        state = f"is {data[name]!r}" if name in data else "is missing"
        found[f"{name} {state}; expected {model.model_fields[name].description}."] = None
    return list(found)


def raise_problems(problems: list[str]) -> None:
    """Raise `problems`, if there are any, in the form that a pydantic validator passes on to `FrozenConfig`."""
    if problems:
        raise ValueError("\n".join(problems))


def id_problems(name: str, ids: tuple[int, ...], count: int, bound: str) -> list[str]:
    """What is wrong with a list of layer indices: out of 0..count-1, out of order or repeated."""
    problems = []
    if outside := [i for i in ids if i >= count]:
        problems.append(f"{name} holds {outside[0]}; expected indices below {bound}, {count}.")
    if tuple(sorted(set(ids))) != ids:
        problems.append(f"{name} is {list(ids)}; expected ascending indices without repeats.")
    return problems


class MTPConfig(FrozenConfig):
    """Multi-token prediction: `num_layers` depths, each sliding where its index is in `local_layer_ids`, else full."""

    num_layers: Size
    local_layer_ids: LayerIds = ()
    chain_hidden_post_norm: bool = Field(False, strict=True, description="true or false")

    @model_validator(mode="after")
    def _rules(self) -> MTPConfig:
        raise_problems(id_problems("local_layer_ids", self.local_layer_ids, self.num_layers, "the number of depths"))
        return self


class VisionConfig(FrozenConfig):
    """hMLP tower. `hidden_size` is carried for Transformers' sake: the tower's widths follow from the patch sizes."""

    patch_size: int = Field(strict=True, ge=2, description="an integer of at least 2 (pixels a side)")
    temporal_patch_size: Size
    num_channels: Size = 3
    n_layers: Size
    hidden_size: Size = 1024
    rms_norm_eps: Positive = 1e-6


class AudioConfig(FrozenConfig):
    """dMel embedding: `n_mel_bins` levels a frame, each one of `mel_vocab_size`, spread over [min, max] in log10."""

    n_mel_bins: Size
    mel_vocab_size: int = Field(strict=True, ge=2, description="an integer of at least 2")
    rms_norm_eps: Positive = 1e-6
    dmel_min_value: Finite = -7.0
    dmel_max_value: Finite = 2.0

    @model_validator(mode="after")
    def _rules(self) -> AudioConfig:
        low, high = self.dmel_min_value, self.dmel_max_value
        if low >= high:
            raise_problems([f"dmel_min_value is {low}; expected less than dmel_max_value, {high}."])
        return self


class QuantizationConfig(FrozenConfig):
    """Which 4-bit format the routed experts have, and the modules that stay unquantised.

    `excluded` holds the file's patterns verbatim: a module or weight name, a glob (`*lm_head`), or a `re:` expression.
    """

    format: Literal["nvfp4", "mxfp4"] = Field(description="'nvfp4' or 'mxfp4'")
    excluded: tuple[str, ...] = Field((), description="a list of module names")

    def excludes(self, name: str) -> bool:
        """Whether the module or weight `name` stays unquantised: itself or a module above it is listed."""
        parts = name.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for pattern in self.excluded:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], name):
                    return True
            elif any(fnmatchcase(prefix, pattern) for prefix in prefixes):
                return True
        return False
