"""The text of a scrape, made in pieces, so that the event loop never waits long for the interpreter.

    families ──▶ pieces of LINES lines, with a pause after each ──▶ one text, shared for SHARED_S

The formats are Prometheus's text format 0.0.4 and OpenMetrics 1.0, which alone has exemplars. Both
are without `_created` series, which nothing here reads.
"""

from __future__ import annotations

import gzip
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Exemplar, Sample

LINES = 100
"""Lines of a piece: 0.2 ms."""
PAUSE_S = 0.001
"""After each piece; meanwhile the event loop runs."""
SHARED_S = 1.0
"""A text serves all scrapes for so long."""
MADE = "_created"
OPENMETRICS = "application/openmetrics-text"


def render_pieces(registry: CollectorRegistry, *, openmetrics: bool) -> Iterator[str]:
    """The text of all metrics, in pieces of LINES lines and the rest of a child's."""
    lines = list[str]()
    for collector in list(registry._collector_to_names):
        for name, kind, documentation, series in _families(collector):
            shown = name if openmetrics or kind != "counter" else name + "_total"
            lines.append(f"# HELP {shown} {_escaped(documentation)}\n# TYPE {shown} {kind}\n")
            for labels, samples in series:
                lines += [
                    _line(name, labels, sample, openmetrics=openmetrics) for sample in samples if sample[0] != MADE
                ]
                if len(lines) >= LINES:
                    yield "".join(lines)
                    lines.clear()
    yield "".join([*lines, "# EOF\n" if openmetrics else ""])


class Scrapes:
    """Answers scrapes, as a WSGI application. Threads may share it. Only one of them renders."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = threading.Lock()
        self._made: dict[bool, tuple[float, bytes]] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """One request: the metrics in the format that it accepts, whatever its path."""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b"metrics: only GET and HEAD are served; use one of them\n"]
        kind = choose_encoder(environ.get("HTTP_ACCEPT", ""))[1]
        body = self.text(openmetrics=kind.startswith(OPENMETRICS))
        headers = [("Content-Type", kind)]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            body = gzip.compress(body, 1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body] if environ["REQUEST_METHOD"] == "GET" else []

    def text(self, *, openmetrics: bool) -> bytes:
        """All metrics, at most SHARED_S old."""
        with self._turn:
            made_s, text = self._made.get(openmetrics, (-math.inf, b""))
            if time.monotonic() - made_s >= SHARED_S:
                pieces = list[str]()
                for piece in render_pieces(self._registry, openmetrics=openmetrics):
                    pieces.append(piece)
                    time.sleep(PAUSE_S)
                text = "".join(pieces).encode()
                self._made[openmetrics] = time.monotonic(), text
            return text


Series = tuple[str, Iterable[Sample]]
"""The text of a child's labels, and its samples, whose names are suffixes."""


def _families(collector: Any) -> Iterator[tuple[str, str, str, Iterator[Series]]]:
    """Name, kind, documentation and series of a collector's families. The library's `collect` makes
    all samples of a family at once, which takes too long."""
    if isinstance(collector, MetricWrapperBase):
        yield collector._name, str(collector._type), collector._documentation, _series_of(collector)
        return
    for family in collector.collect():
        cut = len(family.name)
        samples = [sample._replace(name=sample.name[cut:]) for sample in family.samples]
        yield family.name, family.type, family.documentation, iter([("", samples)])


def _series_of(metric: MetricWrapperBase) -> Iterator[Series]:
    if not metric._labelnames:
        yield "", metric._child_samples()
        return
    with metric._lock:
        children = list(metric._metrics.items())
    for values, child in children:
        yield _labels(zip(metric._labelnames, values, strict=True)), child._child_samples()


def _line(family: str, labels: str, sample: Sample, *, openmetrics: bool) -> str:
    if sample.labels:
        labels = ",".join(filter(None, [labels, _labels(sample.labels.items())]))
    line = f"{family}{sample.name}{labels and '{' + labels + '}'} {_number(sample.value)}"
    return f"{line}{_exemplar(sample.exemplar)}\n" if openmetrics and sample.exemplar else line + "\n"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])


def _exemplar(exemplar: Exemplar) -> str:
    return f" # {{{_labels(exemplar.labels.items())}}} {_number(exemplar.value)} {exemplar.timestamp}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
