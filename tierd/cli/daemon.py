"""`tierd`: runs the daemon on this machine, demonstrates it, and frees its leftovers.

It turns a command line into a configuration and one call; ctl.py uses a running daemon. A verb
imports the daemon's modules only when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from tierd.cli.configuration import CONFIG, Disk, config, settings_of, sized
from tierd.cli.exits import Program
from tierd.cli.figures import human_bytes
from tierd.cli.help import example
from tierd.cli.kernels import kernels
from tierd.cli.man import man


@click.group(cls=Program, name="tierd", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", message="tierd %(version)s")
def cli() -> None:
    """Keeps the KV cache of large language models across device memory, host memory and NVMe.

    Exit codes: 0 ok; 1 failed; 2 a command line or configuration is wrong; 130 ended by Ctrl-C.
    `tierctl` talks to a running daemon.
    """


@cli.command(
    epilog=example(
        "tierd serve --config /etc/tierd/tierd.toml",
        "tierd serve --memory 64GiB --disk /mnt/nvme0:1TiB --disk /mnt/nvme1:1TiB",
    )
)
@CONFIG
@sized
@click.option("--release-on-exit", is_flag=True, help="Free the host memory on exit; the next start is then cold.")
def serve(config: Path | None, *, release_on_exit: bool, memory: int | None, disks: Sequence[Disk]) -> None:
    """Runs the daemon in the foreground until SIGTERM or SIGINT. SIGHUP reads the file again.

    The daemon reserves its memory and its disk space when it starts. Without --memory, --disk and a
    file it reserves 512 MiB of memory and 4 GiB of disk.
    """
    raise click.exceptions.Exit(run_daemon(config, release=release_on_exit, memory=memory, disks=disks))


def run_daemon(config: Path | None, *, release: bool, memory: int | None = None, disks: Sequence[Disk] = ()) -> int:
    """Runs the daemon with these settings until it ends. Returns its exit status."""
    _fill_standard_streams()
    # Imported objects are never freed. Collecting them takes much of the startup, and later stops
    # the event loop.
    gc.disable()
    # structlog imports it for colored tracebacks, which `logs` does not print.
    with _withheld("rich"):
        from tierd import logs  # noqa: PLC0415  # only `serve` pays for the daemon's imports
    from tierd.server import lifecycle  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    read = partial(settings_of, config, memory=memory, disks=disks)
    settings = read()
    logs.configure(style=settings.server.log_format, level=settings.server.log_level)
    return asyncio.run(lifecycle.serve(settings, release=release, reread=read))


@cli.command(epilog=example("tierd purge --config /etc/tierd/tierd.toml"))
@CONFIG
@click.option(
    "--orphans", is_flag=True, help="Also free the memory of this user's other instances, if no daemon owns it."
)
@click.option("--nvme", is_flag=True, help="Also remove the stores on NVMe, with all their blocks.")
def purge(config: Path | None, *, orphans: bool, nvme: bool) -> None:
    """Frees the host memory of a stopped daemon.

    The blocks in that memory are lost. Blocks on NVMe stay, unless --nvme removes them too. While
    the daemon runs, purge refuses; `tierctl evict` empties the tiers of a running daemon.
    """
    from tierd.cli.leftovers import free_memory, free_stores  # noqa: PLC0415  # the tiers' imports

    settings = settings_of(config)
    freed = free_memory(settings, orphans=orphans) | (free_stores(settings) if nvme else {})
    for directory, size in freed.items():
        click.echo(f"freed {human_bytes(size)} in {directory}")
    if not freed:
        click.echo("nothing to free")


@contextlib.contextmanager
def _withheld(name: str) -> Iterator[None]:
    """Makes imports of a module fail as if it were not installed, unless it is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # as the import system says that there is none
    try:
        yield
    finally:
        del sys.modules[name]


def _fill_standard_streams() -> None:
    """Opens standard streams that a supervisor closed. Otherwise a store's file could get such a
    descriptor, and writes to standard error would damage it."""
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


@cli.command(epilog=example("tierd demo --keep"))
@click.option(
    "--model",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=None,
    help="Directory of a Llama-type checkpoint with a byte vocabulary. Without it, random weights.",
)
@click.option("--keep", is_flag=True, help="Keep the daemon's log and directories.")
@click.option("--codec", metavar="NAME", default=None, help="Encode blocks, and show what it changes; such as rot-4-4.")
def demo(model: Path | None, *, keep: bool, codec: str | None) -> None:
    """Runs a worker that reads a long text five times, each time from another tier.

    The first time is cold. Before the last one the daemon crashes.

    With --codec blocks are stored encoded, in host memory and on NVMe. Tokens may then differ from
    those of a run without a cache. The table shows how many are equal, and the text's perplexity.
    """
    from tierd.cli.demo import run_demo  # noqa: PLC0415  # numpy and the worker's model code

    if codec is not None:
        from tierd.cli.coded_demo import run_coded_demo  # noqa: PLC0415

        raise click.exceptions.Exit(run_coded_demo(model, codec=codec, keep=keep))
    raise click.exceptions.Exit(run_demo(model, keep=keep))


cli.add_command(config)
cli.add_command(kernels)
cli.add_command(man)


def main() -> None:
    """The program's entry point."""
    cli(prog_name="tierd")


if __name__ == "__main__":
    main()
