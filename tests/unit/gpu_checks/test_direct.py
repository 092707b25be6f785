"""How `make gpu` reports reads from a disk to a GPU: direct only if cuFile itself counted them so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.gpu_checks.test_gpu_checks import Ended, small


def told(into: Path, way: str) -> Ended:
    """Runs this part alone. way: the way of the fake cuFile."""
    return small(into, "direct", TIERD_FAKE_CUFILE=way, TIERD_DIRECT_FOLDER=str(into))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("nvfs", "direct, by nvidia-fs"),
        ("p2p", "direct, by PCI P2PDMA"),
        ("posix", "a detour: cuFile read it through host memory"),
        ("", "a detour: DRIVER_NOT_INITIALIZED (5001)"),
    ],
)
def test_what_cufile_counted_is_told(way: str, said: str, tmp_path: Path) -> None:
    """A read that cuFile passed through host memory is a detour although it worked, as without cuFile."""
    ended = told(tmp_path, way)
    assert ended.status == 0
    assert ended.results["direct_read"]["said"].startswith(said), ended.said
    is_direct = said.startswith("direct")
    assert ended.results["direct_rate"]["kind"] == ("row" if is_direct else "left")
    has_kvikio = is_direct and find_spec("kvikio") is not None
    assert ended.results["kvikio_rate"]["kind"] == ("row" if has_kvikio else "left"), ended.said


def test_other_bytes_are_a_failure(tmp_path: Path) -> None:
    """A direct read that returns other bytes than the file's fails the part."""
    ended = told(tmp_path, "wrong")
    assert (ended.status, ended.results["direct_read"]["kind"]) == (1, "left")
    assert "other bytes than the file has" in ended.results["part_direct"]["said"]
