"""The metadata services of three cloud providers on 127.0.0.1, which give the notice when a test says so.

Its own imports are Python's, so that it also runs in the sandbox of support/container_driver.py.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeMetadata:
    """The services, on a port of their own.

    Attributes:
        is_noticed: whether this machine is taken back.
        events: Azure's other events.
        is_broken: whether every answer is an error.
        num_asked: requests so far.
    """

    def __init__(self) -> None:
        self.is_noticed = self.is_broken = False
        self.events: list[dict[str, Any]] = []
        self.num_asked = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Print nothing."""

            def do_PUT(self) -> None:
                has_lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
                self._send(200 if self.path == "/latest/api/token" and has_lifetime else 400, "token")

            def do_GET(self) -> None:
                has_flavor = self.headers.get("Metadata-Flavor") == "Google"
                has_metadata = self.headers.get("Metadata") == "true"
                match self.path:
                    case "/latest/meta-data/spot/instance-action":
                        is_known = self.headers.get("X-aws-ec2-metadata-token") == "token"
                        text = json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"})
                        self._send((200 if owner.is_noticed else 404) if is_known else 401, text)
                    case "/computeMetadata/v1/instance/preempted":
                        self._send(200 if has_flavor else 403, str(owner.is_noticed).upper())
                    case "/metadata/scheduledevents?api-version=2020-07-01":
                        own = [{"EventId": "2", "EventType": "Preempt", "Resources": ["vm_1", "vm_7"]}]
                        events = owner.events + (own if owner.is_noticed else [])
                        self._send(200 if has_metadata else 400, json.dumps({"Events": events}))
                    case "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                        self._send(200 if has_metadata else 400, "vm_7")
                    case _:
                        self._send(404, "")

            def _send(self, status: int, text: str) -> None:
                owner.num_asked += 1
                self.send_response(500 if owner.is_broken else status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
