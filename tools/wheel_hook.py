"""Hatchling runs this when it builds a wheel. It compiles tierd/native if there is a compiler, and
packs the kernels' sources. It adds fatbins if TIERD_FATBINS asks for them and nvcc makes them. It
adds manual pages if tierd's dependencies are installed here."""

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
        if version != "editable":
            build_data["shared_data"] |= self._manual_pages()

    def _manual_pages(self) -> dict[str, str]:
        """The pages for share/man of an environment. pip's own build environment cannot make them."""
        try:
            from tierd.cli.man import write
        except ImportError:
            self.app.display_warning("no manual pages: `tierd man DIR` writes them")
            return {}
        return {str(page): f"share/man/man1/{page.name}" for page in write(Path(self.root) / "build" / "man")}
