"""Tests that need a compiler: if the machine has one they run, even if the code reports none."""

from __future__ import annotations

import shutil
from typing import NoReturn

import pytest

from tools.fatbins import MissingNvcc
from tools.kernels import MissingTool


def skip_without(error: MissingTool | MissingNvcc, *tools: str) -> NoReturn:
    """Skips if the machine lacks one of the tools; if it has all, the code is at fault. Raises the
    error."""
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if not lacking:
        raise error
    pytest.skip(f"this machine has no {' and no '.join(lacking)}")
