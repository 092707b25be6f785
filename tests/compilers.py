"""Tests that need a compiler: where there is one they run, whatever the code thinks of it."""

from __future__ import annotations

import shutil
from typing import NoReturn

import pytest

from tools.fatbins import MissingNvcc
from tools.kernels import MissingTool


def skip_without(error: MissingTool | MissingNvcc, *tools: str) -> NoReturn:
    """Skips where the machine lacks one of the tools; where it has all, the fault is ours. Raises the error."""
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if not lacking:
        raise error
    pytest.skip(f"this machine has no {' and no '.join(lacking)}")
