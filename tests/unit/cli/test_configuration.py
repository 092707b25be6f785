"""Settings from a file and from the command line, for `tierd config` and `tierd serve`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tierd.cli import daemon
from tierd.cli.configuration import settings_of, toml_lines
from tierd.config import load_config, read_config, resolve
from tierd.settings import Config

FILE = """
[identity]
tenants = { "1000" = "search" }
[[host]]
capacity = "64 MiB"
eviction = "lru"
[[nvme]]
path = "/mnt/one"
capacity = "1 GiB"
direct = "off"
[scrub]
bandwidth = "10 MiB/s"
"""


def run(*words: str) -> Result:
    return CliRunner(env={"TIERD_CONFIG": None}).invoke(daemon.cli, list(words), prog_name="tierd")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "tierd.toml").write_text(FILE)
    return path


def test_a_valid_file_ends_with_0(file: Path) -> None:
    """`tierd config check` confirms a valid file in one line."""
    result = run("config", "check", str(file))
    assert (result.exit_code, result.output) == (0, f"{file}: the configuration is valid.\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[server]\nclok = "replay"\n', "server.clock"),
        ("[[host]\n", "line 1"),
        ('[[host]]\ncapacity = "much"\n', "host.0.capacity"),
        ('[[host]]\neviction = "magic"\n', "magic"),
        ('[[nvme]]\ncodec = "rot-5-5"\n', "nvme.0: codec: 'rot-5-5' is unknown"),
        ('[[nvme]]\ncodec = "zstd"\n', "nvme.0: codec zstd: package zstandard is not installed; install tierd[zstd]"),
        (None, "cannot be read"),
    ],
    ids=["unknown", "syntax", "size", "policy", "codec", "package", "absent"],
)
def test_a_faulty_file_ends_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: str
) -> None:
    """`tierd config check` and `tierd config show` name the file and its fault in one line on stderr."""
    monkeypatch.setitem(sys.modules, "zstandard", None)  # cannot be imported
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    for command in ("check",) if "magic" in words or "codec" in words else ("check", "show"):
        result = run("config", command, str(path))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
        assert str(path) in result.stderr and words in result.stderr


@pytest.mark.parametrize("words", [(), ("--memory", "1GiB"), ("--disk", "/mnt/a:1TiB", "--disk", "/mnt/b:2TiB")])
def test_what_is_shown_is_read_back_as_the_same(file: Path, words: tuple[str, ...]) -> None:
    """`tierd config show` prints TOML that gives the same settings again."""
    shown = run("config", "show", str(file), *words)
    assert shown.exit_code == 0, shown.output
    (again := file.with_name("again.toml")).write_text(shown.stdout)
    assert run("config", "show", str(again)).stdout == shown.stdout
    if not words:
        assert load_config(again) == load_config(file)


def test_no_tier_is_shown_as_none() -> None:
    """Tiers that are not configured are printed as empty lists, and an empty list reads back as no tier."""
    text = "\n".join(toml_lines(resolve(Config(nvme=()))))
    assert read_config(text).nvme == () and read_config(text).device == ()


def test_sizes_go_over_a_file(file: Path) -> None:
    """--memory and --disk replace sizes and stores; tiers and stores of the file keep other settings."""
    settings = settings_of(file, memory=1 << 30, disks=[("/mnt/one", 2 << 30), ("/mnt/two", 4 << 30)])
    assert [(host.capacity, host.eviction) for host in settings.host] == [(1 << 30, "lru")]
    assert [(s.path, s.capacity, s.direct) for s in settings.nvme] == [
        ("/mnt/one", 2 << 30, "off"),
        ("/mnt/two", 4 << 30, "auto"),
    ]


def test_sizes_stand_in_place_of_a_file() -> None:
    """Without a file, --memory and --disk replace the defaults."""
    settings = settings_of(None, memory=1 << 30, disks=[("/mnt/two", 4 << 30)])
    assert [host.capacity for host in settings.host] == [1 << 30]
    assert [(store.path, store.capacity) for store in settings.nvme] == [("/mnt/two", 4 << 30)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "64 parsecs"), "parsecs"),
        (("--memory", "0"), "below the minimum of 4 KiB"),
        (("--disk", "/mnt/nvme0"), "is not DIR:SIZE; write for example /mnt/nvme0:1TiB"),
        (("--disk", ":1TiB"), "is not DIR:SIZE"),
        (("--disk", "/mnt/nvme0:much"), "'much'"),
        (("--disk", "/a:1GiB", "--disk", "/a:1GiB"), "give each a directory of its own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", [("serve",), ("config", "show")], ids=" ".join)
def test_a_wrong_size_is_refused(command: tuple[str, ...], words: tuple[str, ...], said: str) -> None:
    """An impossible size or directory ends with 2 and a message with the remedy; nothing starts."""
    result = run(*command, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and "Traceback" not in result.output


def test_two_host_tiers_have_no_one_size(file: Path) -> None:
    """--memory over a file with two host tiers is refused, with the remedy."""
    file.write_text(f'{FILE}\n[[host]]\ncapacity = "8 MiB"\n')
    result = run("serve", "--config", str(file), "--memory", "1GiB")
    assert result.exit_code == 2 and "2 [[host]] tables" in result.stderr
