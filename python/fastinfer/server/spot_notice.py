"""The notice with which cloud providers take back spot machines, read from their metadata services."""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Literal, get_args

LOG = logging.getLogger("fastinfer.server")

Provider = Literal["aws", "gcp", "azure"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)

POLL_S = 2.0  # between two questions
TIMEOUT_S = 2.0
MAX_BYTES = 1 << 20
_URLS: dict[Provider, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}


class SpotNotice:
    """Asks the metadata service of a machine whether the machine is about to be taken back.

    Sources: EC2's "Spot Instance interruption notices" (two minutes of notice), Compute Engine's "Preemption process"
    (30 s), Azure's "Scheduled Events for Linux VMs" (at least 30 s).

    Args:
        provider: ``"aws"``, ``"gcp"`` or ``"azure"``.
        url: address of the service; ``None`` for the provider's own.
    """

    def __init__(self, provider: Provider, url: str | None = None) -> None:
        self._url = (url or _URLS[provider]).rstrip("/")
        self._ask = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[provider]
        # The service is on this machine's own network: no proxy of the environment reaches it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_given(self) -> bool:
        """Tell whether the notice has been given. Blocks for a few seconds at most.

        Raises:
            OSError: the service does not answer.
            ValueError: it answers something else.
        """
        return self._ask()

    def _aws(self) -> bool:
        token = self._get("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
        try:
            self._get("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True  # to be stopped, hibernated or ended

    def _gcp(self) -> bool:
        headers = {"Metadata-Flavor": "Google"}
        return self._get("/computeMetadata/v1/instance/preempted", headers).strip() == "TRUE"

    def _azure(self) -> bool:
        headers = {"Metadata": "true"}
        events = json.loads(self._get("/metadata/scheduledevents?api-version=2020-07-01", headers))["Events"]
        machines = [name for event in events if event["EventType"] == "Preempt" for name in event["Resources"]]
        if not machines:
            return False
        # The events of a scale set are given to all of its machines.
        return self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers) in machines

    def _get(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._url + path, headers=headers, method=method)
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read(MAX_BYTES).decode()
        return text


async def watch(notice: SpotNotice, on_notice: Callable[[], None]) -> None:
    """Wait for the notice.

    A service that does not answer is asked again. The log says so once.

    Args:
        notice: where to ask.
        on_notice: called once, when the notice has been given.
    """
    has_failed = False
    while True:
        try:
            if await asyncio.to_thread(notice.is_given):
                break
            has_failed = False
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not has_failed:
                LOG.warning("the metadata service has not said whether this machine is taken back: %r", error)
            has_failed = True
        await asyncio.sleep(POLL_S)
    on_notice()
