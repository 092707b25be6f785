"""Every setting of the daemon: its name, default, bounds, unit and meaning.

The one table of settings, as frozen dataclasses; tier_settings.py has the tables of tiers.
config.py reads files and checks settings against each other. Sizes are read as bytes and durations
as seconds. Each field has a description, and a unit if a number or a text has one.

`configs/reference.toml` is rendered from this module by tools/gen_reference.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tierd.core.formats.model import PAGE_ALIGN_BYTES
from tierd.tier_settings import CLOSED, DeviceConfig, HostConfig, NvmeConfig, Rate, Seconds, key, live_key
from tierd.units import format_bytes


@dataclass(frozen=True, config=CLOSED)
class ServerConfig:
    """The daemon itself: directories, limits, listeners, logs."""

    runtime_dir: str = key(
        "",
        "Directory of tierd.sock and session.sock. Empty: TIERD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tierd, else /run/tierd,"
        " else /tmp/tierd-<uid>.",
        unit="path",
    )
    state_dir: str = key(
        "",
        "Directory of the state that outlives a restart. Empty: TIERD_STATE_DIR, else "
        "$XDG_STATE_HOME/tierd, else /var/lib/tierd, else ~/.local/state/tierd.",
        unit="path",
    )
    session_limit: int = live_key(
        256, "Open sessions at most; the daemon refuses more.", unit="sessions", least=1, most=65536
    )
    queue_limit: int = live_key(
        256, "Calls in progress at most; the daemon refuses more.", unit="calls", least=1, most=65536
    )
    session_credits: int = live_key(
        64,
        "Calls that one session may have in progress, at most half of queue_limit. The daemon tells it "
        "to each client. It refuses more, and disconnects a client that keeps exceeding it.",
        unit="calls",
        least=1,
        most=65536,
    )
    max_batch_blocks: int = key(
        65536,
        "Blocks in one call, counted over ranks. The daemon refuses more. "
        "The default is a million tokens in blocks of 16.",
        unit="blocks",
        least=1,
        most=100_000,
    )
    call_timeout: Seconds = live_key("30 s", "Deadline of calls that set none.", unit="seconds", least=0.001)
    shutdown_deadline: Seconds = key(
        "10 s",
        "At shutdown the daemon waits this long for calls and transfers, then cancels them.",
        unit="seconds",
        least=0.0,
    )
    loop_warning: Seconds = key(
        "1 s",
        "If the event loop hangs this long, the daemon logs the stack of every thread.",
        unit="seconds",
        least=0.1,
    )
    loop_limit: Seconds = key(
        "30 s",
        "If the event loop hangs this long, the daemon ends, so that its supervisor restarts it warm.",
        unit="seconds",
        least=0.1,
    )
    session_share: float = live_key(
        0.5,
        "Share of a tier that one session may hold pinned and reserved.",
        unit="share of capacity",
        least=0.01,
        most=1.0,
    )
    clock: Literal["monotonic", "replay"] = key(
        "monotonic",
        'Source of time. "replay": each request carries the time, and background work runs only in '
        "Quiesce calls. A recorded trace then gives the same answers every time.",
    )
    tcp_listen: str = key(
        "",
        "host:port for clients without shared memory. Loopback only; needs tcp_credential_file. Empty: off.",
        unit="address",
    )
    tcp_credential_file: str = key(
        "", "File with the bearer credential that every call over TCP must carry.", unit="path"
    )
    metrics_listen: str = key("", "host:port of /metrics for Prometheus; loopback only. Empty: off.", unit="address")
    page: bool = key(
        False,
        "Serve a web page of the daemon at / of metrics_listen. It shows every local process hits, misses, the tiers, and "
        "the engines of sessions, without tenants, names, models, hashes or tokens.",
    )
    log_format: Literal["console", "json"] = key("console", "Log lines as text, or one JSON object a line.")
    log_level: Literal["debug", "info", "warning", "error"] = live_key("info", "The lowest level that is logged.")
    ceiling: bool = key(
        False,
        "Estimate the hit ratio that more memory would give, for `tierctl ceiling`. It takes up to 2 % of the "
        "daemon's processor time under load, and 30 MiB.",
    )
    watch_queue_events: int = key(
        10000,
        "Events kept for a slow watcher. The daemon drops more, and tells the watcher.",
        unit="events",
        least=1,
        most=10**7,
    )
    decisions: int = key(
        100000,
        "Requests and lost blocks that `tierctl explain` remembers, so many of each: about 300 bytes for both. 0: none.",
        unit="decisions",
        least=0,
        most=10**7,
    )


@dataclass(frozen=True, config=CLOSED)
class IdentityConfig:
    """The identity of clients. The tenant comes from here, never from a request."""

    tenants: dict[int, str] = Field(
        default_factory=dict,
        description='Tenant of a uid, such as { "1000" = "search" }. Other uids are tenants of their own, uid-<number>.',
        json_schema_extra={"unit": "uid to name"},
    )
    credential_file: str = key(
        "",
        "File with one `tenant credential` a line, for containers in which all clients have one uid. "
        "Empty: only uids count.",
        unit="path",
    )


@dataclass(frozen=True, config=CLOSED)
class MoverConfig:
    """Transfers between tiers."""

    transfer_limit: int = live_key(
        1024,
        "Transfers in flight on each link between two tiers. Others queue, demand first.",
        unit="transfers",
        least=1,
        most=65536,
    )
    queue_time: Seconds = live_key(
        "2 s",
        "Reads from a far tier that would wait longer, or longer than half of their deadline, are "
        "refused with a hint. One session and prefetches get half of the queue each.",
        unit="seconds",
        least=0.001,
    )
    queue_blocks: int = live_key(
        16384, "Blocks that may queue for reads from one far tier.", unit="blocks", least=1, most=10**7
    )
    batch_blocks: int = live_key(
        128, "Blocks in one read or write of a tier, 32 MiB at most.", unit="blocks", least=1, most=4096
    )
    hash_threads: int = key(2, "Threads that hash, verify and copy blocks.", unit="threads", least=1, most=256)
    prefetch_on_lookup: bool = live_key(True, "A Lookup without an intent starts to load the far blocks that it finds.")
    prefetch_share: float = live_key(0.5, "Most of a link, and of a tier for blocks not used yet.", least=0, most=1)


@dataclass(frozen=True, config=CLOSED)
class ScrubConfig:
    """The background check of all held pages, and the handling of bad ones."""

    period: Seconds = live_key(
        "24 h", "Every block is verified once per period. 0: only on `tierctl scrub`.", unit="seconds"
    )
    bandwidth: Rate = live_key(
        "100 MiB/s",
        "Limit over all tiers. If a pass takes longer than the period, the daemon logs it once.",
        unit="bytes per second",
        least=PAGE_ALIGN_BYTES,
    )
    quarantine_share: float = key(
        0.05,
        "Share of each tier that quarantined pages may take. Above it the oldest are used again. "
        "A restart empties the quarantine.",
        unit="share of capacity",
        least=0.0,
        most=0.5,
    )


@dataclass(frozen=True, config=CLOSED)
class EventsConfig:
    """KV events tell routers where blocks lie. Any subscriber learns every tenant's tokens."""

    enabled: bool = key(False, "Publish events. Needs pyzmq: pip install 'tierd[events]'.", unit="")
    bind: str = key(
        "tcp://127.0.0.1:5557",
        "Address for subscribers: tcp://host:port, or ipc://path, whose file only its owner can open. "
        "Neither encrypted nor authenticated.",
        unit="address",
    )
    replay_bind: str = key(
        "tcp://127.0.0.1:5558", "Address for replays of missed messages. Empty: none.", unit="address"
    )
    topic: str = key("", 'First frame of each message. llm-d wants "kv@<pod>@<model>".', unit="text")
    format: Literal["map", "array"] = key(
        "map", 'Format of an event: as vLLM writes it now ("map"), or as it did ("array").'
    )
    hashes: Literal["int", "bytes"] = key(
        "int", "A block's hash: the last eight bytes of the engine's hash as an integer, or all bytes."
    )
    buffer: int = key(
        10000,
        "Messages kept for replays, 64 MiB at most.",
        unit="messages",
        least=1,
        most=10**6,
    )
    blocks: int = key(
        262144,
        "Blocks that routers know at one time, about 1 KiB of memory each. Above it the daemon reports "
        "the oldest as removed, although it still has them.",
        unit="blocks",
        least=1,
        most=10**7,
    )


@dataclass(frozen=True, config=CLOSED)
class TelemetryConfig:
    """Traces of calls, from the client to the tier."""

    otlp_endpoint: str = key(
        "",
        "URL of a collector that takes OTLP over gRPC, such as http://127.0.0.1:4317. Calls in a sampled trace send "
        "their spans there. Empty: off. Needs OpenTelemetry: pip install 'tierd[otel]'.",
        unit="URL",
    )


@dataclass(frozen=True, config=CLOSED)
class Config:
    """All settings. The tiers of one kind are indexed in the order in which they are written."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    identity: IdentityConfig = Field(default_factory=IdentityConfig)
    device: tuple[DeviceConfig, ...] = Field(default=())
    host: tuple[HostConfig, ...] = Field(default_factory=lambda: (HostConfig(),))
    nvme: tuple[NvmeConfig, ...] = Field(default_factory=lambda: (NvmeConfig(),))
    mover: MoverConfig = Field(default_factory=MoverConfig)
    scrub: ScrubConfig = Field(default_factory=ScrubConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)


SECTIONS: Mapping[str, type] = {
    "server": ServerConfig,
    "identity": IdentityConfig,
    "device": DeviceConfig,
    "host": HostConfig,
    "nvme": NvmeConfig,
    "mover": MoverConfig,
    "scrub": ScrubConfig,
    "events": EventsConfig,
    "telemetry": TelemetryConfig,
}
"""TOML table -> the settings in it."""

TIER_SECTIONS = ("device", "host", "nvme")
"""Those of SECTIONS that are arrays of tables."""


def bounds(info: Any) -> str:
    """The bounds of a setting, such as "0 to 1"; empty if it has none. info: its pydantic field."""
    least = next((mark.ge for mark in info.metadata if hasattr(mark, "ge")), None)
    most = next((mark.le for mark in info.metadata if hasattr(mark, "le")), None)
    if least is None:
        return ""
    return f"{least:g} or more" if most is None else f"{least:.7g} to {most:.8g}"


def toml_value(value: object, *, unit: str) -> str:
    """One value in TOML. Sizes have units."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(key))} = {toml_value(item, unit='')}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    if isinstance(value, int) and not isinstance(value, bool) and unit.startswith("bytes"):
        return json.dumps(format_bytes(value) + ("/s" if unit == "bytes per second" else ""))
    return json.dumps(value, ensure_ascii=False)
