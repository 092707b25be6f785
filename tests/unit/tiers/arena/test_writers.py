"""Processes that may still write to an arena when its daemon has gone: the next daemon waits for them, or does not begin."""

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
    """A life whose memory these processes might write to, and that ended before the last of them; the others have ended one after another."""
    host = arena(directory)
    await host.open()
    for process in writing:
        host.note_writer(process.pid)
        if process is not writing[-1]:
            process.kill()
            process.wait()
    await host.close(release=False)


async def test_a_start_waits_for_whoever_may_still_write(directory: Path, writer: subprocess.Popen[bytes]) -> None:
    """An arena is opened when the last process that may write to it has gone, and forgets it."""
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
    """One that does not go keeps the arena from being opened, by name and with the remedy; the arena stays as it is."""
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
    """A process that has ended, and one that only has the number of another, are not waited for; the file stays short."""
    await former(directory, other, writer)
    start = noted(directory, writer.pid)
    rewrite(directory, f"{writer.pid} {start + 1}\n1\nno line of it\n")
    host = arena(directory)
    await host.open()
    await host.close(release=True)


def noted(directory: Path, pid: int) -> int:
    """The start time that is noted of this process, the only one."""
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
    """A process that lives, and whose start /proc hides, is refused: the next daemon would take it for gone. One that is gone is none."""
    monkeypatch.setattr(writers, "find_start_time", lambda _pid: None)
    with pytest.raises(OSError, match="hidepid"):
        writers.note_writer(directory, writer.pid)
    writer.kill()
    writer.wait()
    writers.note_writer(directory, writer.pid)
