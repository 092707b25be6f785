"""What nvcc's assembler says of registers and spills, and what is made of it; at night, where there is an nvcc, of the kernels as they are."""

from __future__ import annotations

import pytest

from tests.compilers import skip_without
from tests.depth import report
from tools import fatbins
from tools.kernels import CompilerError, MissingTool, Taken, parsed, resources, spilling

SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'prefill_f16_f16_96' for 'sm_90'
ptxas info    : Function properties for prefill_f16_f16_96
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 15531.327 ms
ptxas info    : Compiling entry function 'decode_plan' for 'sm_90'
ptxas info    : Function properties for decode_plan
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


def test_what_the_assembler_says_is_read() -> None:
    """Of each kernel its registers, and what it stores and loads for want of some; what says nothing of kernels is an error, not a kernel without spills."""
    assert parsed(SAID) == {"prefill_f16_f16_96": Taken(168, 8), "decode_plan": Taken(32, 0)}
    with pytest.raises(CompilerError, match="tells nothing of registers"):
        parsed(SAID.replace("Used", "Takes"))


def test_not_one_byte_is_allowed() -> None:
    """Decode, prefill and sums of slices spill nothing on any architecture; what only moves pages may."""
    none, some = Taken(64, 0), Taken(64, 4)
    assert spilling({80: {"decode_bf16_bf16_64": none}, 90: {"decode_bf16_bf16_64": none, "copy_rows_16": some}}) == []
    for name in ("decode_bf16_bf16_64_mass", "decode_plan", "prefill_f16_f16_96", "slice_sums"):
        assert spilling({80: {name: none}, 120: {name: some}}) == [f"{name} (sm_120)"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", fatbins.ARCHITECTURES)
def test_the_kernels_spill_nothing(architecture: int) -> None:
    """Of every architecture that fatbins are made for."""
    try:
        found = resources(architecture)
    except MissingTool as error:
        skip_without(error, "nvcc")
    report(f"registers on sm_{architecture}", most=max(taken.registers for taken in found.values()))
    assert spilling({architecture: found}) == []
