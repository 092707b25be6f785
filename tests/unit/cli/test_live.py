"""The picture of `tierctl top` and its keys, without a terminal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fake_admin import FakeAdmin, samples, served
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tierd._proto import admin_pb2 as pb
from tierd.cli.live import sampling
from tierd.cli.live.frame import TITLE_LINES, ceiling_facts, frame, shares
from tierd.cli.live.keys import keys_of
from tierd.cli.live.rows import rate_rows, tier_rows
from tierd.cli.live.sampling import Change, Rare, Sample, Sampler
from tierd.cli.live.view import HELP, PANE_SORTS, PANES, View
from tierd.cli.top import pressed
from tierd.errors import Unavailable

SIZES = [(80, 24), (120, 40), (200, 50)]
KEYS = ["1", "2", "3", "4", "tab", "backtab", "s", "/", "h", "o", "enter", "escape", "erase", "up", "down", "p", "?"]


def changed(seconds: float = 2.0, **counters: int) -> Change:
    """Two samples of a busy daemon. counters: growth of counters, with _ for each sign in their names."""
    answers = samples()
    before = Sample(10.0, answers["Status"], answers["Tiers"], answers["Sessions"])  # type: ignore[arg-type]
    after = pb.StatusReply()
    after.CopyFrom(before.status)
    after.queues["transfers"] = 3
    for name, count in before.status.counters.items():
        grown = "".join(char if char.isalnum() else "_" for char in name)
        after.counters[name] = count + counters.pop(grown, 0)
    assert not counters
    return Change(before, Sample(10.0 + seconds, after, before.tiers, before.sessions))


def rare() -> Rare:
    """Answers of every rare call, with more runs, stores and figures than a small terminal shows."""
    answers, node = samples(), pb.TreeNode(parent=0, namespace=1, hash=bytes(32), blocks=1, tokens=16, leaves=1)
    tree, wear, namespaces = (answers[name] for name in ("Tree", "Wear", "Namespaces"))
    assert isinstance(tree, pb.TreeReply) and isinstance(wear, pb.WearReply)
    tree.nodes.extend([node] * 150)
    wear.stores.extend([wear.stores[0]] * 9)
    points = [pb.CeilingPoint(factor=n, bytes=n << 38, hit_ratio=n / 20) for n in range(1, 15)]
    points[12].bytes = 0
    hour = pb.CeilingWindow(seconds=3600, tokens=1000, points=points)
    day = pb.CeilingWindow(seconds=86400, tokens=9, points=[pb.CeilingPoint(bytes=7, hit_ratio=0.99)])
    return Rare(wear, tree, pb.CeilingReply(windows=[day, hour]), namespaces)  # type: ignore[arg-type]


def drawn(
    view: View, *, size: tuple[int, int] = SIZES[0], trouble: str = "", change: Change | None = None
) -> list[str]:
    """The frame as the lines of a terminal of this size."""
    console = Console(force_terminal=True, width=size[0], height=size[1], color_system="256", legacy_windows=False)
    text = frame(console, change or changed(), rare(), view, trouble=trouble)
    with console.capture() as captured:
        console.print(text, end="")
    assert captured.get().count("\n") == text.plain.count("\n")  # nothing wraps
    return text.plain.splitlines()


@pytest.mark.parametrize("size", SIZES, ids=str)
@settings(max_examples=20)
@given(keys=st.lists(st.sampled_from(KEYS), max_size=12), trouble=st.sampled_from(["", "x" * 300]))
def test_a_frame_is_never_larger_than_the_terminal(size: tuple[int, int], keys: list[str], trouble: str) -> None:
    """A frame has as many lines as the terminal, and none is too long, after any keys."""
    view = View()
    assert all(view.press(key) for key in keys)
    lines = drawn(view, size=size, trouble=trouble)
    assert len(lines) == size[1]
    assert max(map(len, lines)) <= size[0]


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (40, 6)], ids=str)
def test_a_tiny_terminal_gets_a_part(size: tuple[int, int]) -> None:
    """Even a terminal of one cell gets a frame of its size."""
    lines = drawn(View(), size=size)
    assert (len(lines), max(map(len, lines)) <= size[0]) == (size[1], True)


@given(st.lists(st.integers(3, 300), min_size=4, max_size=4), st.integers(0, 3), st.integers(-5, 200))
def test_panes_share_the_lines(wanted: list[int], focus: int, room: int) -> None:
    """No pane gets more lines than it wants, or a title alone, and no line is left over."""
    given_lines = shares(wanted, focus=focus, room=room)
    assert sum(given_lines) <= max(room, 0)
    assert all(
        0 <= lines <= most and (not lines or lines > TITLE_LINES)
        for lines, most in zip(given_lines, wanted, strict=True)
    )
    assert given_lines[focus] >= min(wanted[focus], room * 2 // 3 if room * 2 // 3 > TITLE_LINES else 0)
    open_ones = [place for place, lines in enumerate(given_lines) if lines and lines < wanted[place]]
    assert not open_ones or sum(given_lines) == room


def test_the_head_tells_hits_queues_wear_and_ceiling() -> None:
    """Above the panes are hit ratios now and since the start, queues, wear and the ceiling."""
    grown = {"tierd_tokens_hit_total_tier__host_0__": 30, "tierd_tokens_missed_total_reason__absent__": 10}
    text = "\n".join(drawn(View(), size=(120, 40), change=changed(**grown)))
    assert "hit ratio now 75.0 % of 40 tokens   since start 79.8 % of 1,040 tokens" in text
    assert "queues  transfers 3" in text
    assert "written  nvme.0 812 GiB today, 101 GiB left" in text
    assert "ceiling  256 GiB 5.0 %   512 GiB 10.0 %" in text
    few = Rare(ceiling=pb.CeilingReply(trouble="too early", windows=rare().ceiling.windows))
    assert ceiling_facts(few.ceiling) == []
    assert "no limit 65.0 %" in "\n".join(drawn(View(), size=(300, 50)))
    assert "no answer, trying again: gone" in "\n".join(drawn(View(), trouble="gone"))


def test_tiers_have_their_own_hit_ratios() -> None:
    """A tier's hit ratio is its share of the tokens asked for, since the last frame and since the start."""
    change = changed(tierd_tokens_hit_total_tier__nvme_0__=5, tierd_tokens_missed_total_reason__busy__=15)
    rows = {str(row[0]): [str(cell) for cell in row] for row in tier_rows(change)}
    assert rows["nvme.0"][5:7] == ["25.0 %", "20.1 %"]
    assert rows["host.0"][5:7] == ["0.0 %", "58.8 %"]
    order = {sort: [str(row[0]) for row in tier_rows(change, sort=sort)] for sort in PANE_SORTS["tiers"]}
    assert order["order"] == ["device.0", "host.0", "nvme.0"]
    assert (order["fill"][0], order["hits"][0]) == ("nvme.0", "host.0")


def test_rates_are_differences_over_time_and_survive_a_restart() -> None:
    """A counter's rate is its growth per second; a counter that fell counts from zero."""
    change = changed(2.0, tierd_lookups_total=50)
    assert (change.per_second(100, 300), change.per_second(100, 20)) == (100.0, 10.0)
    assert rate_rows(change, sort="rate") == [["tierd_lookups_total", "25", "-"]]
    assert "hit ratio now - (no tokens asked for)" in drawn(View(), change=change)[2]


def test_keys_change_the_picture() -> None:
    """Keys focus a pane, sort it, scroll it, filter it, pause, and show the help; q ends the program."""
    view = View()
    for key in ("3", "s", "down"):
        view.press(key)
    text = "\n".join(drawn(view))
    assert re.search(r"3 tree by tokens, 2 to \d+ of 156 ─", text)
    for key in ("/", "0", "1", "q", "erase", "enter"):
        assert view.press(key)
    assert "3 tree by tokens, with '01': 1 of 156 ─" in "\n".join(drawn(view))
    view.press("escape")
    view.press("backtab")
    assert (view.filters["tree"], view.pane) == ("", "sessions")
    view.press("p")
    assert "paused" in drawn(view, size=(120, 40))[-1]
    view.press("?")
    assert any("this help" in line for line in drawn(view))
    assert max(map(len, HELP.splitlines())) <= SIZES[0][0], "no line of the help is cut"
    assert not view.press("q")
    assert set(PANE_SORTS) == set(PANES)


def test_a_terminal_sends_keys_by_sequences() -> None:
    """Arrows and the like are one key each, unknown sequences none, and a lone Escape is a key."""
    assert keys_of("3\x1b[A\x1b[B\x1b[Z\x1b[15~\x1bOPs\x1b") == ["3", "up", "down", "backtab", "s", "escape"]


def test_answers_that_a_daemon_lacks_leave_the_others(admin: FakeAdmin, tmp_path: Path) -> None:
    """A daemon without one of the rare calls is still watched, and its other answers come."""
    del admin.answers["Tree"]
    with served(admin, tmp_path) as connection:
        with Sampler(lambda: connection, interval_s=0.01, tree_sort="hits") as sampler:
            while not sampler.rare.wear.stores or sampler.samples < 3:
                sampler.wait([])
        assert (sampler.trouble, len(sampler.rare.tree.nodes)) == ("", 0)


def test_a_daemon_that_stays_away_ends_top(admin: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is back in time is found again; one that stays away ends top with its error."""
    monkeypatch.setattr(sampling, "RETRY_S", 0.01)
    with served(admin, tmp_path) as connection:
        status = admin.answers["Status"]
        with Sampler(lambda: connection, interval_s=0.01, tree_sort="hits") as sampler:
            admin.answers["Status"] = Unavailable("gone; start it")
            while not sampler.trouble:
                sampler.wait([])
            assert sampler.error is None
            admin.answers["Status"] = status
            while sampler.trouble:
                sampler.wait([])
            monkeypatch.setattr(sampling, "RECONNECT_S", 0.0)
            admin.answers["Status"] = Unavailable("gone; start it")
            while sampler.error is None:
                sampler.wait([])
    assert str(sampler.error) == "gone; start it"


def test_a_sort_key_of_the_tree_asks_the_daemon(admin: FakeAdmin, tmp_path: Path) -> None:
    """The next key to sort the tree by is asked for at once, and q among the keys ends the program."""
    reader, writer = os.pipe()
    with (
        served(admin, tmp_path) as connection,
        Sampler(lambda: connection, interval_s=9.0, tree_sort="hits") as sampler,
    ):
        os.write(writer, b"3s")
        assert pressed(View(), sampler, reader)
        while not any(isinstance(asked, pb.TreeRequest) and asked.sort == "tokens" for _, asked, _ in admin.asked):
            sampler.wait([])
        os.write(writer, b"1q")
        assert not pressed(View(), sampler, reader)
    os.close(reader)
    os.close(writer)
