"""Every decoder of disk formats: under matching checksums any bytes give a value or a named error.

`FUZZ_SEED=` runs another seed; a failure prints the bytes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import structlog

from tests.depth import count, percentile, report
from tests.system.mutation import Mutator
from tests.unit.tiers.disk_formats import MAKERS, checksums_off
from tierd.errors import TierdError

SEED = os.environ.get("FUZZ_SEED", "1")
MESSAGES = count(test=200, nightly=20_000, weekly=100_000)
STALL_S = 10.0
"""Ten times the second that a decoder may take."""
MEMORY_BYTES = 256 << 20


@pytest.fixture
def quiet() -> None:
    """Drops the decoders' log lines about damage."""
    kept = structlog.get_config()
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    yield
    structlog.configure(**kept)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MAKERS)
def test_decoder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """Damaged fields under good checksums are refused or decoded; no decoder crashes, stalls or grows."""
    checksums_off(monkeypatch)
    given, mutator, faults = MAKERS[name](tmp_path), Mutator(f"{SEED}/{name}"), dict[str, str]()
    good = given.decode(given.data)
    seconds, refused, before = list[float](), 0, psutil.Process().memory_info().rss
    for _ in range(MESSAGES):
        data = given.damage(mutator)
        begun = time.perf_counter()
        try:
            given.decode(data)
        except TierdError:
            refused += 1
        except Exception as error:
            faults.setdefault(f"{type(error).__name__}: {error}"[:120] + _place(error), repr(data)[:2000])
        seconds.append(time.perf_counter() - begun)
    assert not faults, "\n".join(f"{fault}: {data}" for fault, data in faults.items())
    again = given.decode(given.data)
    assert again == good if not hasattr(good, "metas") else again.metas.tobytes() == good.metas.tobytes()
    gained = psutil.Process().memory_info().rss - before
    report(
        "fuzz decoder",
        format=name,
        seed=SEED,
        messages=MESSAGES,
        refused=refused,
        p99_ms=round(percentile(seconds, 0.99) * 1e3, 3),
        slowest_ms=round(max(seconds) * 1e3, 1),
        gained_mib=gained >> 20,
    )
    assert given.expected() <= set(mutator.mutated), given.expected() - set(mutator.mutated)
    assert max(seconds) < STALL_S
    assert gained < MEMORY_BYTES


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
