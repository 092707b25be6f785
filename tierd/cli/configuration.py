"""A daemon's settings from a file and the command line, and the verbs that show and check them.

Every verb of `tierd` gets its settings here. `--memory` and `--disk` replace values of the file.
tierd.config has the rules of settings. A verb imports the daemon's modules only when it runs, so
that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierd.cli.help import Listing, example
from tierd.errors import ConfigError
from tierd.units import parse_bytes

if TYPE_CHECKING:
    from tierd.config import Config

Command = TypeVar("Command", bound=Callable[..., Any])
Disk = tuple[str, int]
"""A directory, and the bytes that a store may use there."""
LEAST_BYTES = 4096
CONFIG = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    envvar="TIERD_CONFIG",
    show_envvar=True,
    help="TOML file; configs/reference.toml lists every key. Without a file, the defaults apply.",
)


def size_of(text: str) -> int:
    """The bytes of a size. Raises ValueError."""
    size = parse_bytes(int(text) if text.isdecimal() else text)
    if size < LEAST_BYTES:
        raise ValueError(f"{text!r} is below the minimum of 4 KiB, a page; give more")
    return size


class _Memory(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Disk(click.ParamType[Disk]):
    name = "disk"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Disk:
        if isinstance(value, tuple):
            return value
        directory, colon, size = str(value).rpartition(":")
        if not colon or not directory:
            self.fail(f"{value!r} is not DIR:SIZE; write for example /mnt/nvme0:1TiB", param, ctx)
        try:
            return os.path.abspath(directory), size_of(size)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def sized(function: Command) -> Command:
    """Adds --memory and --disk."""
    memory = click.option(
        "--memory", type=_Memory(), metavar="SIZE", help="Size of the host tier, such as 64GiB; replaces the file's."
    )
    disks = click.option(
        "--disk",
        "disks",
        type=_Disk(),
        multiple=True,
        metavar="DIR:SIZE",
        help="A store, such as /mnt/nvme0:1TiB; repeat it for more. Replaces the file's stores.",
    )
    return memory(disks(function))


def settings_of(path: Path | None, *, memory: int | None = None, disks: Sequence[Disk] = ()) -> Config:
    """The settings of a file, else the defaults, with these sizes; resolved. Raises ConfigError."""
    from tierd.config import load_config  # noqa: PLC0415  # pydantic

    return load_config(path, change=lambda config: with_sizes(config, memory=memory, disks=disks))


def with_sizes(config: Config, *, memory: int | None, disks: Sequence[Disk]) -> Config:
    """The settings with a host tier of this size and these stores. Raises ConfigError.

    A tier or store that the settings already have keeps its other settings.
    """
    from tierd.config import HostConfig, NvmeConfig  # noqa: PLC0415  # pydantic

    if memory is not None:
        if len(config.host) > 1:
            raise ConfigError(
                f"--memory: the file has {len(config.host)} [[host]] tables, 1 at most; leave --memory out and "
                "set their capacity"
            )
        host = config.host[0] if config.host else HostConfig()
        config = dataclasses.replace(config, host=(dataclasses.replace(host, capacity=memory, segment=_auto()),))
    if disks:
        known = {os.path.abspath(store.path): store for store in config.nvme if store.path}
        stores = (
            dataclasses.replace(known.get(path, NvmeConfig()), path=path, capacity=size, segment=_auto())
            for path, size in disks
        )
        config = dataclasses.replace(config, nvme=tuple(stores))
    return config


def _auto() -> Any:
    """The value in a file that lets the settings choose a segment size."""
    return "auto"


@click.group(cls=Listing)
def config() -> None:
    """Checks a configuration, or shows all of its settings."""


@config.command(epilog=example("tierd config check /etc/tierd/tierd.toml"))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Checks whether a daemon would accept a configuration file.

    Exit codes: 0 accepted; 2 refused, and one line names the fault. It opens no store and
    allocates nothing.
    """
    from tierd.server.assembly import specs_of  # noqa: PLC0415  # the daemon's imports

    settings = settings_of(file)
    try:
        specs_of(settings)
    except ConfigError as error:
        raise ConfigError(f"config {file}: {error}") from error
    click.echo(f"{file}: the configuration is valid.")


@config.command(epilog=example("tierd config show /etc/tierd/tierd.toml"))
@click.argument("file", required=False, default=None, type=click.Path(dir_okay=False, path_type=Path))
@sized
def show(file: Path | None, *, memory: int | None, disks: Sequence[Disk]) -> None:
    """Shows the settings that a daemon would run with, as TOML.

    The output has every setting: those of FILE or of the environment's TIERD_CONFIG, those of the
    command line, and the defaults.
    """
    chosen = file or (Path(named) if (named := os.environ.get("TIERD_CONFIG")) else None)
    click.echo("\n".join(toml_lines(settings_of(chosen, memory=memory, disks=disks))))


def toml_lines(config: Config) -> Iterator[str]:
    """The settings as TOML. A daemon reads the same settings from it."""
    from tierd.settings import SECTIONS, TIER_SECTIONS, toml_value  # noqa: PLC0415  # pydantic

    empty = [name for name in TIER_SECTIONS if not getattr(config, name)]
    yield from (f"{name} = []" for name in empty)
    for name in SECTIONS:
        held = getattr(config, name)
        for table in held if name in TIER_SECTIONS else (held,):
            yield ""
            yield f"[[{name}]]" if name in TIER_SECTIONS else f"[{name}]"
            for key, field in type(table).__pydantic_fields__.items():
                yield f"{key} = {toml_value(getattr(table, key), unit=field.json_schema_extra['unit'])}"
