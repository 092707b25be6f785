"""The text of a scrape: as prometheus_client's own, in short pieces, shared for a second."""

from __future__ import annotations

import gzip
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tierd import exposition
from tierd.exposition import LINES, Scrapes, render_pieces
from tierd.metrics import Listener, Metrics

CHILD = 6
"""Samples of the largest child: buckets, sum and count."""
ODD = 'back\\slash, "quotes"\nand a new line, é'


@pytest.fixture
def registry() -> CollectorRegistry:
    """Metrics of each kind with odd names and values, and more series than a piece has lines."""
    registry = CollectorRegistry()
    made = Counter("made_total", "Of back\\slashes\nand lines.", ["who"], registry=registry)
    for number in range(60):
        made.labels(who=f"{ODD} {number}").inc(number)
    depth = Gauge("depth", "A depth.", ["queue", "end"], registry=registry)
    for number, value in enumerate((0.1, -1e-9, 1e22, 3, math.inf, -math.inf)):
        depth.labels(queue=f"q{number}", end="a").set(value)
    took = Histogram("took_seconds", "A time.", ["verb"], buckets=(0.1, 1.0, 50.0), registry=registry)
    for number in range(40):
        took.labels(verb=f"v{number}").observe(0.5, exemplar={"trace_id": f"{number:032x}"})
    return registry


def parsed(families: Iterable[Metric]) -> dict[str, object]:
    """Families by name, without the samples that say when a series was made."""
    return {
        family.name: (family.type, family.documentation, [s for s in family.samples if not s.name.endswith("_created")])
        for family in families
        if not family.name.endswith("_created")
    }


def test_both_formats_say_what_the_library_says(registry: CollectorRegistry) -> None:
    """Parsed, each format has the library's families, samples and exemplars."""
    plain, rich = ("".join(render_pieces(registry, openmetrics=kind)) for kind in (False, True))
    theirs, theirs_rich = generate_latest(registry).decode(), openmetrics.generate_latest(registry).decode()
    assert parsed(text_string_to_metric_families(plain)) == parsed(text_string_to_metric_families(theirs))
    read = openmetrics_parser.text_string_to_metric_families
    assert parsed(read(rich)) == parsed(read(theirs_rich))
    assert "trace_id" in rich and "trace_id" not in plain


def test_pieces_are_short(registry: CollectorRegistry) -> None:
    """A piece has LINES samples and the rest of a child's at most, and no line is split over two."""
    pieces = list(render_pieces(registry, openmetrics=True))
    assert len(pieces) > 3
    samples = [sum(line[0] != "#" for line in piece.splitlines()) for piece in pieces]
    assert max(samples) < LINES + CHILD and all(piece.endswith("\n") for piece in pieces)


class Asked:
    """A collector that counts how often it was collected."""

    def __init__(self) -> None:
        self.times = 0

    def collect(self) -> Iterator[Metric]:
        self.times += 1
        return iter(())


def test_scrapes_share_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scrapes of one format at the same time collect once; a later one collects again."""
    registry, asked = CollectorRegistry(), Asked()
    registry.register(asked)
    begun = asked.times  # the registry asks for names
    scrapes = Scrapes(registry)
    monkeypatch.setattr(exposition, "SHARED_S", math.inf)
    assert scrapes.text(openmetrics=False) == scrapes.text(openmetrics=False) == b""
    assert scrapes.text(openmetrics=True) == b"# EOF\n"
    assert asked.times == begun + 2
    monkeypatch.setattr(exposition, "SHARED_S", 0.0)
    scrapes.text(openmetrics=False)
    assert asked.times == begun + 3


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("text/html,*/*;q=0.8", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text; version=1.0.0"),
    ],
)
def test_the_listener_serves_what_is_accepted(accept: str, kind: str) -> None:
    """The format follows the Accept header, and a reader that takes gzip gets it."""
    metrics = Metrics()
    metrics.call_seconds.labels(method="Acquire").observe(0.5, exemplar={"trace_id": "ab"})
    serving = Listener(metrics, host="127.0.0.1", port=0)
    try:
        for more in ({}, {"Accept-Encoding": "gzip"}):
            request = urllib.request.Request(
                f"http://127.0.0.1:{serving.port}/metrics", headers={"Accept": accept, **more}
            )
            with urllib.request.urlopen(request, timeout=10) as reply:
                body = reply.read()
                assert reply.headers["Content-Type"].startswith(kind)
                assert reply.headers.get("Content-Encoding") == more.get("Accept-Encoding")
            text = (gzip.decompress(body) if more else body).decode()
            is_rich = "openmetrics" in kind
            assert (text.endswith("# EOF\n"), 'trace_id="ab"' in text) == (is_rich, is_rich)
        request = urllib.request.Request(f"http://127.0.0.1:{serving.port}/metrics", method="POST", data=b"")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=10)
    finally:
        serving.close()
