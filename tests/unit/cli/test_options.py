"""The options that all verbs share: their allowed positions and their effects."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result
from fake_admin import FakeAdmin

from tierd.cli.admin import Connection
from tierd.cli.ctl import cli

Run = Callable[..., Result]
LISTING = ["status", "tiers", "blocks", "tree", "sessions", "namespaces", "engines", "wear", "ceiling"]
WRONG = {
    "--foo": "tierctl: no such option '--foo'; see `tierctl --help`",
    "nothing": "tierctl: no such command 'nothing'; see `tierctl --help`",
    "record nothing": "tierctl: no such command 'nothing'; see `tierctl record --help`",
    "inspect": "tierctl: missing argument 'HASH'; see `tierctl inspect --help`",
    "tree --limit 5000": (
        "tierctl: invalid value for '--limit': 5000 is not in the range 1<=x<=4096; see `tierctl tree --help`"
    ),
    "tree --under xyz": "tierctl: hash: 'xyz' is not 1 to 64 hexadecimal digits; `tierctl blocks` lists hashes",
}


@pytest.mark.parametrize(
    "arguments", [("--json", "status"), ("status", "--json"), ("record", "--json", "status")], ids=" ".join
)
def test_json_may_stand_before_the_verb(run: Run, arguments: tuple[str, ...]) -> None:
    """--json means the same before a verb, before a subverb, and after them."""
    assert isinstance(json.loads(run(*arguments).stdout), dict)


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_one_line(run: Run, words: str) -> None:
    """A wrong command line ends with exit code 2 and one line: the fault, and where to look."""
    result = run(*words.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", WRONG[words] + "\n")


@pytest.mark.parametrize("arguments", [("--target", "/x", "status"), ("status", "--target", "/x")], ids=" ".join)
def test_target_may_stand_before_the_verb(
    run: Run, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--target names the daemon before a verb and after it; the one after the verb wins."""
    asked: list[str | None] = []
    from tierd.cli import ask

    connect: Callable[[str | None], Connection] = ask.connect
    monkeypatch.setattr(ask, "connect", lambda target: (asked.append(target), connect(target))[1])
    assert run(*arguments).exit_code == 0
    assert run("--target", "/y", "status", "--target", "/x").exit_code == 0
    assert asked == ["/x", "/x"]


@pytest.mark.parametrize("verb", LISTING)
def test_output_is_chosen(run: Run, verb: str) -> None:
    """-o json equals --json, and -o wide shows at least the columns of -o table."""
    assert json.loads(run(verb, "-o", "json").stdout) == json.loads(run(verb, "--json").stdout)
    assert run(verb, "-o", "table").stdout.split() == run(verb).stdout.split()
    assert set(run(verb).stdout.split()) <= set(run(verb, "-o", "wide").stdout.split())


@pytest.mark.parametrize("verb", [*LISTING, "inspect 00", "record status"])
def test_watch_looks_again_until_ctrl_c(run: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--watch repeats the verb after that many seconds; Ctrl-C ends it with exit code 130."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("tierd.cli.ask.time.sleep", sleep)
    result = run(*verb.split(), "--watch", "2.5", "--json")
    assert (result.exit_code, slept) == (130, [2.5, 2.5])
    assert [type(json.loads(line)) for line in result.stdout.splitlines()] == [dict, dict]


def test_watch_needs_a_pause(run: Run, admin: FakeAdmin) -> None:
    """A pause of 0 is refused, and no request is sent."""
    assert (run("status", "--watch", "0").exit_code, admin.asked) == (2, [])


def test_help_names_the_options() -> None:
    """The help of a listing verb names -o and --watch."""
    text = CliRunner().invoke(cli, ["tiers", "--help"]).stdout
    assert "--output [table|wide|json]" in text and "--watch SECONDS" in text
