"""Renders configs/reference.toml from the settings: `python tools/gen_reference.py [TARGET]`."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierd.settings import SECTIONS, TIER_SECTIONS, Config, bounds

REFERENCE = Path(__file__).resolve().parent.parent / "configs" / "reference.toml"

HEAD = """\
# Every setting of tierd at its default. A configuration needs only the lines that differ.
#
# How much memory:   [[host]] capacity = "64 GiB"            allocated at start, in /dev/shm
# Which disk:        [[nvme]] path = "/mnt/nvme0/tierd"      with capacity = "1 TiB", allocated at start; the
#                                                            directory's parent must exist
# Two disks:         two [[nvme]] tables                     they share the load
# TCP:               [server] tcp_listen = "127.0.0.1:9441"  with tcp_credential_file
# GPU memory:        [[device]] kind = "cuda"                with capacity
#
# Sizes are bytes, or texts such as "512 MiB" (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB).
# Durations are seconds, or texts such as "5 s" (us, ms, s, min, h).
# Settings marked "live" can change while the daemon runs: `tierctl set`, or a changed file and SIGHUP.
# `tierd config check FILE` checks a file. Environment: TIERD_RUNTIME_DIR, TIERD_STATE_DIR.
# Rendered from tierd/settings.py by tools/gen_reference.py; do not edit.
"""
ORDER = ("host", "nvme", "device", "server", "identity", "events", "telemetry", "scrub", "mover")
"""The order of the tables: those that most configurations change come first."""
TABLES = {
    "host": "One table per host tier.",
    "nvme": "One table per disk. Several disks share the load.",
    "device": "One table per GPU, or for host memory in its place.",
}


def render() -> str:
    """The file's text."""
    return "\n".join([HEAD, *(line for section in ORDER for line in _section(section))])


def _section(name: str) -> Iterator[str]:
    settings = SECTIONS[name]
    is_array = name in TIER_SECTIONS
    is_absent = is_array and not getattr(Config(), name)
    yield _comment(settings.__doc__ or "")
    if is_array:
        none = "" if is_absent else f" For none write {name} = [] above the first table."
        yield f"# {TABLES[name]}{none}"
    mark = "# " if is_absent else ""
    yield f"{mark}[[{name}]]" if is_array else f"[{name}]"
    for field in dataclasses.fields(settings):
        yield from _setting(field.name, settings.__pydantic_fields__[field.name], mark=mark)
    yield ""


def _setting(name: str, info: Any, *, mark: str) -> Iterator[str]:
    notes = [note for note in (_unit(info), bounds(info), "live" * bool(info.json_schema_extra.get("live"))) if note]
    yield _comment(info.description + (f" ({'; '.join(notes)})" if notes else ""))
    yield f"{mark}{name} = {_value(info.get_default(call_default_factory=True))}"


def _unit(info: Any) -> str:
    if (choices := getattr(info.annotation, "__args__", ())) and all(isinstance(choice, str) for choice in choices):
        return " | ".join(json.dumps(choice) for choice in choices)
    return str(info.json_schema_extra["unit"])


def _value(default: object) -> str:
    return json.dumps(default) if not isinstance(default, dict) else "{}"


def _comment(text: str) -> str:
    return textwrap.fill(text, width=118, initial_indent="# ", subsequent_indent="# ")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE
    target.write_text(render(), encoding="utf-8")
    print(target)
