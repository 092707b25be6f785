"""The matrix of `test_errno` through the page cache, in its own file so that both can run in parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.errno_matrix import matrix, through


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_matrix(tmp_path: Path) -> None:
    """Each call x errno x its first to twentieth hit, through the page cache."""
    through(tmp_path, "off", matrix("off"))
