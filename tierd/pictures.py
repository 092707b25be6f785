"""Files of the option `--plot`, and matplotlib, which tierd does not require."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierd.errors import InvalidArgument, Unsupported

PICTURES, PAGE = (".png", ".svg"), ".html"


def require_matplotlib(otherwise: str = "") -> Any:
    """matplotlib's class of figures. Raises Unsupported without it. otherwise: a second remedy."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            f"--plot: PNG and SVG need matplotlib ({error}); pip install 'tierd[plot]'{otherwise}"
        ) from error
    return Figure


def checked_plot(path: Path, *, may_be_page: bool = False) -> Path:
    """Checks the file for a plot before anything is measured. Raises InvalidArgument, Unsupported."""
    *most, last = (PAGE, *PICTURES) if may_be_page else PICTURES
    if path.suffix not in (*most, last):
        raise InvalidArgument(f"--plot: {path} does not end in {', '.join(most)} or {last}; give such a name")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--plot: the directory {path.parent} does not exist; create it first")
    if path.suffix != PAGE:
        require_matplotlib(f", or write a page, --plot FILE{PAGE}" if may_be_page else "")
    return path
