"""The table of metrics and the object built from it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from tierd.http_server import Reader
from tierd.metrics import METRICS, Listener, Metrics

UNITS = {"counter": ("_total",), "histogram": ("_seconds",)}
KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


def attributes(metrics: Metrics) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Maps the full name of every metric attribute to its kind and labels."""
    found = {}
    for value in vars(metrics).values():
        if kind := KINDS.get(type(value)):
            name = value._name + ("_total" if kind == "counter" else "")
            found[name] = (kind, value._labelnames)
    return found


def test_rows_and_attributes_are_the_same() -> None:
    """The table's rows and the metrics of Metrics are the same, with their kinds and labels."""
    assert attributes(Metrics()) == {name: (row.kind, row.labels) for name, row in METRICS.items()}


@pytest.mark.parametrize("name", METRICS)
def test_names_end_in_their_unit(name: str) -> None:
    """Counters end in _total, durations in _seconds; each row has a unit and a meaning that is a sentence."""
    row = METRICS[name]
    assert name.startswith("tierd_")
    assert name.endswith(UNITS.get(row.kind, ("",)))
    assert row.unit
    assert row.meaning.endswith(".")


def test_two_daemons_in_one_process_do_not_mix() -> None:
    """No state is global: one object does not show another's counts."""
    one, other = Metrics(), Metrics()
    one.lookups.inc()
    assert (one.counters()["tierd_lookups_total"], other.counters()["tierd_lookups_total"]) == (1, 0)


def test_counters_carry_their_labels() -> None:
    """The map of counters is keyed by name and labels, as an operator writes them."""
    metrics = Metrics()
    metrics.freed.labels(tier="host.0", reason="EVICTED").inc(3)
    assert metrics.counters()['tierd_freed_total{tier="host.0",reason="EVICTED"}'] == 3


def test_render_is_the_text_format_of_prometheus() -> None:
    """The rendered text parses, and a label keeps any value."""
    metrics = Metrics()
    metrics.notice('no O_DIRECT on "/x": buffered')
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert families["tierd_notices"].samples[0].labels == {"what": 'no O_DIRECT on "/x": buffered'}


def test_listen_serves_until_it_is_closed() -> None:
    """GET /metrics returns the rendered text on loopback, and the port is closed after close()."""
    metrics = Metrics()
    metrics.lookups.inc(5)
    serving = Listener(metrics, host="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{serving.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert b"tierd_lookups_total 5.0" in reply.read()
    serving.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_who_asks_for_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to /metrics without a request is closed, and its thread ends."""
    assert Reader.timeout, "none is waited for without an end"
    monkeypatch.setattr(Reader, "timeout", 0.1)
    serving = Listener(Metrics(), host="127.0.0.1", port=0)
    with socket.create_connection(("127.0.0.1", serving.port), timeout=15) as silent:
        assert silent.recv(1) == b""
    serving.close()
