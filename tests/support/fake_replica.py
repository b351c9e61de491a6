"""A process that answers as a replica of ``fastinfer serve --data-parallel-size`` does, as far as the router asks.

The environment variable FAKE_REPLICA says how it behaves:

- ``works``: it is ready at once.
- ``fails_to_start``: it ends with the exit code for wrong input after another one may have been ready.
- ``falls_ill``: it is ready, and then says that only a restart helps.
- ``hangs``: it is ready, and then answers nothing any more.
- ``loads``: it is not ready, and answers late.
- ``sleeps``: it is not ready.
"""

import contextlib
import json
import os
import socket
import sys
import time

# Answers of a replica that works, before it does not.
NUM_GOOD = 4


def main() -> None:
    settings = json.load(sys.stdin)
    behaviour = os.environ["FAKE_REPLICA"]
    if behaviour == "fails_to_start":
        time.sleep(0.5)
        sys.exit(2)
    listener = socket.socket(fileno=settings["socket"])
    listener.listen()
    num_answers = 0
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the router may wait no longer
            question = connection.recv(65536)
            num_answers += 1
            if behaviour == "hangs" and num_answers > NUM_GOOD:
                time.sleep(3600)
            if behaviour == "loads":
                time.sleep(0.15)
            is_ill = behaviour == "falls_ill" and num_answers > NUM_GOOD
            is_unready = behaviour in ("loads", "sleeps") and question.startswith(b"GET /ready ")
            status = b"503 Service Unavailable" if is_ill or is_unready else b"200 OK"
            state = {"state": "loading" if behaviour == "loads" else "ready", "reason": "it is broken"}
            body = json.dumps(state).encode()
            connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


main()
