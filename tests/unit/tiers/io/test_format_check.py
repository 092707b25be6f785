"""Headers of a directory's files, checked before any file is opened for use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierd.errors import TierFailed
from tierd.tiers.io.format_check import check_versions
from tierd.tiers.store.journal import Journal

STORE = bytes(range(16))


def describe(directory: Path, store: bytes) -> None:
    (directory / "store.json").write_text(json.dumps({"format": 1, "store": store.hex()}))


def test_a_description_of_another_store_is_refused(tmp_path: Path) -> None:
    """A store.json with another id than the files beside it is refused with both ids; no file changes."""
    Journal.create(tmp_path, store=STORE, number=1).close()
    describe(tmp_path, STORE)
    check_versions(tmp_path)
    describe(tmp_path, bytes(16))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TierFailed, match=f"{bytes(16).hex()}.*journal-.*{STORE.hex()}"):
        check_versions(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
