"""Open and inspect a checkpoint: which tensors its files hold, and whether they are those of its configuration.

`Checkpoint.open` reads headers only. Whatever is missing, unexpected, truncated, or of a wrong shape or dtype is one
`CheckpointError` that lists all of it, before a weight is read or memory for one allocated.

The expert layouts that are understood (E experts, N rows, K columns; suffixes of `model.llm.layers.L.mlp.experts.`):

    bf16    w13_weight, w2_weight: BF16 or F32 [E, N, K]
    nvfp4   w13_weight U8 [E, N, K/2], ….scale F8_E4M3 [E, N, K/16], ….scale2 F32 [E] (w13 also [E, 2]: gate, up),
            ….input_amax, ….original_shape            (NVIDIA ModelOpt, as released)
    mxfp4   w13_weight U8 [E, N, K/2], w13_weight_scale U8 [E * N, K/32]      (AMD Quark; [E, N, K/32] too)

A quantised checkpoint may keep whole layers in bf16; what a layer is follows from its stored dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

from inkling_kernels.numerics import BLOCK, Format

from .config import InklingConfig
from .config_files import ConfigError, read_json
from .shards import ShardError, ShardFile, StoredTensor, read_header
from .tensor_table import Section, Spelling, TensorSpec, spelling_of, stored_parts, tensor_table

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_FLOATS = ("BF16", "F32")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_SHOWN = 12


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. `missing`, `unexpected` and `wrong` hold one line for each finding."""

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.wrong = tuple(missing), tuple(unexpected), tuple(wrong)


@dataclass(frozen=True)
class _Expected:
    """A stored tensor that the configuration calls for. `shapes` None: any shape."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None

    def fault(self, stored: StoredTensor) -> str | None:
        faults = []
        if stored.dtype not in self.dtypes:
            faults.append(f"dtype {stored.dtype}, expected {' or '.join(self.dtypes)}")
        if self.shapes is not None and stored.shape not in self.shapes:
            faults.append(f"shape {list(stored.shape)}, expected {' or '.join(str(list(s)) for s in self.shapes)}")
        return f"{self.name}: {'; '.join(faults)}" if faults else None


class Checkpoint:
    """An inspected checkpoint: every tensor of `specs` is there, in the right shape, in files of the right size.

    path      the local folder
    config    its `InklingConfig`
    specs     the canonical tensors held (without MTP where the files have none; `has_mtp` tells)
    formats   canonical name of each expert weight -> 'bf16', 'nvfp4' or 'mxfp4'
    stored    stored name -> `StoredTensor`
    ignored   stored names that are no weights of the base model (LoRA adapters)
    notes     sentences for the user about what was passed over
    """

    def __init__(
        self,
        path: Path,
        config: InklingConfig,
        spelling: Spelling,
        specs: list[TensorSpec],
        formats: dict[str, Format],
        stored: dict[str, StoredTensor],
        ignored: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> None:
        self.path, self.config, self.spelling = path, config, spelling
        self.specs, self.formats, self.stored = specs, formats, stored
        self.ignored, self.notes = ignored, notes
        self.has_mtp = any(spec.section == "mtp" for spec in specs)
        self._files: dict[Path, ShardFile] = {}

    @classmethod
    def open(cls, path: str | Path, revision: str | None = None) -> Checkpoint:
        """Inspect the checkpoint at `path`: a folder, a `.safetensors` file in one, or a hub id such as `owner/model`
        (downloaded with huggingface_hub, configuration and index first).

        Raises CheckpointError (or its sibling ConfigError) naming everything that is wrong.
        """
        folder, single = _locate(path, revision)
        config = InklingConfig.from_pretrained(folder)
        return _inspect(folder, config, _read_headers(folder, single))

    @property
    def quantized(self) -> bool:
        """Whether any expert weight is packed."""
        return any(format != "bf16" for format in self.formats.values())

    def nbytes(self, sections: Iterable[Section] | None = None) -> int:
        """Bytes stored for the weights of `sections` (all of them by default)."""
        wanted = None if sections is None else set(sections)
        names = (n for s in self.specs if wanted is None or s.section in wanted for n in self.stored_names(s))
        return sum(self.stored[name].nbytes for name in names)

    def stored_names(self, spec: TensorSpec) -> list[str]:
        """The stored tensors that make up `spec`."""
        return stored_names(spec, self.spelling, self.formats.get(spec.name))

    def shard(self, name: str) -> ShardFile:
        """The open, memory-mapped file that holds the stored tensor `name`."""
        file = self.stored[name].file
        if file not in self._files:
            self._files[file] = ShardFile(file)
        return self._files[file]

    def close(self) -> None:
        """Unmap the files. Tensors that were read stay valid: they are copies."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locate(path: str | Path, revision: str | None) -> tuple[Path, Path | None]:
    """The checkpoint's folder, and the one weights file where `path` names it."""
    local = Path(path)
    if local.is_dir():
        return local, None
    if local.is_file():
        if local.suffix != ".safetensors":
            raise CheckpointError(f"{path} is a file; expected a checkpoint's folder or a .safetensors file in one")
        return local.parent, local
    if not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(f"{path} does not exist; expected a checkpoint's folder or a hub id such as owner/model")
    return _download(str(path), revision), None


def _download(hub_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Small files first, so that a configuration that cannot be used is refused before the weights come.
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(_SIDE_FILES)))
        if (folder / "config.json").is_file():
            InklingConfig.from_pretrained(folder)
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=["*.safetensors", *_SIDE_FILES])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{hub_id} is neither a local folder nor a hub repository that can be fetched ({reason})"
        ) from None


@dataclass
class _Found:
    """What the files hold, and what is wrong with the files themselves."""

    stored: dict[str, StoredTensor]
    missing: list[str]
    unexpected: list[str]
    wrong: list[str]


def _read_headers(folder: Path, single: Path | None) -> _Found:
    found = _Found({}, [], [], [])
    index = folder / INDEX_FILE
    if single is None and index.is_file():
        by_file: dict[str, list[str]] = {}
        for name, place in _weight_map(index).items():
            by_file.setdefault(place, []).append(name)
        for shard, names in sorted(by_file.items()):
            _read_shard(folder / shard, names, found)
        return found
    file = single or folder / SINGLE_FILE
    if not file.is_file():
        others = sorted(p.name for p in folder.glob("*.safetensors"))
        has = f" (it has {', '.join(others[:4])}, but no index that lists them)" if others else ""
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{has}")
    _read_shard(file, None, found)
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    if outside := sorted({file for file in listed.values() if Path(file).name != file}):
        raise CheckpointError(f"{index} names the file {outside[0]!r}; expected files of its own folder")
    return listed


def _read_shard(file: Path, listed: list[str] | None, found: _Found) -> None:
    """Add the tensors of `file`, those that the index lists there (all of them without an index)."""
    if not file.is_file():
        found.missing += [f"{name} (its file {file.name} does not exist)" for name in listed or ()]
        return
    try:
        header = read_header(file)
    except ShardError as error:
        if listed is None:
            raise CheckpointError(f"{file.parent}: {error}", wrong=[str(error)]) from None
        found.wrong.append(str(error))
        # Its tensors are neither missing nor sound: one line about the file says it all.
        found.stored.update({name: StoredTensor(name, "", (), file, 0, 0) for name in listed or ()})
        return
    names = header if listed is None else listed
    for name in names:
        if name in header:
            found.stored[name] = header[name]
        else:
            found.missing.append(f"{name} (the index places it in {file.name}, which has no such tensor)")
    found.unexpected += [
        f"{name} (in {file.name}, but the index does not list it)" for name in header if name not in set(names)
    ]


def _is_adapter(name: str) -> bool:
    return any(part in ("lora_A", "lora_B") for part in name.split("."))


def _inspect(folder: Path, config: InklingConfig, found: _Found) -> Checkpoint:
    """Compare what the files hold with what `config` calls for."""
    ignored = tuple(sorted(name for name in found.stored if _is_adapter(name)))
    stored = {name: tensor for name, tensor in found.stored.items() if name not in set(ignored)}
    notes = []
    if ignored:
        notes.append(f"{len(ignored)} LoRA adapter tensors in the files are no base weights and are ignored.")
    spelling = spelling_of(set(stored))
    specs = tensor_table(config)
    if config.mtp is not None and not any(name.startswith("model.mtp.") for name in (*stored, *found.missing)):
        specs = [spec for spec in specs if spec.section != "mtp"]
        notes.append(
            f"The configuration names {config.mtp.num_layers} MTP depths but the files have no MTP tensors: "
            "plain decoding only."
        )
    missing, wrong = list(found.missing), list(found.wrong)
    explained = {line.split(" ", 1)[0] for line in found.missing}
    formats: dict[str, Format] = {}
    names: set[str] = set()
    for spec in specs:
        if spec.experts:
            formats[spec.name] = _expert_format(spec, config, spelling, stored, wrong)
        for expected in _expected(spec, spelling, formats.get(spec.name)):
            names.add(expected.name)
            tensor = stored.get(expected.name)
            if tensor is None:
                if expected.name not in explained:
                    missing.append(expected.name)
            elif tensor.dtype and (fault := expected.fault(tensor)):
                wrong.append(fault)
    unexpected = found.unexpected + sorted(name for name in stored if name not in names)
    if missing or unexpected or wrong:
        raise _mismatch(folder, missing, unexpected, wrong)
    return Checkpoint(folder, config, spelling, specs, formats, stored, ignored, tuple(notes))


def _expert_format(
    spec: TensorSpec, config: InklingConfig, spelling: Spelling, stored: dict[str, StoredTensor], wrong: list[str]
) -> Format:
    """The format of one expert weight: what its stored dtype says, checked against the configuration."""
    quantization = config.quantization
    if quantization is None or spelling != "original":
        return "bf16"
    name = stored_parts(spec, spelling)[0].name
    excluded = quantization.excludes(name)
    tensor = stored.get(name)
    packed = not excluded if tensor is None or not tensor.dtype else tensor.dtype == "U8"
    if not packed:
        return "bf16"
    if excluded:
        wrong.append(f"{name}: packed 4-bit codes, but the configuration excludes it from quantisation")
    if spec.shape[-1] % BLOCK[quantization.format]:
        block = BLOCK[quantization.format]
        wrong.append(f"{name}: width {spec.shape[-1]} is not a multiple of {quantization.format}'s block of {block}")
    return quantization.format


def stored_names(spec: TensorSpec, spelling: Spelling, format: Format | None) -> list[str]:
    """The stored tensors that make up `spec`; the first one's dtype tells packed experts from others."""
    return [expected.name for expected in _expected(spec, spelling, format)]


def _expected(spec: TensorSpec, spelling: Spelling, format: Format | None) -> list[_Expected]:
    parts = stored_parts(spec, spelling)
    if format in (None, "bf16"):
        return [_Expected(part.name, _FLOATS, (part.shape,)) for part in parts]
    name = parts[0].name
    experts, rows, columns = spec.shape
    codes = _Expected(name, ("U8",), ((experts, rows, columns // 2),))
    if format == "mxfp4":
        blocks = columns // 32
        shapes = ((experts * rows, blocks), (experts, rows, blocks))
        return [codes, _Expected(f"{name}_scale", ("U8", "F8_E8M0"), shapes)]
    second: tuple[tuple[int, ...], ...] = ((experts,), (experts, 1))
    return [
        codes,
        _Expected(f"{name}.scale", ("F8_E4M3", "U8"), ((experts, rows, columns // 16),)),
        _Expected(f"{name}.scale2", ("F32",), (*second, (experts, 2)) if spec.interleaved else second),
        _Expected(f"{name}.input_amax", ("F32", "BF16", "F16"), None),
        _Expected(f"{name}.original_shape", ("I64", "I32"), None),
    ]


def _mismatch(folder: Path, missing: list[str], unexpected: list[str], wrong: list[str]) -> CheckpointError:
    counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(wrong)} wrong"
    lines = [f"{folder} does not hold the tensors that its config.json calls for: {counts}."]
    for title, entries in (("missing", missing), ("unexpected", unexpected), ("wrong", wrong)):
        shown = entries[:_SHOWN]
        if title == "missing":
            shown = [entry + _rename_hint(entry, unexpected) for entry in shown]
        lines += [f"  {title}: {entry}" for entry in shown]
        if len(entries) > _SHOWN:
            lines.append(f"  {title}: and {len(entries) - _SHOWN} more")
    return CheckpointError("\n".join(lines), missing, unexpected, wrong)


def _rename_hint(missing: str, unexpected: list[str]) -> str:
    name, others = missing.split(" ", 1)[0], [line.split(" ", 1)[0] for line in unexpected[:500]]
    near = [] if name in others else get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (renamed? the files have {near[0]})" if near else ""
