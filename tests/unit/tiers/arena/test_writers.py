"""A daemon waits for former processes that may still write to its arena, or refuses to start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiers.device.test_cuda import HOST
from tierd.errors import TierFailed
from tierd.tiers.arena import writers
from tierd.tiers.arena.arena import Arena


def living() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


writer, other = pytest.fixture(living, name="writer"), pytest.fixture(living, name="other")


def arena(directory: Path) -> Arena:
    return Arena(HOST, position=1, instance="t", arena_dir=str(directory))


async def former(directory: Path, *writing: subprocess.Popen[bytes]) -> None:
    """A former daemon that recorded these writers. Only the last outlived it; each of the others
    ended before the next was recorded."""
    host = arena(directory)
    await host.open()
    for process in writing:
        host.note_writer(process.pid)
        if process is not writing[-1]:
            process.kill()
            process.wait()
    await host.close(release=False)


async def test_a_start_waits_for_whoever_may_still_write(directory: Path, writer: subprocess.Popen[bytes]) -> None:
    """An arena opens when the last process that may write to it is gone, and drops the record."""
    await former(directory, writer)
    host = arena(directory)
    opening = asyncio.create_task(host.open())
    done, _ = await asyncio.wait([opening], timeout=0.2)
    assert not done, "it did not wait"
    writer.kill()
    await opening
    assert not (host.tables / writers.NAME).exists()
    await host.close(release=True)


async def test_no_start_over_a_process_that_stays(
    directory: Path, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stays blocks the start with an error that names it and the remedy; the arena is kept."""
    await former(directory, writer)
    monkeypatch.setattr(writers, "PATIENCE_S", 0.1)
    with pytest.raises(TierFailed, match=f"process {writer.pid} of an earlier daemon may still write to .*tierd purge"):
        await arena(directory).open()
    writer.kill()
    writer.wait()
    host = arena(directory)
    await host.open()
    await host.close(release=True)


async def test_who_has_gone_is_forgotten(
    directory: Path, writer: subprocess.Popen[bytes], other: subprocess.Popen[bytes]
) -> None:
    """The daemon waits neither for an ended process nor for a reused pid, and the file stays short."""
    await former(directory, other, writer)
    start = noted(directory, writer.pid)
    rewrite(directory, f"{writer.pid} {start + 1}\n1\nno line of it\n")
    host = arena(directory)
    await host.open()
    await host.close(release=True)


def noted(directory: Path, pid: int) -> int:
    """The recorded start time of this process, the only one in the file."""
    (path,) = directory.rglob(writers.NAME)
    (line,) = path.read_text().splitlines()
    assert line.split()[0] == str(pid)
    return int(line.split()[1])


def rewrite(directory: Path, text: str) -> None:
    (path,) = directory.rglob(writers.NAME)
    path.write_text(text)


def test_who_cannot_be_found_again_may_not_write(
    directory: Path, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live process whose start time /proc hides is refused: the next daemon would think it gone.
    A dead process is no error."""
    monkeypatch.setattr(writers, "find_start_time", lambda _pid: None)
    with pytest.raises(OSError, match="hidepid"):
        writers.note_writer(directory, writer.pid)
    writer.kill()
    writer.wait()
    writers.note_writer(directory, writer.pid)
