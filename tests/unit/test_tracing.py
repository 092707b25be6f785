"""Tracing while it is off: nothing is loaded, spans are nothing, and exemplars name calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tierd import call_context, tracing
from tierd.errors import ConfigError


def test_nothing_of_opentelemetry_is_loaded_while_it_is_off() -> None:
    """Neither the SDK nor the daemon loads OpenTelemetry by itself."""
    program = "import sys, tierd.client, tierd.server.lifecycle; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "tierd.tracing" in loaded and not [name for name in loaded if name.startswith("opentelemetry")]


def test_a_span_without_a_trace_is_nothing() -> None:
    """Outside of a trace a span is false and takes attributes; no object is made for it."""
    with tracing.span("plan", blocks=4) as step:
        step.set_attribute("tierd.tokens", 64)
        assert not step
    assert tracing.span("wait") is tracing.span("commit")


def test_an_exemplar_names_the_running_call() -> None:
    """Within a call an exemplar has its id; outside of calls there is none."""
    assert tracing.exemplar() is None
    with call_context.InCall("c7", "Acquire"):
        call_context.add(request="cmpl-1")
        assert tracing.exemplar() == {"call": "c7"}
        assert call_context.fields() == {"call": "c7", "method": "Acquire", "request": "cmpl-1"}
        with call_context.InCall("c8", "Commit"):
            assert call_context.fields() == {"call": "c8", "method": "Commit"}
        assert call_context.fields()["request"] == "cmpl-1"
    assert call_context.fields() == {}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint without OpenTelemetry refuses the start, and says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint: .* pip install 'tierd\[otel\]'"):
        tracing.Tracing("http://127.0.0.1:4317", instance="i", version="0")
