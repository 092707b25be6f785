"""Hatchling runs this when it builds a wheel. It compiles tierd/native if there is a compiler, and
packs the kernels' sources. It adds fatbins if TIERD_FATBINS asks for them and nvcc makes them."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fatbins import for_wheel
from tools.native import FOLDER, compile_native


class FatbinHook(BuildHookInterface[Any]):
    """pyproject.toml names it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and gives hatchling the resulting files. version: `standard` or `editable`."""
        made, said = for_wheel(version)
        build_data["force_include"].update(made)
        self.app.display_warning(said)
        if fault := compile_native():
            self.app.display_warning(fault)
        elif version != "editable":
            build_data["force_include"] |= {str(file): f"tierd/native/{file.name}" for file in FOLDER.glob("*.so")}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
