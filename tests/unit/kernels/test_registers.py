"""The parsing of nvcc's report on registers and spills; nightly, with nvcc, of the kernels themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.compilers import skip_without
from tests.depth import report
from tools import fatbins
from tools.kernels import MissingTool, resources
from tools.registers import Taken, parsed, spilling

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
    """The report gives each kernel's registers and spills; a report without kernels is an error."""
    assert parsed(SAID) == {"prefill_f16_f16_96": Taken(168, 8), "decode_plan": Taken(32, 0)}
    with pytest.raises(ValueError, match="tells nothing of registers"):
        parsed(SAID.replace("Used", "Takes"))


def test_not_one_byte_is_allowed() -> None:
    """Decode, prefill and slice sums must not spill on any architecture; kernels that move pages may."""
    none, some = Taken(64, 0), Taken(64, 4)
    assert spilling({"decode_bf16_bf16_64": none, "copy_rows_16": some}) == []
    for name in ("decode_bf16_bf16_64_mass", "decode_plan", "prefill_f16_f16_96", "slice_sums"):
        assert spilling({"merge": none, name: some}) == [name]


def test_a_wheel_with_a_kernel_that_spills_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If slice_sums gets too few registers, the build fails by its name and writes no fatbin."""
    unit = next(unit for unit in fatbins.UNITS if unit.name == "hash")
    source = tmp_path / "cuda" / "src" / "hash.cu"
    shutil.copytree(fatbins.SOURCES, tmp_path / "cuda")
    monkeypatch.setattr(fatbins, "OBJECTS", tmp_path / "objects")
    monkeypatch.setattr(fatbins, "SOURCES", tmp_path / "cuda")
    try:
        assert len(list(fatbins.build(tmp_path / "enough", [90], [unit]))) == 1
    except fatbins.MissingNvcc as error:
        skip_without(error, "nvcc")
    starved = source.read_text().replace("(slice_sums, SumsParams, 32, 12,", "(slice_sums, SumsParams, 1024, 2,")
    assert starved != source.read_text()
    source.write_text(starved)
    with pytest.raises(fatbins.NvccError, match="slice_sums: must not spill"):
        list(fatbins.build(tmp_path / "few", [90], [unit]))
    assert not (tmp_path / "few" / "hash.fatbin").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", fatbins.ARCHITECTURES)
def test_the_kernels_spill_nothing(architecture: int) -> None:
    """No kernel spills on any architecture that fatbins are made for."""
    try:
        found = resources(architecture)
    except MissingTool as error:
        skip_without(error, "nvcc")
    report(f"registers on sm_{architecture}", most=max(taken.registers for taken in found.values()))
    assert spilling(found) == []
