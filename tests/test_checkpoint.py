"""Opening a checkpoint: what its files hold against what its configuration calls for."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import InklingConfig as OracleConfig
from transformers import InklingForCausalLM, InklingForConditionalGeneration, InklingTextConfig

from inkling_portable.checkpoint import Checkpoint, CheckpointError

INDEX = "model.safetensors.index.json"
WQ = "model.llm.layers.0.attn.wq_du.weight"


def text_config(**changes: Any) -> InklingTextConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 96, "unpadded_vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_head_dim": 16, "sliding_window_size": 8, "rel_extent": 16, "log_scaling_n_floor": 16,
        "local_layer_ids": [0, 2], "mlp_layer_types": ["dense", "sparse", "sparse"], "intermediate_size": 80,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
    }  # fmt: skip
    return InklingTextConfig(**sizes | changes)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints as Transformers writes them: `text`, `full` (towers too), `sharded`."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    InklingForCausalLM(text_config()).save_pretrained(root / "text")
    config = OracleConfig(
        text_config=text_config().to_dict(),
        vision_config={"patch_size": 4, "temporal_patch_size": 2, "num_hidden_layers": 2, "hidden_size": 64},
        audio_config={"n_mel_bins": 8, "mel_vocab_size": 4},
    )
    model = InklingForConditionalGeneration(config)
    model.save_pretrained(root / "full")
    model.save_pretrained(root / "sharded", max_shard_size="150KB")
    return {name: root / name for name in ("text", "full", "sharded")}


@pytest.fixture
def full(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["full"], tmp_path / "full"))


@pytest.fixture
def sharded(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["sharded"], tmp_path / "sharded"))


def edit(folder: Path, **changes: torch.Tensor | str | None) -> None:
    """Replace tensors of a single-file checkpoint: None drops one, a string renames it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, change in changes.items():
        if isinstance(change, torch.Tensor):
            tensors[name] = change
        else:
            value = tensors.pop(name)
            if change is not None:
                tensors[change] = value
    save_file(tensors, file)


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointError:
    """The error of opening `folder`, which must come before any tensor is allocated or file mapped."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise RuntimeError("allocated before the inspection was done")

    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "tensor", "from_numpy", "frombuffer"):
            patch.setattr(torch, name, forbidden)
        patch.setattr("inkling_portable.checkpoint.ShardFile", forbidden)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(folder)
    return caught.value


@pytest.mark.parametrize("name", ["text", "full", "sharded"])
def test_what_transformers_saves_opens(saved: dict[str, Path], name: str) -> None:
    with Checkpoint.open(saved[name]) as checkpoint:
        files = sorted(saved[name].glob("*.safetensors"))
        assert (len(files) > 1) == (name == "sharded")
        held = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert set(checkpoint.stored) == set(held)
        used = [part for spec in checkpoint.specs for part in checkpoint.stored_names(spec)]
        assert Counter(used) == Counter(list(held))
        assert checkpoint.nbytes() == sum(tensor.numel() * 4 for tensor in held.values())
        assert checkpoint.spelling == ("transformers" if name == "text" else "original")
        assert not checkpoint.quantized
        assert not checkpoint.ignored
        sections = {spec.section for spec in checkpoint.specs}
        assert sections == ({"text"} if name == "text" else {"text", "visual", "audio"})


def test_the_nested_transformers_names_open(saved: dict[str, Path], full: Path) -> None:
    model = InklingForConditionalGeneration.from_pretrained(saved["full"])
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, full / "model.safetensors")
    with Checkpoint.open(full) as checkpoint:
        assert checkpoint.spelling == "transformers_nested"
        assert "model.vision_tower.encoder_layers.0.layer_norm.weight" in checkpoint.stored


def test_one_file_of_a_folder_opens(saved: dict[str, Path]) -> None:
    with Checkpoint.open(saved["full"] / "model.safetensors") as checkpoint:
        assert checkpoint.path == saved["full"]


def test_a_dropped_tensor(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(full, **{WQ: None})
    error = refused(full, monkeypatch)
    assert error.missing == (WQ,)
    assert error.unexpected == error.wrong == ()
    assert "1 missing, 0 unexpected, 0 wrong" in str(error)
    assert str(full) in str(error)


def test_every_dropped_tensor_is_noticed(saved: dict[str, Path], full: Path) -> None:
    """Each of them alone."""
    file = full / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(full)
        assert caught.value.missing == (name,)


def test_a_renamed_tensor_is_listed_on_both_sides_with_a_hint(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = "model.llm.layers.0.attn.wq.weight"
    edit(full, **{WQ: renamed})
    error = refused(full, monkeypatch)
    assert error.missing == (WQ,)
    assert error.unexpected == (renamed,)
    assert f"missing: {WQ} (renamed? the files have {renamed})" in str(error)
    assert f"unexpected: {renamed}" in str(error)


def test_shapes_and_dtypes(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = "model.llm.layers.1.mlp.gate.bias"
    norm = "model.llm.norm.weight"
    w2 = "model.llm.layers.1.mlp.experts.w2_weight"
    changed = {
        WQ: torch.zeros(64, 63),
        bias: torch.zeros(4, dtype=torch.float16),
        norm: torch.zeros(64, dtype=torch.int8),
        w2: torch.zeros(4, 64, 16, dtype=torch.uint8),
    }
    edit(full, **changed)
    error = refused(full, monkeypatch)
    assert sorted(error.wrong) == sorted(
        [
            f"{WQ}: shape [64, 63], expected [64, 64]",
            f"{bias}: dtype F16, expected BF16 or F32",
            f"{norm}: dtype I8, expected BF16 or F32",
            f"{w2}: dtype U8, expected BF16 or F32; shape [4, 64, 16], expected [4, 64, 32]",
        ]
    )
    assert error.missing == error.unexpected == ()


def test_everything_at_once_is_one_error(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(full, **{WQ: None, "model.llm.extra.weight": torch.zeros(3), "model.llm.norm.weight": torch.zeros(63)})
    error = refused(full, monkeypatch)
    assert (len(error.missing), len(error.unexpected), len(error.wrong)) == (1, 1, 1)


def test_a_checkpoint_of_another_size(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.loads((full / "config.json").read_text())
    raw["text_config"]["num_hidden_layers"] = 2
    raw["text_config"] |= {"local_layer_ids": [0], "layer_types": None, "mlp_layer_types": ["dense", "sparse"]}
    (full / "config.json").write_text(json.dumps(raw))
    error = refused(full, monkeypatch)
    assert len(error.unexpected) == 21
    assert all(name.startswith("model.llm.layers.2.") for name in error.unexpected)
    assert "and 9 more" in str(error)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_a_truncated_file(full: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = full / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    error = refused(full, monkeypatch)
    assert "model.safetensors is truncated" in str(error)
    assert len(error.wrong) == 1
    assert error.missing == ()


def test_a_truncated_shard_is_one_line(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 10)
    error = refused(sharded, monkeypatch)
    assert error.missing == error.unexpected == ()
    assert len(error.wrong) == 1
    assert f"{file.name} is truncated: {size - 10} bytes of {size}" in error.wrong[0]


def test_a_file_longer_than_its_header_says(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (full / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 8)
    assert "its header accounts for" in str(refused(full, monkeypatch))


@pytest.mark.parametrize(
    "header", [b"{not json", b"[1, 2]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}']
)
def test_a_damaged_header(full: Path, header: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (full / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    error = refused(full, monkeypatch)
    assert "model.safetensors" in str(error)
    assert "no safetensors file" in str(error) or "is damaged" in str(error)


def test_a_lost_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sorted(sharded.glob("*.safetensors"))[0]
    names = list(load_file(file))
    file.unlink()
    error = refused(sharded, monkeypatch)
    assert sorted(error.missing) == sorted(f"{name} (its file {file.name} does not exist)" for name in names)
    assert error.wrong == error.unexpected == ()


def test_an_index_that_disagrees_with_the_files(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.loads((sharded / INDEX).read_text())
    places = index["weight_map"]
    files = sorted(set(places.values()))
    was = places.pop(WQ)
    norm = "model.llm.norm.weight"
    wrong = next(file for file in files if file != places[norm])
    right, places[norm] = places[norm], wrong
    (sharded / INDEX).write_text(json.dumps(index))
    error = refused(sharded, monkeypatch)
    assert sorted(error.missing) == sorted([WQ, f"{norm} (the index places it in {wrong}, which has no such tensor)"])
    assert sorted(error.unexpected) == sorted(
        [f"{WQ} (in {was}, but the index does not list it)", f"{norm} (in {right}, but the index does not list it)"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "not valid JSON"),
        ('{"metadata": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "expected files of its own folder"),
    ],
)
def test_an_index_that_is_none(sharded: Path, content: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / INDEX).write_text(content)
    assert message in str(refused(sharded, monkeypatch))


def test_folders_that_are_no_checkpoint(full: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "absent" / "folder")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint.open(full / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path / "empty")
    (full / "model.safetensors").rename(full / "part.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*it has part\.safetensors"):
        Checkpoint.open(full)
    (full / "part.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(full)


def test_adapter_tensors_are_ignored_and_reported(full: Path) -> None:
    names = [f"model.llm.layers.0.attn.wq_du.lora_{side}.weight" for side in "AB"]
    edit(full, **{name: torch.zeros(4, 64) for name in names})
    with Checkpoint.open(full) as checkpoint:
        assert checkpoint.ignored == tuple(names)
        assert any("2 LoRA adapter tensors" in note for note in checkpoint.notes)


def mtp_tensors(depths: int) -> dict[str, torch.Tensor]:
    """One released MTP depth holds these (dense block; depth 0 sliding as layer 0 here)."""
    block = {
        "attn_norm.weight": (64,), "attn.wq_du.weight": (64, 64), "attn.wk_dv.weight": (64, 64),
        "attn.wv_dv.weight": (64, 64), "attn.wr_du.weight": (64, 64), "attn.wo_ud.weight": (64, 64),
        "attn.q_norm.weight": (16,), "attn.k_norm.weight": (16,), "attn.k_sconv.weight": (64, 1, 4),
        "attn.v_sconv.weight": (64, 1, 4), "attn.rel_logits_proj.proj": (16, 8), "attn_sconv.weight": (64, 1, 4),
        "mlp_norm.weight": (64,), "mlp_sconv.weight": (64, 1, 4), "mlp.w13_dn.weight": (160, 64),
        "mlp.w2_md.weight": (64, 80), "mlp.global_scale": (1,),
    }  # fmt: skip
    tensors = {"model.mtp.chain_norm.weight": torch.zeros(64)}
    for depth in range(depths):
        prefix = f"model.mtp.layers.{depth}."
        tensors |= {f"{prefix}transformer_block.{name}": torch.zeros(shape) for name, shape in block.items()}
        tensors |= {f"{prefix}{name}.weight": torch.zeros(64) for name in ("hidden_norm", "embed_norm")}
        tensors[f"{prefix}input_proj.weight"] = torch.zeros(64, 128)
    return tensors


@pytest.mark.parametrize("name", ["full", "text"])
def test_mtp_tensors_are_there_as_a_whole_or_not_at_all(
    saved: dict[str, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved[name], tmp_path / "mtp"))
    raw = json.loads((folder / "config.json").read_text())
    section = raw["text_config"] if name == "full" else raw
    section |= {"num_mtp_layers": 2, "mtp_local_layer_ids": [0, 1], "chain_hidden_post_norm": True}
    (folder / "config.json").write_text(json.dumps(raw))
    with Checkpoint.open(folder) as checkpoint:
        assert not checkpoint.has_mtp
        assert any("2 MTP depths but the files have no MTP tensors" in note for note in checkpoint.notes)
    edit(folder, **mtp_tensors(1))
    error = refused(folder, monkeypatch)
    assert len(error.missing) == 20
    assert all(line.startswith("model.mtp.layers.1.") for line in error.missing)
    edit(folder, **mtp_tensors(2))
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.has_mtp
        assert checkpoint.notes == ()


def test_mtp_tensors_that_the_configuration_does_not_name(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.loads((full / "config.json").read_text())
    raw["text_config"]["num_mtp_layers"] = 0
    (full / "config.json").write_text(json.dumps(raw))
    edit(full, **mtp_tensors(1))
    assert len(refused(full, monkeypatch).unexpected) == 21


def test_a_hub_id_is_downloaded_configuration_first(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(repo_id: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        assert (repo_id, revision) == ("someone/tiny-inkling", "abc")
        asked.append(allow_patterns)
        return str(full)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with Checkpoint.open("someone/tiny-inkling", revision="abc") as checkpoint:
        assert checkpoint.path == full
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]
    (full / "config.json").write_text('{"model_type": "llama"}')
    asked.clear()
    with pytest.raises(ValueError, match="llama"):
        Checkpoint.open("someone/tiny-inkling", revision="abc")
    assert len(asked) == 1, "weights were fetched for a configuration that cannot be used"


@pytest.mark.parametrize("error", [OSError("connection refused"), None])
def test_a_hub_id_that_cannot_be_fetched(error: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*args: object, **kwargs: object) -> str:
        raise error or RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(CheckpointError, match="neither a local folder nor a hub repository"):
        Checkpoint.open("someone/missing")
