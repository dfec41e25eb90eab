"""Finding and parsing `config.json`: a folder, the file itself, or a Hugging Face hub repository."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds one sentence for each rule it breaks."""

    def __init__(self, problems: Iterable[str], source: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__((f"{source}: " if source else "") + " ".join(self.problems))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ConfigError where it cannot be read, is no JSON or no object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError([f"{file} is not valid JSON (line {error.lineno}: {error.msg})."]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file} cannot be read: {error}."]) from None
    if not isinstance(raw, dict):
        raise ConfigError([f"{file} holds a JSON {type(raw).__name__}; expected an object."])
    return raw


def locate(path: str, revision: str | None) -> tuple[Path, Path | None]:
    """`config.json` of a local folder or hub repository and, where there is one, its `hf_quant_config.json`."""
    local = Path(path)
    if local.is_dir() or local.is_file():
        file = local / "config.json" if local.is_dir() else local
        if not file.is_file():
            raise ConfigError([f"{path} has no config.json; expected a checkpoint's folder."])
        side = file.with_name("hf_quant_config.json")
        return file, side if side.is_file() else None
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path):
        raise ConfigError([f"{path} does not exist; expected a checkpoint's folder or a hub id such as owner/model."])

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = Path(hf_hub_download(path, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            [f"{path} is neither a local folder nor a hub repository whose config.json can be fetched ({reason})."]
        ) from None
    try:
        return file, Path(hf_hub_download(path, "hf_quant_config.json", revision=revision))
    except EntryNotFoundError:
        return file, None
