"""Speeds: counted in bytes of blocks, over CPU time."""

from __future__ import annotations

import time

import pytest

from tierd.codecs.named import ALL
from tierd.codecs.planes import Planes
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry
from tierd.quality import speed
from tierd.quality.speed import copy_gbps
from tierd.quality.survey import sample, surveyed


def test_a_speed_is_bytes_over_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that a call moves by 1 ms, the figure is a block's bytes a millisecond."""
    now, called = [5.0], list[int]()
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    def call(i: int) -> None:
        now[0] += 1e-3
        called.append(i)

    shape = KVShape(KVGeometry(1, 1, 64, "bfloat16"), 256)
    assert speed._gbps(call, 3, shape) == pytest.approx(2 * 2 * 64 * 256 / 1e-3 / 1e9)
    assert called[:5] == [0, 1, 2, 0, 1]


def test_every_codec_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a row with size, declared error and speeds; dashes without calibration or package."""
    monkeypatch.setattr(speed, "LEAST_S", 1e-9)
    monkeypatch.setattr(speed, "WORKING_SET", 1)
    on = sample()
    assert copy_gbps(on) > 0
    for codec in ALL:
        row = surveyed(codec, on)
        assert (row["codec"], row["number"], row["is_exact"]) == (codec.name, codec.number, codec.is_exact)
        figures = [row["bits"], row["error"], row["encode_gbps"], row["decode_gbps"]]
        is_missing = row["loops"] == "not installed"
        assert not is_missing or isinstance(codec, Planes)
        assert [figure is None for figure in figures] == [codec.is_calibrated or is_missing] * 4
        if not codec.is_calibrated and not is_missing:
            assert 0 < row["bits"] < 16 and (row["error"] == 0) == codec.is_exact
