"""The daemon's configuration: read once, and checked before anything opens.

TOML in, one frozen `Config` out. Nothing is opened, created or measured here. The tiers check that
memory and disk exist, and `server/assembly.py` that an eviction policy exists. An unknown key is an
error that names its nearest neighbor. `load_config` fills in everything but the machine's
`host.arena_dir`.

    TOML -- read_config --> Config as written -- resolve --> every directory and size set, checked
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import itertools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from tierd import places
from tierd.core.formats.model import PAGE_ALIGN_BYTES
from tierd.errors import ConfigError
from tierd.settings import (
    SECTIONS,
    TIER_SECTIONS,
    Config,
    EventsConfig,
    IdentityConfig,
    MoverConfig,
    ServerConfig,
)
from tierd.tier_settings import AUTO, DeviceConfig, HostConfig, NvmeConfig
from tierd.units import format_bytes

__all__ = [
    "AUTO",
    "Config",
    "DeviceConfig",
    "EventsConfig",
    "HostConfig",
    "IdentityConfig",
    "MoverConfig",
    "NvmeConfig",
    "ServerConfig",
    "auto_segment_bytes",
    "check",
    "load_config",
    "read_config",
    "resolve",
    "split_address",
    "validated",
]

MIB = 1 << 20
SEGMENT_MIN_BYTES = MIB
SEGMENT_MAX_BYTES = 1 << 30
SEGMENT_WANTED_BYTES = 16 * MIB
"""In smaller segments, blocks of large models do not fit."""
SEGMENTS_WANTED = 32
"""The number that "auto" aims at: each trust domain, size class and writer takes at least one."""

Tier = TypeVar("Tier", DeviceConfig, HostConfig, NvmeConfig)

_ADAPTER = TypeAdapter(Config)


def load_config(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    change: Callable[[Config], Config] = lambda written: written,
) -> Config:
    """The resolved config of a file, or the defaults without one. Raises ConfigError.

    change: what a command line makes of the config as it is written.
    """
    if path is None:
        return resolve(change(Config()), environ=environ)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path}: cannot be read ({error}); give the path of a TOML file in UTF-8") from error
    try:
        return resolve(change(read_config(text)), environ=environ)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error


def read_config(text: str) -> Config:
    """The config as written in TOML, with defaults, nothing resolved. Raises ConfigError."""
    try:
        written = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error}; correct the line") from error
    _check_keys(written)
    return validated(written)


def validated(tables: Mapping[str, Any]) -> Config:
    """The config of these tables: types and bounds checked, nothing resolved. Raises ConfigError."""
    try:
        return _ADAPTER.validate_python(tables)
    except ValidationError as error:
        raise ConfigError(_fault(error)) from error


def resolve(config: Config, *, environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Config:
    """Fills in directories, store paths and segment sizes, and checks. Raises ConfigError."""
    uid = os.getuid() if uid is None else uid
    state_dir = config.server.state_dir or places.state_dir(environ, uid=uid)
    resolved = dataclasses.replace(
        config,
        server=dataclasses.replace(
            config.server,
            runtime_dir=config.server.runtime_dir or places.runtime_dir(environ, uid=uid),
            state_dir=state_dir,
        ),
        device=tuple(_with_segment(tier, f"device.{index}") for index, tier in enumerate(config.device)),
        host=tuple(_with_segment(tier, f"host.{index}") for index, tier in enumerate(config.host)),
        nvme=tuple(
            dataclasses.replace(
                _with_segment(tier, f"nvme.{index}"), path=tier.path or os.path.join(state_dir, f"nvme-{index}")
            )
            for index, tier in enumerate(config.nvme)
        ),
    )
    check(resolved)
    return resolved


def auto_segment_bytes(capacity_bytes: int) -> int:
    """The size that "auto" means for a capacity: a power of two, bytes."""
    if capacity_bytes < SEGMENT_MIN_BYTES:
        return max(capacity_bytes, PAGE_ALIGN_BYTES) // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
    wanted = max(capacity_bytes // SEGMENTS_WANTED, min(SEGMENT_WANTED_BYTES, capacity_bytes // 8))
    return min(max(1 << (max(wanted, 1).bit_length() - 1), SEGMENT_MIN_BYTES), SEGMENT_MAX_BYTES)


def check(config: Config) -> None:
    """Refuses impossible settings. Raises ConfigError: thing, fault, value, limit, remedy."""
    _check_paths(config)
    _check_server(config.server)
    _check_identity(config.identity)
    _check_events(config.events)
    if (endpoint := config.telemetry.otlp_endpoint) and not endpoint.startswith(("http://", "https://")):
        _refuse("telemetry.otlp_endpoint", f"{endpoint!r} is no URL; write for example http://127.0.0.1:4317")
    if not config.host and not config.device:
        _refuse("host", "no tier of memory is configured; add a [[host]] table")
    if config.nvme and not config.host:
        _refuse("host", "an nvme tier needs a host tier to read into; add a [[host]] table")
    _check_devices(config)
    for name, tier in _tiers(config):
        _check_tier(name, tier)
    for index, store in enumerate(config.nvme):
        _check_wear(f"nvme.{index}", store)
    paths = [os.path.join(os.path.realpath(tier.path), "") for tier in config.nvme]
    for (one, path), (other, outer) in itertools.permutations(enumerate(paths), 2):
        if path.startswith(outer) and (path != outer or other < one):
            _refuse(
                f"nvme.{one}.path",
                f"{path} is in the store of nvme.{other}, {outer}; give each a directory of its own",
            )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not colon or not host or (":" in host) != is_bracketed or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"{address!r} is not host:port with a port of at most 65535; write for example 127.0.0.1:9440, or [::1]:9440"
        )
    return host, int(port)


def _refuse(thing: str, fault: str) -> NoReturn:
    raise ConfigError(f"{thing}: {fault}")


def _tiers(config: Config) -> Iterator[tuple[str, DeviceConfig | HostConfig | NvmeConfig]]:
    for section in TIER_SECTIONS:
        for index, tier in enumerate(getattr(config, section)):
            yield f"{section}.{index}", tier


def _with_segment(tier: Tier, name: str) -> Tier:
    if tier.segment != AUTO:
        return tier
    segment = auto_segment_bytes(tier.capacity)
    capacity = tier.capacity // segment * segment
    if not capacity:
        _refuse(f"{name}.capacity", f"{format_bytes(tier.capacity)} is less than a page of 4 KiB; give more")
    return dataclasses.replace(tier, segment=segment, capacity=capacity)


def _check_devices(config: Config) -> None:
    is_cuda = [device.kind == "cuda" for device in config.device]
    if any(is_cuda) and not config.host:
        _refuse(
            "host",
            "a device tier of kind cuda needs a host tier, through which its blocks are copied; add a [[host]] table",
        )
    if any(is_cuda) and not all(is_cuda):
        _refuse(f"device.{is_cuda.index(False)}.kind", '"cpu" beside a device of kind "cuda"; give all one kind')
    ordinals = [device.ordinal for device in config.device if device.kind == "cuda"]
    for index, ordinal in enumerate(ordinals):
        if ordinal in ordinals[:index]:
            _refuse(f"device.{index}.ordinal", f"{ordinal} is another device's ordinal too; give each GPU one table")


def _check_paths(config: Config) -> None:
    """Refuses relative paths: they would depend on the directory in which the daemon starts."""
    tables = [(name, getattr(config, name)) for name in SECTIONS if name not in TIER_SECTIONS]
    for name, table in (*tables, *_tiers(config)):
        for key, field in type(table).__pydantic_fields__.items():
            path = getattr(table, key)
            if field.json_schema_extra["unit"] == "path" and path and (not os.path.isabs(path) or "\0" in path):
                _refuse(f"{name}.{key}", f"{path!r} is no absolute path; write one that begins with /")


def _check_server(server: ServerConfig) -> None:
    for socket in (places.SOCKET_NAME, places.SESSION_SOCKET_NAME):
        path = os.path.join(server.runtime_dir, socket)
        if len(os.fsencode(path)) > places.SOCKET_PATH_MAX_BYTES:
            _refuse(
                "server.runtime_dir",
                f"the socket path {path} has {len(os.fsencode(path))} bytes, above the {places.SOCKET_PATH_MAX_BYTES} that"
                " a unix socket may have; choose a shorter directory",
            )
    _check_listener("server.tcp_listen", server.tcp_listen)
    _check_listener("server.metrics_listen", server.metrics_listen)
    if server.page and not server.metrics_listen:
        _refuse(
            "server.page", 'true, but server.metrics_listen is empty; set that to "127.0.0.1:9440", or page to false'
        )
    if server.tcp_listen and not server.tcp_credential_file:
        _refuse(
            "server.tcp_credential_file",
            f"empty, but server.tcp_listen is {server.tcp_listen}; name a file with the credential that callers must bring",
        )
    _check_secret("server.tcp_credential_file", server.tcp_credential_file)


def _check_identity(identity: IdentityConfig) -> None:
    for uid, tenant in identity.tenants.items():
        if not 0 <= uid < 1 << 32:
            _refuse("identity.tenants", f"{uid} is not a uid from 0 to {(1 << 32) - 1}; write what `id -u` prints")
        if not tenant:
            _refuse("identity.tenants", f"the tenant of uid {uid} is empty; name it")
    _check_secret("identity.credential_file", identity.credential_file)


def _check_listener(name: str, address: str) -> None:
    if not address:
        return
    try:
        host, _ = split_address(address)
    except ValueError as error:
        _refuse(name, str(error))
    if host != "localhost" and not _is_loopback(host):
        _refuse(name, f"{host} is not a loopback address; use 127.0.0.1, or reach it from elsewhere through a tunnel")


def _check_events(events: EventsConfig) -> None:
    for name, address in (("bind", events.bind), ("replay_bind", events.replay_bind)):
        if not address.startswith(("tcp://", "ipc://")) and (address or name == "bind"):
            _refuse(
                f"events.{name}",
                f"{address!r} is neither tcp://host:port nor ipc://path; write for example tcp://127.0.0.1:5557",
            )
        try:
            if address.startswith("tcp://"):
                split_address(address.removeprefix("tcp://"))
        except ValueError as error:
            _refuse(f"events.{name}", str(error))
    if events.bind == events.replay_bind:
        _refuse("events.replay_bind", f"{events.bind} is events.bind already; give it an address of its own")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_secret(name: str, path: str) -> None:
    if not path:
        return
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read ({error.strerror}); create it with mode 0600") from error
    if mode & 0o007:
        _refuse(name, f"{path} has mode {mode & 0o777:04o}, open to every user; chmod it to 0600")


def _check_tier(name: str, tier: DeviceConfig | HostConfig | NvmeConfig) -> None:
    _check_segment(name, capacity_bytes=tier.capacity, segment_bytes=tier.segment)
    if not 0 < tier.low_watermark < tier.high_watermark:
        _refuse(
            f"{name}.low_watermark",
            f"{tier.low_watermark:g} must lie above 0 and below the high watermark of {tier.high_watermark:g}; lower it or raise"
            " high_watermark",
        )


def _check_wear(name: str, store: NvmeConfig) -> None:
    if store.endurance_dwpd and store.endurance_tbw:
        _refuse(
            f"{name}.endurance_tbw",
            f"{store.endurance_tbw:g} TB beside endurance_dwpd of {store.endurance_dwpd:g}; keep only one of them",
        )
    if store.wear_budget and store.endurance_bytes and store.wear_budget > store.endurance_bytes:
        _refuse(
            f"{name}.wear_budget",
            f"{store.wear_budget / 1e12:.3g} TB a day is more than the {store.endurance_bytes / 1e12:.3g} TB that the rated endurance allows in all;"
            " lower it, or correct the endurance",
        )


def _check_segment(name: str, *, capacity_bytes: int, segment_bytes: int) -> None:
    capacity, segment = format_bytes(capacity_bytes), format_bytes(segment_bytes)
    if segment_bytes % PAGE_ALIGN_BYTES or not segment_bytes:
        _refuse(f"{name}.segment", f'{segment} is not a multiple of 4 KiB; round it, or write "auto"')
    if segment_bytes > capacity_bytes:
        _refuse(f"{name}.segment", f'{segment} is above the capacity of {capacity}; lower it or write "auto"')
    if capacity_bytes % segment_bytes:
        fits = format_bytes(capacity_bytes // segment_bytes * segment_bytes)
        _refuse(f"{name}.segment", f"{segment} does not divide the capacity of {capacity}; set the capacity to {fits}")


def _check_keys(written: Mapping[str, Any]) -> None:
    """Names the nearest neighbour of an unknown key, which a schema's own error does not."""
    for section, value in written.items():
        if section not in SECTIONS:
            _refuse_key(section, among=list(SECTIONS))
        is_array = section in TIER_SECTIONS
        if not isinstance(value, list if is_array else dict):
            _refuse(section, f"is not {'an array of tables' if is_array else 'a table'}; write {_header(section)}")
        known = [field.name for field in dataclasses.fields(SECTIONS[section])]
        for table in value if is_array else [value]:
            if not isinstance(table, dict):
                _refuse(section, f"{table!r} is not a table; write {_header(section)}")
            for key in table:
                if key not in known:
                    _refuse_key(f"{section}.{key}", among=[f"{section}.{name}" for name in known])


def _header(section: str) -> str:
    return f"[[{section}]]" if section in TIER_SECTIONS else f"[{section}]"


def _refuse_key(key: str, *, among: Sequence[str]) -> NoReturn:
    near = difflib.get_close_matches(key, among, n=1, cutoff=0.0)
    _refuse(key, f"unknown setting; the nearest is {near[0]}, and configs/reference.toml lists all")


def _fault(error: ValidationError) -> str:
    """The first fault in tierd's form: thing, fault, value, limit, remedy."""
    fault = error.errors()[0]
    thing = ".".join(map(str, fault["loc"]))
    text = str(fault.get("ctx", {}).get("error") or f"{fault['input']!r}: {fault['msg']}")
    return f"{thing}: {text}; configs/reference.toml shows the form"
