"""A collector of OTLP over HTTP: keeps what it is sent, and gives spans back decoded."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACES_PATH = "/v1/traces"


class Receiver(http.server.ThreadingHTTPServer):
    """`bodies` are the requests as they came, by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, list[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Span]:
        """Every span that has come so far."""
        return [
            span
            for body in tuple(self.bodies.get(TRACES_PATH, ()))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes_of(span: Span) -> dict[str, object]:
    """Attributes by name, as plain values."""
    found: dict[str, object] = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        found[entry.key] = None if kind is None else getattr(entry.value, kind)
    return found
