"""What a chip can do, as a value.

Everything in this project that depends on the device takes a `Target` and never asks a driver, so that every
decision can be made, printed and tested on a machine without that device. `current_target` is the one place
that asks. Importing this module imports neither torch nor triton.

Sources of the facts in the table below, all of them the vendor's:

* shared memory a thread block may opt in to, on NVIDIA: CUDA Programming Guide, "Compute Capabilities", memory
  information per compute capability (163 KB on 8.0; 99 KB on 8.6, 8.9 and 12.x; 227 KB on 9.0 and 10.x);
* LDS, wavefront size and compute units, on AMD: ROCm documentation, "AMD GPU specifications". It lists 128 KiB of LDS
  for RDNA because two compute units share it; one workgroup may allocate 64 KiB (RDNA3 and RDNA4 shader ISA guides);
* matrix instructions and their types: PTX ISA (`wgmma` is sm_90a only; `tcgen05` is sm_100 and sm_103 only;
  `mma` with `kind::mxf4nvf4` is sm_120 and sm_121), the CDNA2/3/4 and RDNA3/3.5/4 shader ISA guides, and ROCm's
  "Data types and precision support" (MI300's fp8 is the FNUZ encoding, MI350's and RDNA4's the OCP one);
* peak rates: the document named in each row's `Peak.source`. Dense, never the figure with sparsity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

CAPABILITIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bf16_mma": "matrix instruction on bfloat16 with float32 accumulation",
        "fp8_e4m3": "fp8 E4M3 in the OCP encoding (e4m3fn: NaN at 0x7F and 0xFF) in hardware",
        "fp8_e4m3fnuz": "fp8 E4M3 in the FNUZ encoding (NaN at 0x80, half the OCP value) in hardware",
        "native_nvfp4": "matrix instruction on E2M1 with E4M3 scales per 16",
        "native_mxfp4": "matrix instruction on E2M1 with E8M0 scales per 32",
        "wgmma": "Hopper's warp-group matrix instruction",
        "tcgen05": "Blackwell's tensor-memory matrix instruction (not on sm120 and sm121)",
        "mfma": "CDNA matrix instruction",
        "mfma_scale": "CDNA4 matrix instruction with block scales",
        "wmma": "RDNA matrix instruction",
        "tma": "loads and stores of whole tiles by descriptor",
        "tma_scatter": "gather and scatter of rows by descriptor (sm100 and sm103 only)",
    }
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The roof of one chip from its vendor's document, for a roofline that has not been measured yet.

    `bytes_per_s` is device memory's bandwidth in bytes a second and `bf16_flop_per_s` the dense bfloat16 matrix rate
    in floating-point operations a second (a multiply-add is two). Both are those of `chip`, which need not be the chip
    at hand: an architecture spans several.
    """

    chip: str
    bytes_per_s: float
    bf16_flop_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """A device to run on or to compile for. Two targets are equal when all their facts are.

    * `vendor`: `cuda`, `hip`, `cpu` or `interpret` (Triton's interpreter, on the CPU).
    * `arch`: `sm90`, `gfx942`, … ; `cpu` and `interpret` for those two.
    * `name`: the chip. In the table, the architecture's flagship; from `current_target`, what the driver says.
    * `warp_width`: threads of a warp or wavefront as Triton launches it (RDNA: wave32).
    * `shared_memory_bytes`: the most that one thread block or workgroup may have. 0 on `cpu`.
    * `compute_units`: SMs or compute units of `name`, from which launch plans size grids and split counts. On MI250X
      those of one GCD, which is what a process sees as a device.
    * `capabilities`: keys of `CAPABILITIES`.
    * `peak`: the flagship's roof, None where the device has none.
    """

    vendor: str
    arch: str
    name: str
    warp_width: int
    shared_memory_bytes: int
    compute_units: int
    capabilities: frozenset[str]
    peak: Peak | None = None

    def __str__(self) -> str:
        """The spelling that `parse` reads back: `hip:gfx942`, `cuda:sm90`, `cpu`, `interpret`."""
        return self.arch if self.arch == self.vendor else f"{self.vendor}:{self.arch}"

    @property
    def is_gpu(self) -> bool:
        """Whether the device itself is a GPU; false for the interpreter."""
        return self.vendor in ("cuda", "hip")

    @property
    def families(self) -> tuple[str, ...]:
        """The names under which a dispatch row may list this target, most specific first.

        `gpu` means "runs Triton kernels", so the interpreter is of that family too: it has no row of its own and takes
        the ones that every GPU can take.
        """
        if self.vendor == "cpu":
            return ("cpu",)
        if self.vendor == "interpret":
            return ("interpret", "gpu")
        return (self.arch, self.vendor, "gpu")

    @property
    def device_type(self) -> str:
        """The `torch.device` type that tensors live on: `cuda` (on ROCm too) or `cpu`."""
        return "cuda" if self.is_gpu else "cpu"

    @property
    def fp8_kind(self) -> str | None:
        """`e4m3fn` or `e4m3fnuz`, the fp8 that the hardware has, or None. Software converts either everywhere."""
        if "fp8_e4m3" in self.capabilities:
            return "e4m3fn"
        return "e4m3fnuz" if "fp8_e4m3fnuz" in self.capabilities else None

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that `text` names, with the flagship's facts.

        Accepts an architecture with or without its vendor, in the spellings that vendors and compilers use:
        `hip:gfx942`, `gfx942:sramecc+:xnack-`, `cuda:90`, `cuda:sm90`, `sm90`, `sm_90a`, `cpu`, `interpret`.

        Raises TypeError when `text` is no string and ValueError, listing the known targets, when it names none of them.
        """
        if not isinstance(text, str):
            raise TypeError(f"target must be a string such as 'hip:gfx942' or 'sm90', not {text!r}")
        match = _SPELLING.fullmatch(text.strip().lower())
        if match:
            vendor, sm, gfx, other = match.group("vendor", "sm", "gfx", "other")
            found = _BY_ARCH.get(f"sm{sm}" if sm else gfx or other)
            if found is not None and vendor in (None, found.vendor):
                return found
        raise ValueError(f"unknown target {text!r}; known targets: {', '.join(map(str, TARGETS))}")


# A bare number is an architecture only behind "cuda:". The suffix letters a and f are compiler modes of the same chip.
_SPELLING: Final = re.compile(
    r"(?:(?P<vendor>cuda|hip):)?"
    r"(?:(?:sm_?|(?<=cuda:))(?P<sm>\d{2,3})[af]?|(?P<gfx>gfx[0-9a-f]+)(?::[a-z0-9+:-]*)?|(?P<other>cpu|interpret))"
)


def _gpu(
    arch: str, warp: int, shared_kib: int, units: int, chip: str, tb_s: float, tflop_s: float, source: str, has: str
) -> Target:
    vendor = "cuda" if arch.startswith("sm") else "hip"
    peak = Peak(chip, tb_s * 1e12, tflop_s * 1e12, source)
    return Target(vendor, arch, chip, warp, shared_kib * 1024, units, frozenset(has.split()), peak)


_BLACKWELL = "bf16_mma fp8_e4m3 native_nvfp4 native_mxfp4 tma"

# fmt: off
TARGETS: Final[tuple[Target, ...]] = (
    #    arch    warp KiB units flagship                        TB/s   bf16 Tflop/s  source of the last two
    _gpu("sm80",   32, 163, 108, "NVIDIA A100 SXM 80GB",        2.039,    312.0, "NVIDIA A100 datasheet",
         "bf16_mma"),
    _gpu("sm86",   32,  99,  84, "NVIDIA A40",                  0.696,    149.7, "NVIDIA A40 datasheet",
         "bf16_mma"),
    _gpu("sm89",   32,  99, 142, "NVIDIA L40S",                 0.864,   362.05, "NVIDIA L40S datasheet",
         "bf16_mma fp8_e4m3"),
    _gpu("sm90",   32, 227, 132, "NVIDIA H200 SXM",             4.8,      989.5, "NVIDIA H200 datasheet, half of 1,979",
         "bf16_mma fp8_e4m3 wgmma tma"),
    _gpu("sm100",  32, 227, 148, "NVIDIA B200",                 8.0,     2250.0, "NVIDIA HGX datasheet, 36 PF / 8 / 2",
         _BLACKWELL + " tcgen05 tma_scatter"),
    # The full die has 160 SMs ("Inside NVIDIA Blackwell Ultra"); the B300 that ships reports 148 to the driver.
    _gpu("sm103",  32, 227, 148, "NVIDIA B300",                 8.0,     2250.0, "NVIDIA HGX datasheet, 36 PF / 8 / 2",
         _BLACKWELL + " tcgen05 tma_scatter"),
    _gpu("sm120",  32,  99, 188, "NVIDIA RTX PRO 6000",         1.792,    503.8, "NVIDIA RTX PRO Blackwell whitepaper",
         _BLACKWELL),
    # NVIDIA states only 1 Pflop/s of sparse FP4; dense bfloat16 is an eighth of that figure on RTX PRO 6000.
    _gpu("sm121",  32,  99,  48, "NVIDIA GB10 (DGX Spark)",     0.273,    125.0, "NVIDIA DGX Spark datasheet, 1 PF / 8",
         _BLACKWELL),
    _gpu("gfx90a", 64,  64, 110, "AMD Instinct MI250X (1 GCD)", 1.6384,   191.5, "AMD MI250X data sheet, half of it",
         "bf16_mma mfma"),
    _gpu("gfx942", 64,  64, 304, "AMD Instinct MI300X",         5.325,   1307.4, "AMD MI300X data sheet",
         "bf16_mma mfma fp8_e4m3fnuz"),
    _gpu("gfx950", 64, 160, 256, "AMD Instinct MI355X",         8.0,     2516.6, "AMD MI355X data sheet",
         "bf16_mma mfma mfma_scale fp8_e4m3 native_mxfp4"),
    _gpu("gfx1100", 32, 64,  96, "AMD Radeon RX 7900 XTX",      0.960,    122.8, "AMD RX 7900 XTX page, FP16",
         "bf16_mma wmma"),
    # 40 compute units * 512 operations a cycle * 2.9 GHz; 256 bits of LPDDR5X-8000.
    _gpu("gfx1151", 32, 64,  40, "AMD Radeon 8060S",            0.256,     59.4, "AMD Ryzen AI Max+ 395 page, derived",
         "bf16_mma wmma"),
    _gpu("gfx1201", 32, 64,  64, "AMD Radeon RX 9070 XT",       0.640,    195.0, "AMD RX 9070 XT page, FP16 matrix",
         "bf16_mma wmma fp8_e4m3"),
    Target("cpu", "cpu", "CPU", warp_width=1, shared_memory_bytes=0, compute_units=1, capabilities=frozenset()),
    # The limits of the smallest GPU, so that what the interpreter runs is what every chip can take; few compute units,
    # because programs run one after another, yet enough for a plan to split.
    Target("interpret", "interpret", "Triton interpreter", warp_width=32, shared_memory_bytes=64 * 1024,
           compute_units=4, capabilities=frozenset({"bf16_mma"})),
)
# fmt: on

_BY_ARCH: Final[Mapping[str, Target]] = MappingProxyType({target.arch: target for target in TARGETS})


def current_target(index: int | None = None) -> Target:
    """The device that torch would use now: GPU `index` (default: torch's current one), or `cpu` where it has none.

    `name` and `compute_units` are the driver's, so that a smaller sibling or a partition of the flagship is planned
    for as what it is; limits and capabilities are the architecture's. Raises ValueError naming the GPU when its
    architecture is not in `TARGETS`.
    """
    import torch

    if not torch.cuda.is_available():
        return _BY_ARCH["cpu"]
    props: Any = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    arch = str(props.gcnArchName).split(":")[0] if torch.version.hip else f"sm{props.major}{props.minor}"
    found = _BY_ARCH.get(arch)
    if found is None:
        known = ", ".join(target.arch for target in TARGETS if target.is_gpu)
        raise ValueError(
            f"this machine's GPU, {props.name} ({arch}), is none of the supported architectures ({known}); "
            "hide it with CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on ROCm) to run on the CPU"
        )
    # HIP counts RDNA's workgroup processors, each of two compute units (ROCm/hip issue 3767); the table counts units.
    per_processor = 2 if "wmma" in found.capabilities else 1
    return replace(found, name=str(props.name), compute_units=props.multi_processor_count * per_processor)


def usable_target(text: str) -> Target:
    """The device that `text` names, to run on: `auto` is what this machine has, anything else as in `Target.parse`.

    Raises ValueError for an unknown name, and for a GPU that this machine does not have.
    """
    if text == "auto":
        return current_target()
    named = Target.parse(text)
    if not named.is_gpu:
        return named
    present = current_target()
    if present.arch != named.arch:
        raise ValueError(f"device is {text!r}, but this machine has {present} ({present.name}); use 'auto' for that")
    return present


def triton_target(target: Target) -> GPUTarget:
    """Triton's own name for `target`, to compile for it without a driver.

    Raises ValueError for `cpu` and `interpret`, for which Triton compiles nothing.
    """
    if not target.is_gpu:
        raise ValueError(f"target {target} is no GPU and Triton compiles for GPUs only; take one such as {TARGETS[0]}")
    from triton.backends.compiler import GPUTarget

    arch = int(target.arch.removeprefix("sm")) if target.vendor == "cuda" else target.arch
    return GPUTarget(target.vendor, arch, target.warp_width)
