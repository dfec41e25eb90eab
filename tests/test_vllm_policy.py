"""Where the plug-in's model stands in for vLLM's own: fourteen fake devices, every choice, and no vLLM installed."""

from __future__ import annotations

import pytest

from inkling_kernels.target import TARGETS, Target
from inkling_portable.vllm_plugin import policy, versions

THEIRS = {"sm90", "sm100", "sm103", "gfx950"}


def test_fourteen_devices() -> None:
    assert len([target for target in TARGETS if target.is_gpu]) == 14


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_unset_takes_ours_where_vllm_fails_or_crawls(target: Target) -> None:
    decision = policy.decide(target)
    assert decision.ours == (target.arch not in THEIRS)
    assert decision.reason


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_custom_takes_ours_everywhere(target: Target) -> None:
    assert policy.decide(target, ("CUSTOM",)) == policy.Decision(True, "--attention-backend CUSTOM")


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_another_backend_on_our_path_is_an_error(target: Target) -> None:
    if target.arch in THEIRS:
        assert not policy.decide(target, ("FLASH_ATTN",)).ours
        return
    with pytest.raises(ValueError, match="--attention-backend is TRITON_ATTN, but inkling-portable's model runs here"):
        policy.decide(target, ("TRITON_ATTN",))


def test_one_kind_of_layer_with_another_backend() -> None:
    with pytest.raises(ValueError, match=r"is FLASH_ATTN, but .* leave the flag out or give CUSTOM"):
        policy.decide(Target.parse("sm90"), ("CUSTOM", "FLASH_ATTN"))


def test_the_variable_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, ampere = Target.parse("sm90"), Target.parse("sm80")
    assert policy.decide(hopper, mode="full").ours
    assert not policy.decide(ampere, mode="off").ours
    assert not policy.decide(ampere, ("TRITON_ATTN",), "off").ours
    with pytest.raises(ValueError, match=r"is FLASH_ATTN, but .* runs here \(INKLING_PORTABLE_VLLM=full\)"):
        policy.decide(hopper, ("FLASH_ATTN",), "full")
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    assert policy.mode() == "auto"
    for value in policy.MODES:
        monkeypatch.setenv(policy.VARIABLE, value)
        assert policy.mode() == value
    monkeypatch.setenv(policy.VARIABLE, "on")
    with pytest.raises(ValueError, match="INKLING_PORTABLE_VLLM is 'on'; expected one of auto, full, off"):
        policy.mode()


def test_a_device_of_no_row_stays_with_vllm() -> None:
    assert not policy.decide(None).ours
    with pytest.raises(
        ValueError, match="--attention-backend CUSTOM asks for inkling-portable's model, but it does not"
    ):
        policy.decide(None, ("CUSTOM",))


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.0.dev3+gabc", "0.32.0+cpu", "0.33.0"])
def test_supported_versions(version: str) -> None:
    assert versions.problem(version) is None


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_named_with_what_to_install(version: str) -> None:
    said = versions.problem(version)
    assert said is not None
    assert said.startswith(f"vLLM {version} is outside")
    assert "pip install 'vllm>=0.29,<0.34'" in said
