"""All checks in order. A check that fails itself becomes a row, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tierd.config import Config
from tierd.doctor.check import Check, Host
from tierd.doctor.disks import check_disks
from tierd.doctor.engines import check_engines
from tierd.doctor.gpus import check_gpus
from tierd.doctor.memory import check_memory
from tierd.doctor.system import check_system


def examine(
    config: Config, host: Host, *, measure: bool = True, show: Callable[[str], None] = lambda _: None
) -> Iterator[Check]:
    """Checks of a machine for a daemon of this resolved configuration, as they are made. Blocks for
    seconds.

    measure: the disks' speed too. show: is told what takes long.
    """
    parts = {
        "system": partial(check_system, config, host),
        "memory": partial(check_memory, config, host),
        "disks": partial(check_disks, config, host, measure=measure, show=show),
        "gpu": partial(check_gpus, config, host),
        "engines": partial(check_engines, host),
    }
    for name, part in parts.items():
        try:
            yield from part()
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            remedy = (
                "run it as the daemon's user" if isinstance(error, PermissionError) else "see the kernel's log (dmesg)"
            )
            yield Check(name, "warning", f"{error.strerror}{where}", "its other checks were not made", remedy)
