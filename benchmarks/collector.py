"""A collector of OpenTelemetry traces in this process: takes them over OTLP gRPC and hands them on."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class _Servicer(TraceServiceServicer):
    def __init__(self, take: Callable[[ExportTraceServiceRequest], None]) -> None:
        self._take = take

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self._take(request)
        return ExportTraceServiceResponse()


@contextlib.contextmanager
def running_collector(take: Callable[[ExportTraceServiceRequest], None]) -> Iterator[str]:
    """Run until the block ends; yields the endpoint. `take` is called in other threads, one at a time."""
    # One thread, so that `take` needs no lock.
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(_Servicer(take), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=None)
