"""Spans of OpenTelemetry, from a client's verb to the tier. Without a trace they cost one look.

    caller's span ──▶ verb's span ──traceparent──▶ daemon's call ──▶ plan, transfer, commit

The SDK makes a span only inside a span of its caller, with the caller's own OpenTelemetry, and
never loads the package itself. The daemon makes spans only if `telemetry.otlp_endpoint` is set, for
calls whose trace is sampled. They wait in a queue of QUEUE_SPANS; more are dropped, so a collector
that does not answer slows no call. Attributes are names, ids and counts: no tokens, no hashes, no
texts of errors.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Self, TypeVar

from tierd import call_context
from tierd.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger("tierd.tracing")

QUEUE_SPANS, BATCH_SPANS = 2048, 256
EXPORT_S = 2.0
"""Limit of one export, and of the last one."""
DELAY_MS = 1000
COMPLAIN_S = 60.0
"""At most one log line about failed exports in this time."""
PARENT_CHARS = 55
"""Of a traceparent of version 00."""
API = "opentelemetry.trace"

_tracer: ContextVar[Any] = ContextVar("tierd_tracer", default=None)
"""Makes the spans of the running verb or call; None: it is not traced."""


class NoSpan:
    """Stands for a span while nothing is traced."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def set_attribute(self, name: str, value: object) -> None:
        """Does nothing."""


NO_SPAN = NoSpan()


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """Around a step of a traced call: a child of the current span. Yields an object with
    `set_attribute`, which is false if there is no trace. Attributes get the prefix "tierd."."""
    tracer = _tracer.get()
    return NO_SPAN if tracer is None else _started(tracer, name, attributes)


def exemplar() -> dict[str, str] | None:
    """As `exemplar_of`, for the running call. None outside of calls."""
    call = call_context.fields().get("call")
    return exemplar_of(_api().get_current_span() if _tracer.get() is not None else NO_SPAN, call) if call else None


def exemplar_of(step: Any, call: str) -> dict[str, str]:
    """Labels that lead from a metric to a call: its trace, if it has a span, else its id."""
    return {"trace_id": f"{step.get_span_context().trace_id:032x}"} if step else {"call": call}


# -- the client's side


def is_possible() -> bool:
    """Whether this process has loaded OpenTelemetry, so that the caller may have a span."""
    return API in sys.modules


def verb(name: str, work: Callable[[], T]) -> T:
    """Runs a client's verb, in a child of the caller's span if there is one."""
    api = _api()
    if not api.get_current_span().get_span_context().is_valid:
        return work()
    token = _tracer.set(api.get_tracer("tierd"))
    try:
        with _started(_tracer.get(), f"tierd {name}", {}, kind=api.SpanKind.CLIENT) as made:
            result = work()
            for count in ("tokens", "blocks"):
                if isinstance(value := getattr(result, count, None), int):
                    made.set_attribute(f"tierd.{count}", value)
            return result
    finally:
        _tracer.reset(token)


def traceparent() -> str:
    """The W3C traceparent of the current span; empty: none."""
    if not is_possible():
        return ""
    found = _api().get_current_span().get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else ""


def here(work: Callable[[], T]) -> Callable[[], T]:
    """The work with this thread's current span, to be run in another thread."""
    if not is_possible():
        return work
    context = copy_context()
    return lambda: context.run(work)


# -- the daemon's side


class Tracing:
    """Makes the daemon's spans and exports them over OTLP. One per daemon."""

    def __init__(self, endpoint: str, *, instance: str, version: str) -> None:
        """endpoint: URL of a collector that speaks OTLP over gRPC. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"telemetry.otlp_endpoint: it needs OpenTelemetry, which is not installed ({error}); "
                "pip install 'tierd[otel]', or leave it empty"
            ) from error
        for name in ("opentelemetry.sdk", "opentelemetry.exporter"):  # a line for each span that is dropped
            logging.getLogger(name).setLevel(logging.CRITICAL)
        exporter: Any = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        exporter.export = _Complaints(endpoint, exporter.export)
        resource = Resource({"service.name": "tierd", "service.version": version, "service.instance.id": instance})
        self._provider: Any = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=DELAY_MS,
            )
        )
        self._tracer: Any = self._provider.get_tracer("tierd", version)

    @contextmanager
    def call(self, method: str, parent: str, **attributes: Any) -> Iterator[Any]:
        """Around a call. parent: its traceparent; without a sampled one there is no span."""
        context = _context_of(parent)
        if context is None:
            yield NO_SPAN
            return
        token = _tracer.set(self._tracer)
        try:
            kind = _api().SpanKind.SERVER
            with _started(self._tracer, f"tierd.v1.Cache/{method}", attributes, context=context, kind=kind) as made:
                yield made
        finally:
            _tracer.reset(token)

    def close(self) -> None:
        """Exports the rest, within EXPORT_S. Blocks."""
        end = threading.Thread(target=self._provider.shutdown, daemon=True)
        end.start()
        end.join(EXPORT_S)


class _Complaints:
    """An exporter's `export` that logs failures, at most once in COMPLAIN_S."""

    def __init__(self, endpoint: str, export: Callable[[Any], Any]) -> None:
        self._endpoint, self._export = endpoint, export
        self._next_s = 0.0

    def __call__(self, spans: Any) -> Any:
        result = self._export(spans)
        if result.name != "SUCCESS" and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + COMPLAIN_S
            log.warning("spans not exported to %s: %s lost; is a collector there?", self._endpoint, len(spans))
        return result


def _api() -> Any:
    return sys.modules[API]


def _context_of(parent: str) -> Any:
    """The context of a sampled traceparent; None for any other text."""
    if len(parent) != PARENT_CHARS or parent[-1] not in "13579bdf":
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    return context if _api().get_current_span(context).get_span_context().is_valid else None


@contextmanager
def _started(tracer: Any, name: str, attributes: dict[str, Any], **how: Any) -> Iterator[Any]:
    """A span that tells its outcome: ok, or the error's class. An error's text stays here, since it
    may hold more than counts."""
    named = {f"tierd.{key}": value for key, value in attributes.items()}
    quiet = {"record_exception": False, "set_status_on_exception": False}
    with tracer.start_as_current_span(name, attributes=named, **quiet, **how) as made:
        outcome = "ok"
        try:
            yield made
        except BaseException as error:
            outcome = type(error).__name__
            made.set_status(_api().StatusCode.ERROR)
            raise
        finally:
            made.set_attribute("tierd.outcome", outcome)
