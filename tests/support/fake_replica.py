"""A process that answers as a replica of ``fastinfer serve --data-parallel-size`` does, as far as the router asks.

The environment variable FAKE_REPLICA says how it behaves:

- ``works``: it is ready at once.
- ``fails_to_start``: it ends with the exit code for wrong input after another one may have been ready.
"""

import json
import os
import socket
import sys
import time

settings = json.load(sys.stdin)
if os.environ["FAKE_REPLICA"] == "fails_to_start":
    time.sleep(0.5)
    sys.exit(2)
listener = socket.socket(fileno=settings["socket"])
listener.listen()
while True:
    connection, _ = listener.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    connection.close()
