"""A fake Admin service behind the real command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))

from fake_admin import FakeAdmin, served

from tierd.cli.ctl import cli

Run = Callable[..., Result]


@pytest.fixture
def admin() -> FakeAdmin:
    """The service's table of answers."""
    return FakeAdmin()


@pytest.fixture
def run(admin: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Returns a function: `run("status", "--json")` runs the verb against the fake service."""
    with served(admin, tmp_path) as connection:
        monkeypatch.setattr("tierd.cli.ask.connect", lambda target: connection)
        yield lambda *arguments: CliRunner().invoke(cli, list(arguments), prog_name="tierctl")
