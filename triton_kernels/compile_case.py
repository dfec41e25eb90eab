"""What a kernel file promises of its compiled code: the entries of its `COMPILE_CASES`, read by
`tests/compile/harness.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from inkling_kernels.target import TARGETS, Target

# The `instruction` of a case whose kernel multiplies no matrices.
NO_MATRIX: Mapping[str, str] = MappingProxyType({target.arch: "" for target in TARGETS})


@dataclass(frozen=True)
class CompileCase:
    """One launch, compiled without a device for every target.

    * `name`: unique in the file; `row`: the row of the dispatch table that it stands for, `op=name`.
    * `launch`: calls the launcher with tensors on the `meta` device, planned for the target that it is given.
    * `spills`: bytes of registers that the code may spill, by architecture; nothing where it is not named.
    * `instruction`: the matrix instruction that must be there, by architecture, where it is not the one that the
      target's capabilities name; an empty name asks for none.
    * `targets`: the architectures that it is compiled for; all where it names none.
    * `narrow`: pointer arguments that may be addressed with 32 bits, their tensors being small whatever the batch.
    """

    name: str
    row: str
    launch: Callable[[Target], object]
    spills: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    instruction: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    narrow: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def includes(self, target: Target) -> bool:
        """Whether the case is compiled for `target`."""
        return target.is_gpu and target.arch in (self.targets or (target.arch,))

    def expected_instruction(self, target: Target) -> str:
        """The beginning of the matrix instruction's name in PTX or in AMD's assembly."""
        if target.arch in self.instruction:
            return self.instruction[target.arch]
        named = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mfma": "v_mfma", "wmma": "v_wmma"}
        return next((text for capability, text in named.items() if capability in target.capabilities), "mma.sync")
