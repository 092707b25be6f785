"""`tierd`: runs the daemon on this machine, demonstrates it, and frees its leftovers.

It turns a command line into a configuration and one call; ctl.py uses a running daemon. Only the
command that needs a part of the daemon imports it, so that `--help` is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from tierd.cli.exits import Program
from tierd.cli.figures import human_bytes
from tierd.cli.kernels import kernels

CONFIG = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    envvar="TIERD_CONFIG",
    show_envvar=True,
    help="TOML file; configs/reference.toml lists every key. Without one, the defaults.",
)


@click.group(cls=Program, name="tierd", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", message="tierd %(version)s")
def cli() -> None:
    """Keeps the KV cache of large language models across device memory, host memory and NVMe.

    Exit codes: 0 ok, 1 failed, 2 usage. `tierctl` talks to a running daemon.
    """


@cli.command()
@CONFIG
@click.option(
    "--release-on-exit", is_flag=True, help="Free the host memory at the end, so that the next start is cold."
)
def serve(config: Path | None, *, release_on_exit: bool) -> None:
    """Runs the daemon in the foreground until SIGTERM or SIGINT."""
    raise click.exceptions.Exit(run_daemon(config, release=release_on_exit))


def run_daemon(config: Path | None, *, release: bool) -> int:
    """The daemon's whole life, with the settings of this file; its exit status."""
    _fill_standard_streams()
    # imported objects stay for life: collecting them takes a good part of startup, and later stops
    # the event loop
    gc.disable()
    # structlog loads it for colored tracebacks, which `logs` does not print
    with _withheld("rich"):
        from tierd import logs  # noqa: PLC0415  # only `serve` pays for the daemon's imports
    from tierd.config import load_config  # noqa: PLC0415
    from tierd.server import lifecycle  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    settings = load_config(config)
    logs.configure(style=settings.server.log_format, level=settings.server.log_level)
    return asyncio.run(lifecycle.serve(settings, release=release))


@cli.command()
@CONFIG
@click.option("--orphans", is_flag=True, help="Also the memory of other instances of this user that no daemon owns.")
@click.option("--nvme", is_flag=True, help="Also the stores on NVMe, with all their blocks.")
def purge(config: Path | None, *, orphans: bool, nvme: bool) -> None:
    """Frees the host memory that a daemon left behind; what lies on NVMe stays without --nvme."""
    from tierd.cli.leftovers import free_memory, free_stores  # noqa: PLC0415  # the tiers' imports
    from tierd.config import load_config  # noqa: PLC0415

    settings = load_config(config)
    freed = free_memory(settings, orphans=orphans) | (free_stores(settings) if nvme else {})
    for directory, size in freed.items():
        click.echo(f"freed {human_bytes(size)} in {directory}")
    if not freed:
        click.echo("nothing to free")


@contextlib.contextmanager
def _withheld(name: str) -> Iterator[None]:
    """Makes imports of the module fail as if it were not installed, unless it is already loaded."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # as the import system says that there is none
    try:
        yield
    finally:
        del sys.modules[name]


def _fill_standard_streams() -> None:
    """Opens standard streams that a supervisor closed. Else a store's file would get the number of
    one, and writes to standard error would damage it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for life


@cli.command()
@click.option(
    "--model",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=None,
    help="Directory of a Llama-type checkpoint with a byte vocabulary. Without one, random weights.",
)
@click.option("--keep", is_flag=True, help="Leave the daemon's log and directories behind.")
def demo(model: Path | None, *, keep: bool) -> None:
    """A worker reads a long text five times: cold, then from each tier, then after a crash of the daemon."""
    from tierd.cli.demo import run_demo  # noqa: PLC0415  # numpy and the worker's model code

    raise click.exceptions.Exit(run_demo(model, keep=keep))


cli.add_command(kernels)


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierd")


if __name__ == "__main__":
    main()
