"""A collector of traces: the official OTLP service over gRPC, on a real socket."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """An exported span, by what a test asks of it."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    is_failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`with Collector() as collector`: `url` for exporters, and the `spans` that came."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        """All messages, one after another."""
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802 - gRPC's name
        self.raw += request.SerializeToString()
        for of_resource in request.resource_spans:
            service = next(a.value.string_value for a in of_resource.resource.attributes if a.key == "service.name")
            for scope in of_resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def one(self, name: str, *, of: Span | None = None) -> Span:
        """The only span of this name, below a parent if one is given."""
        found = [span for span in self.spans if span.name == name and (of is None or span.parent == of.id)]
        assert len(found) == 1, (name, sorted({span.name for span in self.spans}))
        return found[0]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()


def _span(service: str, span: Any) -> Span:
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    trace, number, parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Span(service, span.name, trace, number, parent, values, is_failed=span.status.code == 2)
