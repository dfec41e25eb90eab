"""Reading and writing `quantization_config`: ModelOpt NVFP4 (inline or in `hf_quant_config.json`) and Quark MXFP4.

Sources: ModelOpt writes `quant_algo` with `exclude_modules` (side file) or `ignore` (inline); Quark writes
`global_quant_config.weight` with `dtype`, `group_size` and `exclude`. Transformers and vLLM read the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_sections import QuantizationConfig

SIDE_FILE = "hf_quant_config"
"""Key under which the content of `hf_quant_config.json` joins the raw configuration."""

_SUPPORTED = "ModelOpt NVFP4 (quant_method modelopt, quant_algo NVFP4) or Quark MXFP4 (quant_method quark)"
_EXCLUDING = ("exclude", "exclude_modules", "ignore")
_KNOWN = {*_EXCLUDING, "quant_method", "quant_algo", "group_size", "global_quant_config", "quantization", "export"}


def read_quantization(
    stated: Mapping[str, Any], problems: list[str]
) -> tuple[QuantizationConfig | None, dict[str, Any]]:
    """`(quantisation, unknown fields)` from the objects in `stated`, keyed by where they stand; None is absent.

    Two objects must name one format; their exclusion lists are joined. Problems are appended to `problems`.
    """
    formats: dict[str, str] = {}
    excluded: dict[str, None] = {}
    unknown: dict[str, Any] = {}
    for where, value in stated.items():
        if value is None:
            continue
        if not isinstance(value, Mapping):
            problems.append(f"{where} is {value!r:.40}; expected a JSON object.")
            continue
        inner = value.get("quantization")
        body = {**value, **inner} if isinstance(inner, Mapping) else value
        unknown |= {name: entry for name, entry in body.items() if name not in _KNOWN}
        if found := _format(where, body, problems):
            formats.setdefault(found, where)
        for key in _EXCLUDING:
            names = body.get(key) or []
            if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
                excluded.update(dict.fromkeys(names))
            else:
                problems.append(f"{where}.{key} is {names!r:.40}; expected a list of module names.")
    if len(formats) > 1:
        said = " but ".join(f"{where} says {name}" for name, where in formats.items())
        problems.append(f"{said}; expected one format.")
    if not formats:
        return None, unknown
    return QuantizationConfig(format=next(iter(formats)), excluded=tuple(excluded)), unknown


def _format(where: str, body: Mapping[str, Any], problems: list[str]) -> str | None:
    method = body.get("quant_method") or ("modelopt" if "quant_algo" in body else None)
    if method in ("modelopt", "modelopt_fp4"):
        found = (str(body.get("quant_algo", "NVFP4")).upper(), body.get("group_size") or 16)
        if found == ("NVFP4", 16):
            return "nvfp4"
        problems.append(f"{where} has (quant_algo, group_size) {found}; expected ('NVFP4', 16).")
    elif method == "quark":
        overall = body.get("global_quant_config") or {}
        weight = (overall.get("weight") or {}) if isinstance(overall, Mapping) else None
        if not isinstance(weight, Mapping):
            problems.append(f"{where}.global_quant_config is {overall!r:.60}; expected one weight entry.")
            return None
        found = (weight.get("dtype", "fp4"), weight.get("group_size", 32))
        if found == ("fp4", 32):
            return "mxfp4"
        problems.append(f"{where} has weights of (dtype, group_size) {found}; expected ('fp4', 32).")
    else:
        problems.append(f"{where}.quant_method is {method!r}; expected {_SUPPORTED}.")
    return None


def write_quantization(config: QuantizationConfig) -> dict[str, Any]:
    """The object that ModelOpt (NVFP4) or Quark (MXFP4) would write under `quantization_config`."""
    excluded = list(config.excluded)
    if config.format == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": excluded}
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
    # vLLM (`quark.py`) refuses a Quark configuration that does not say how it was exported.
    export = {"kv_cache_group": [], "pack_method": "reorder"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": excluded, "export": export}
