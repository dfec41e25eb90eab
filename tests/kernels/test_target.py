"""Targets: the vendors' numbers, the spellings, and what a driver is asked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from inkling_kernels.target import CAPABILITIES, TARGETS, Target, current_target, triton_target, usable_target

KIB = 1024
GPUS = [target for target in TARGETS if target.is_gpu]

# Configurations are refused offline by these limits, never at run time. Typed from the vendors' tables: threads of a
# warp; bytes of shared memory that a block may opt in to; SMs or compute units of the flagship; dense bf16 operations
# that one of those does in a cycle; and the boost clock in GHz that the vendor states, which ties it all to the peak.
LIMITS = {
    "sm80": (32, 166912, 108, 2048, 1.41),
    "sm86": (32, 101376, 84, 1024, 1.74),
    "sm89": (32, 101376, 142, 1024, 2.52),
    "sm90": (32, 232448, 132, 4096, 1.83),
    "sm100": (32, 232448, 148, 8192, 1.86),
    "sm103": (32, 232448, 148, 8192, 1.86),
    "sm120": (32, 101376, 188, 1024, 2.617),
    "sm121": (32, 101376, 48, 1024, 2.5),
    "gfx90a": (64, 65536, 110, 1024, 1.7),
    "gfx942": (64, 65536, 304, 2048, 2.1),
    "gfx950": (64, 163840, 256, 4096, 2.4),
    "gfx1100": (32, 65536, 96, 512, 2.5),
    "gfx1151": (32, 65536, 40, 512, 2.9),
    "gfx1201": (32, 65536, 64, 1024, 2.97),
}
HAS = {
    "bf16_mma": set(LIMITS),
    "fp8_e4m3": {"sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "gfx950", "gfx1201"},
    "fp8_e4m3fnuz": {"gfx942"},
    "native_nvfp4": {"sm100", "sm103", "sm120", "sm121"},
    "native_mxfp4": {"sm100", "sm103", "sm120", "sm121", "gfx950"},
    "wgmma": {"sm90"},
    "tcgen05": {"sm100", "sm103"},
    "mfma": {"gfx90a", "gfx942", "gfx950"},
    "mfma_scale": {"gfx950"},
    "wmma": {"gfx1100", "gfx1151", "gfx1201"},
    "tma": {"sm90", "sm100", "sm103", "sm120", "sm121"},
    "tma_scatter": {"sm100", "sm103"},
}


def test_the_table_holds_exactly_the_promised_devices() -> None:
    assert [target.arch for target in TARGETS] == [*LIMITS, "cpu", "interpret"]
    assert {target.arch: target.vendor for target in GPUS} == {
        arch: "cuda" if arch.startswith("sm") else "hip" for arch in LIMITS
    }


@pytest.mark.parametrize("arch", LIMITS)
def test_limits_are_the_vendors(arch: str) -> None:
    target = Target.parse(arch)
    warp, shared, units, per_cycle, clock = LIMITS[arch]
    assert (target.warp_width, target.shared_memory_bytes, target.compute_units) == (warp, shared, units)
    assert target.peak is not None
    assert target.peak.bf16_flop_per_s == pytest.approx(units * per_cycle * clock * 1e9, rel=0.02)
    assert 1e11 < target.peak.bytes_per_s < 1e13
    assert target.peak.chip == target.name
    assert target.peak.source


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(capability: str) -> None:
    assert {target.arch for target in GPUS if capability in target.capabilities} == HAS[capability]


def test_every_capability_is_documented() -> None:
    assert set().union(*(target.capabilities for target in TARGETS)) == set(CAPABILITIES) == set(HAS)
    assert all(CAPABILITIES.values())


def test_fp8_kind() -> None:
    kinds = {target.arch: target.fp8_kind for target in TARGETS}
    assert kinds["gfx942"] == "e4m3fnuz"
    assert {arch for arch, kind in kinds.items() if kind == "e4m3fn"} == HAS["fp8_e4m3"]
    assert kinds["sm80"] is kinds["gfx90a"] is kinds["gfx1100"] is kinds["cpu"] is kinds["interpret"] is None


def test_triton_agrees_on_warps_and_nvidia_fp8() -> None:
    """Triton's own backends hold some of the same facts, written by the vendors' people."""
    for target in GPUS:
        backend = CUDABackend if target.vendor == "cuda" else HIPBackend
        options = backend(triton_target(target)).parse_options({})
        assert options.warp_size == target.warp_width
        if target.vendor == "cuda":
            assert ("fp8e4nv" in options.supported_fp8_dtypes) == ("fp8_e4m3" in target.capabilities)


def test_the_interpreter_is_the_smallest_gpu_and_no_device() -> None:
    interpret, cpu = Target.parse("interpret"), Target.parse("cpu")
    assert interpret.shared_memory_bytes == min(target.shared_memory_bytes for target in GPUS)
    assert interpret.families == ("interpret", "gpu")
    assert cpu.families == ("cpu",)
    assert (interpret.device_type, cpu.device_type) == ("cpu", "cpu")
    assert not interpret.is_gpu
    assert interpret.capabilities <= frozenset.intersection(*(target.capabilities for target in GPUS))


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_families_name_the_chip_before_the_vendor(target: Target) -> None:
    assert target.families == (target.arch, target.vendor, "gpu")
    assert target.device_type == "cuda"


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("hip:gfx942", "gfx942"),
        ("gfx942", "gfx942"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("hip:gfx90a:sramecc+:xnack-", "gfx90a"),
        ("cuda:90", "sm90"),
        ("cuda:sm90", "sm90"),
        ("sm90", "sm90"),
        ("sm_90a", "sm90"),
        ("sm_100f", "sm100"),
        (" SM_120 ", "sm120"),
        ("cuda:121", "sm121"),
        ("cpu", "cpu"),
        ("interpret", "interpret"),
    ],
)
def test_spellings(text: str, arch: str) -> None:
    assert Target.parse(text).arch == arch


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_str_reads_back(target: Target) -> None:
    assert Target.parse(str(target)) is target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "90",
        "hip:90",
        "hip:sm90",
        "cuda:gfx942",
        "cuda:cpu",
        "cuda",
        "gpu",
        "sm75",
        "sm9",
        "sm90b",
        "gfx94",
        "gfx906",
        "gfx942,gfx950",
        "cuda:9.0",
        "sm90 sm80",
        "cuda:",
    ],
)
def test_unknown_targets_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="unknown target") as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)
    assert all(str(target) in str(caught.value) for target in TARGETS)


def test_a_target_is_spelled_in_a_string() -> None:
    with pytest.raises(TypeError, match="90"):
        Target.parse(90)  # type: ignore[arg-type]


@given(st.one_of(st.text(max_size=12), st.from_regex(r"(cuda|hip|rocm)?:?(sm_?|gfx)?[0-9a-f]{1,4}[a-z:+-]{0,3}")))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_known_target_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert Target.parse(text) in TARGETS


def test_targets_are_values() -> None:
    target = Target.parse("sm90")
    assert {target: 1}[Target.parse("cuda:90")] == 1
    with pytest.raises(AttributeError):
        target.warp_width = 64  # type: ignore[misc]


def test_triton_names() -> None:
    assert triton_target(Target.parse("sm103")) == GPUTarget("cuda", 103, 32)
    assert triton_target(Target.parse("gfx950")) == GPUTarget("hip", "gfx950", 64)
    assert triton_target(Target.parse("gfx1201")) == GPUTarget("hip", "gfx1201", 32)
    for name in ("cpu", "interpret"):
        with pytest.raises(ValueError, match=name):
            triton_target(Target.parse(name))


def _driver(monkeypatch: pytest.MonkeyPatch, hip: str | None, *props: SimpleNamespace) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(props))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props[index])
    monkeypatch.setattr(torch.version, "hip", hip)


def _nvidia(name: str, major: int, minor: int, units: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=units)


def _amd(name: str, arch: str, units: int) -> SimpleNamespace:
    # ROCm's torch fills in major and minor too, and the architecture with its features.
    return SimpleNamespace(name=name, gcnArchName=arch, major=9, minor=0, multi_processor_count=units)


def test_without_a_gpu_the_current_target_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, None)
    assert current_target() is Target.parse("cpu")


def test_the_driver_gives_name_and_units_and_the_table_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, None, _nvidia("NVIDIA H20", 9, 0, 78), _nvidia("NVIDIA B200", 10, 0, 148))
    h20 = current_target()
    assert (h20.arch, h20.name, h20.compute_units) == ("sm90", "NVIDIA H20", 78)
    assert (h20.shared_memory_bytes, h20.capabilities) == (227 * KIB, Target.parse("sm90").capabilities)
    assert h20.peak is not None
    assert h20.peak.chip != h20.name
    assert current_target(1).arch == "sm100"


def test_rocm_architectures_lose_their_features(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, "7.2.0", _amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 38))
    partition = current_target()
    assert (str(partition), partition.compute_units) == ("hip:gfx942", 38)


def test_rdna_counts_compute_units_not_workgroup_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, "7.2.0", _amd("AMD Radeon RX 7900 XTX", "gfx1100", 48))
    assert current_target().compute_units == Target.parse("gfx1100").compute_units


@pytest.mark.parametrize(
    ("hip", "props", "named"),
    [
        (None, _nvidia("NVIDIA GeForce RTX 2080 Ti", 7, 5, 68), ["NVIDIA GeForce RTX 2080 Ti", "sm75"]),
        ("7.2.0", _amd("AMD Instinct MI100", "gfx908:sramecc+", 120), ["AMD Instinct MI100", "gfx908"]),
    ],
)
def test_a_gpu_of_unknown_architecture_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, props: SimpleNamespace, named: list[str]
) -> None:
    _driver(monkeypatch, hip, props)
    with pytest.raises(ValueError, match="supported architectures") as caught:
        current_target()
    assert all(word in str(caught.value) for word in [*named, "sm80", "gfx1201"])


def test_importing_and_parsing_load_neither_torch_nor_triton() -> None:
    script = (
        "import sys\n"
        "from inkling_kernels.target import Target\n"
        "Target.parse('sm90')\n"
        "raise SystemExit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.gpu
def test_this_machines_gpu_is_the_one_that_the_table_describes() -> None:
    target = current_target()
    props = torch.cuda.get_device_properties(0)
    assert target.is_gpu
    assert target.shared_memory_bytes == props.shared_memory_per_block_optin
    assert target.warp_width == props.warp_size


def test_a_device_to_run_on_must_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inkling_kernels.target.current_target", lambda: Target.parse("gfx942"))
    assert usable_target("auto").arch == usable_target("hip:gfx942").arch == "gfx942"
    assert usable_target("cpu").arch == "cpu"
    assert usable_target("interpret").arch == "interpret"
    with pytest.raises(ValueError, match="device is 'sm90', but this machine has hip:gfx942"):
        usable_target("sm90")
    with pytest.raises(ValueError, match="unknown target"):
        usable_target("sm75")
