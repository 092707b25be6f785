"""`tierctl simulate` as a user or a script runs it."""

from __future__ import annotations

import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tierd.cli.ctl import cli
from tierd.cli.stored_form import StoredForm
from tierd.simulator.sequences import Encoding

KEYS = {
    *("trace", "policy", "device", "host", "nvme", "prefix_token_hit", "device_hit", "host_hit", "nvme_hit"),
    *("nvme_writes_footprints", "seconds"),
}


def simulated(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments, "--jobs", "1"], prog_name="tierctl")


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = simulated(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert list(answer) == ["rows"]
    return list(answer["rows"])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three requests: four blocks, the same four again, four other blocks."""
    lines = [
        {"timestamp": 1000 * i, "input_length": 2048, "hash_ids": ids}
        for i, ids in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]))
    ]
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_json_has_a_row_for_every_trace_size_and_policy(trace: str) -> None:
    """Rows have fixed keys, sizes as given, hits as fractions; the order is traces, sizes, policies."""
    found = rows(trace, trace, "--policy", "lru,lfu", "--host", "4blocks,2blocks")
    assert [set(row) for row in found] == [KEYS] * 8
    assert [(row["host"], row["policy"]) for row in found[:4]] == [
        *(("4blocks", "lru"), ("4blocks", "lfu")),
        *(("2blocks", "lru"), ("2blocks", "lfu")),
    ]
    first = {key: found[0][key] for key in KEYS - {"seconds"}}
    third = 1 / 3
    assert first == {
        "trace": trace,
        "policy": "lru",
        "device": None,
        "host": "4blocks",
        "nvme": None,
        "device_hit": 0.0,
        "prefix_token_hit": third,
        "host_hit": third,
        "nvme_hit": 0.0,
        "nvme_writes_footprints": 0.0,
    }
    assert found[2]["prefix_token_hit"] == third / 2


def test_every_tiers_sizes_multiply(trace: str) -> None:
    """Sizes of several tiers are combined; without any sizes, the settings define the tiers."""
    found = rows(trace, "--device", "2blocks,3blocks", "--host", "50%", "--nvme", "100%,7blocks", "--policy", "lru")
    assert [(row["device"], row["host"], row["nvme"]) for row in found] == [
        (device, "50%", nvme) for device in ("2blocks", "3blocks") for nvme in ("100%", "7blocks")
    ]
    assert [(row["host"], row["nvme"]) for row in rows(trace)] == [("512 MiB", "4 GiB")]


def test_the_configuration_says_what_the_command_line_leaves_open(trace: str, tmp_path: Path) -> None:
    """With --config, the tiers and the policy `default` are those of that daemon."""
    config = tmp_path / "tierd.toml"
    config.write_text('nvme = []\n[[host]]\ncapacity = "1 MiB"\neviction = "mru"\n', encoding="utf-8")
    wrong = simulated(trace, "--config", str(config))
    assert (wrong.exit_code, "mru" in wrong.stderr) == (2, True)
    config.write_text('nvme = []\n[[host]]\ncapacity = "1 MiB"\neviction = "lfu"\n', encoding="utf-8")
    assert [(row["host"], row["nvme"]) for row in rows(trace, "--config", str(config))] == [("1 MiB", None)]


def test_the_table_has_a_line_for_every_run(trace: str) -> None:
    """In a pipe the table is plain: policies, sizes and shares; columns without information are absent."""
    lines = simulated(trace, "--policy", "lru,clairvoyant", "--host", "4blocks").stdout.splitlines()
    assert lines[0].split() == ["policy", "host", "hits", "took"]
    assert [re.split(r" {2,}", line)[:3] for line in lines[1:]] == [
        ["lru", "4blocks", "33.33 %"],
        ["clairvoyant", "4blocks", "33.33 %"],
    ]


def test_a_page_is_written_and_says_so_before_anything_runs(trace: str, tmp_path: Path) -> None:
    """--plot FILE.html writes a page beside the table; an impossible file is refused before any request."""
    page = tmp_path / "curves.html"
    assert simulated(trace, "--host", "2blocks,4blocks", "--plot", str(page)).exit_code == 0
    assert "4blocks" in page.read_text(encoding="utf-8")
    for wrong, fault in (("curves.gif", "does not end in .html"), ("none/curves.html", "does not exist")):
        result = CliRunner().invoke(cli, ["simulate", "no-such-trace", "--plot", str(tmp_path / wrong)])
        assert (result.exit_code, fault in result.stderr) == (2, True), result.stderr


def test_pictures_without_matplotlib_say_what_to_install(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package a PNG is refused before the run, with both remedies; a page needs no package."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = simulated(trace, "--host", "4blocks", "--plot", str(tmp_path / "curves.png"))
    assert result.exit_code == 1
    assert "pip install 'tierd[plot]'" in result.stderr and "FILE.html" in result.stderr
    assert simulated(trace, "--host", "4blocks", "--plot", str(tmp_path / "curves.html")).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--host", "many"), "'many' is not a number with a unit"),
        (("--host", "5%,0%"), "'0%' is not above 0"),
        (("--policy", "mru"), "'mru' is no policy; use one of default, clairvoyant,"),
        (("--nvme", "5%"), "needs a host tier to read into; add --host SIZE"),
        (("--host", "1GiB", "--nvme", "5%"), "mix bytes and blocks"),
        (("--host", "1%"), "less than one of 8 blocks"),
        (("--jobs", "0"), "'--jobs'"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(trace: str, arguments: tuple[str, ...], fault: str) -> None:
    """A wrong command line gives exit code 2 and one line with fault and remedy."""
    result = CliRunner().invoke(cli, ["simulate", trace, *arguments], prog_name="tierctl")
    assert (result.exit_code, fault in " ".join(result.stderr.split())) == (2, True), result.output


def cycles(path: Path, *, conversations: int) -> str:
    """Conversations of 128 blocks of 16 tokens each, twice in the same order."""
    lines = [
        {
            "timestamp": 1000 * turn,
            "input_length": 2048,
            "hash_ids": [*range(128 * (turn % conversations), 128 * (turn % conversations) + 128)],
            "tokens_per_block": 16,
        }
        for turn in range(2 * conversations)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("codec", "times"), [("rot-8-8", 1.88), ("rot-4-4", 3.74)])
def test_a_host_tier_holds_more_encoded_tokens(tmp_path: Path, codec: str, times: float) -> None:
    """For a model of 28 layers, a host tier holds this multiple of conversations with a codec, and
    hardly more. Exact first blocks and size classes are included."""
    shape = ("--policy", "lru", "--geometry", "28x8x128", "--host", "4GiB")

    def holds(conversations: int, *more: str) -> bool:
        path = cycles(tmp_path / f"{conversations}", conversations=conversations)
        return rows(path, *shape, *more)[0]["prefix_token_hit"] == pytest.approx(0.5)

    plain = next(n for n in range(20, 14, -1) if holds(n))
    assert not holds(plain + 1)
    assert holds(int(times * plain), "--codec", codec) and not holds(int((times + 0.1) * plain), "--codec", codec)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--codec", "zip", "--host", "1GiB"), "'zip' is unknown"),
        (("--codec", "rot-4-4", "--geometry", "28x8", "--host", "1GiB"), "LAYERSxHEADSxDIM"),
        (("--codec", "rot-4-4", "--geometry", "2x2x80", "--host", "1GiB"), "head_dim 80"),
        (("--codec", "rot-4-4", "--host", "50%"), "sizes in bytes"),
        (("--bits", "4", "--host", "1GiB"), "no --codec"),
        (("--geometry", "2x2x64", "--block-bytes", "64KiB", "--host", "1GiB"), "leave out one"),
    ],
)
def test_options_of_codecs_are_checked(trace: str, options: tuple[str, ...], said: str) -> None:
    """A wrong codec, geometry or combination is an error with its name and a remedy."""
    result = simulated(trace, *options)
    assert result.exit_code != 0 and said in result.output


def test_rates() -> None:
    """A rate is exact for a codec of one length per shape; --bits replaces it."""
    assert StoredForm("rot-4-4").encoding(16) == Encoding(64, Fraction(33, 128))
    assert StoredForm("int8", bits=2.0).encoding(16) == Encoding(64, Fraction(1, 8))
    assert StoredForm("rot-8-8", "2x2x64").block_bytes_of(16) == 16 * 2 * 2 * 2 * 64 * 2
    assert StoredForm(geometry="2x2x64").encoding(16) is None
