"""A receiver of traces by OTLP over HTTP, on a free port of 127.0.0.1."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OtlpReceiver:
    """Collects spans.

    Attributes:
        url: where spans are posted.
        spans: those that have come.
        resources: the attributes of their senders.
        status: what posts are answered with.
        gate: posts wait until it is set.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        self.num_posts = 0
        self.gate = threading.Event()
        self.gate.set()
        self._has_new = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                with receiver._has_new:
                    receiver.num_posts += 1
                    receiver._has_new.notify_all()
                receiver.gate.wait(30)
                if receiver.status == 200 and self.path == "/v1/traces":
                    receiver._take(data)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def _take(self, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(data)
        with self._has_new:
            for resource in request.resource_spans:
                self.resources.append(attributes(resource.resource.attributes))
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._has_new.notify_all()

    def wait_for(self, num_spans: int) -> list[Any]:
        with self._has_new:
            assert self._has_new.wait_for(lambda: len(self.spans) >= num_spans, 20), len(self.spans)
            return self.spans

    def wait_for_post(self) -> None:
        with self._has_new:
            assert self._has_new.wait_for(lambda: self.num_posts, 20)


def attributes(pairs: Any) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextlib.contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.gate.set()
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join(10)
