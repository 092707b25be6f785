"""Calibrations: files come back whole or not at all, and each codec has its own part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.codecs.calibrated import samples
from tierd.codecs.calibration import FREQUENCIES, Calibration, load
from tierd.codecs.fit import make
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord

GEOMETRY = KVGeometry(2, 2, 16, "float16", "HND")


def small(**changes: float) -> Calibration:
    tensors = {
        FREQUENCIES: np.array([1.0, changes.get("frequency", 0.1)]),
        "x.y": np.arange(6, dtype=np.uint16).reshape(2, 3),
    }
    return Calibration(GEOMETRY, tensors)


def test_a_file_comes_back(tmp_path: Path) -> None:
    """A saved calibration has the same geometry, tensors and hash again."""
    made = make(samples(GEOMETRY))
    made.save(tmp_path / "c")
    found = load(tmp_path / "c")
    assert (found.geometry, found.hash, set(found.tensors)) == (made.geometry, made.hash, set(made.tensors))
    assert all(np.array_equal(found.tensors[name], made.tensors[name]) for name in made.tensors)


def test_the_hash_is_of_everything() -> None:
    """Another shape, frequency, value, dtype or name gives another hash; another order does not."""
    base = small()
    turned = Calibration(GEOMETRY, dict(reversed(list(base.tensors.items()))))
    others = [
        Calibration(KVGeometry(2, 2, 32, "float16", "HND"), base.tensors),
        small(frequency=0.2),
        *(
            Calibration(GEOMETRY, {**base.tensors, "x.y": other})
            for other in (
                np.ones((2, 3), np.uint16),
                base.tensors["x.y"].reshape(3, 2),
                base.tensors["x.y"].view(np.int16),
            )
        ),
        Calibration(GEOMETRY, {FREQUENCIES: base.frequencies, "x.z": base.tensors["x.y"]}),
    ]
    assert turned.hash == base.hash and len({base.hash, *(other.hash for other in others)}) == len(others) + 1


def test_damage_of_a_file_is_found(tmp_path: Path) -> None:
    """A file with a flipped byte or a cut end is refused by name, or says the same as before."""
    path = tmp_path / "c"
    small().save(path)
    good, was = path.read_bytes(), small().hash
    refused = 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            assert load(path).hash == was
        except CorruptRecord as error:
            refused += str(path) in str(error)
    assert refused > 0.9 * len(good)
    for length in (0, 7, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptRecord, match="make it again"):
            load(path)


def test_samples_give_one_calibration() -> None:
    """The same samples give the same calibration, others another."""
    one, same, other = (make(samples(GEOMETRY, seed=seed)) for seed in (0, 0, 1))
    assert one.hash == same.hash != other.hash
