"""The start of a program: its objects for the garbage collector, its imports and its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tierd.cli.ctl import VERBS, cli

PROGRAM = """
import gc
from tierd.cli.daemon import run_daemon
try:
    run_daemon(None, release=False)
except OSError:
    print(gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count())
"""
"""A start that ends at once, because its directory is a file."""


def test_the_collector_looks_at_no_imports(tmp_path: Path) -> None:
    """The collector runs in a daemon but skips the tens of thousands of objects that live as long as it."""
    (file := tmp_path / "a file").touch()
    env = os.environ | {"TIERD_STATE_DIR": str(file), "TIERD_RUNTIME_DIR": str(file)}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    enabled, seen, spared = ran.stdout.split()
    assert (enabled, int(spared) > 10 * int(seen)) == ("True", True), ran


def test_a_start_does_not_load_rich(tmp_path: Path) -> None:
    """The daemon prints no table, so it does not load rich; a later import still works."""
    (file := tmp_path / "a file").touch()
    env = os.environ | {"TIERD_STATE_DIR": str(file), "TIERD_RUNTIME_DIR": str(file)}
    code = PROGRAM + "import sys; print('rich' in sys.modules); import rich"
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split()[-1] == "False"


def test_matrices_are_multiplied_in_one_thread() -> None:
    """The programs start no linear algebra threads: for the learner's small matrices these mostly wait."""
    code = "import tierd.cli, numpy, os; numpy.ones((500, 500)) @ numpy.ones((500, 500)); print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


def test_no_plugin_gets_into_the_programs(tmp_path: Path) -> None:
    """A start neither searches for nor loads pydantic plugins that other packages offer."""
    (offered := tmp_path / "plug-1.dist-info").mkdir()
    (offered / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    (offered / "entry_points.txt").write_text("[pydantic]\nplug = plug:plug\n")
    (tmp_path / "plug.py").write_text("print('loaded')\n")
    (file := tmp_path / "a file").touch()
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    env = os.environ | {"TIERD_STATE_DIR": str(file), "TIERD_RUNTIME_DIR": str(file), "PYTHONPATH": paths}
    env.pop("PYDANTIC_DISABLE_PLUGINS", None)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert "loaded" not in ran.stdout + ran.stderr


HEAVY = ("pydantic", "prometheus_client", "tierd.server", "tierd.simulator", "tierd.policies")


@pytest.mark.parametrize(
    ("arguments", "more"), [("--help", ("grpc", "numpy", "rich")), ("status", ()), ("tiers", ()), ("top", ())]
)
def test_tierctl_loads_little(tmp_path: Path, arguments: str, more: tuple[str, ...]) -> None:
    """A verb loads only the modules that it needs: a verb that asks a daemon loads no daemon or simulator."""
    code = (
        f"import sys; sys.argv = ['tierctl', {arguments!r}]\nfrom tierd.cli.ctl import main\ntry: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY + more!r} if name in sys.modules])"
    )
    env = os.environ | {"TIERD_TARGET": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_verbs_says_what_they_say(name: str) -> None:
    """The preloaded list of verbs has each verb's name and the first sentence of its help."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert (command.name, command.get_short_help_str(200)) == (name, VERBS[name][1])
