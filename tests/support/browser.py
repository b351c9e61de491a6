"""A headless Chromium, driven through chromedriver by the WebDriver protocol (https://www.w3.org/TR/webdriver2)."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMEDRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Up": "\ue013", "Tab": "\ue004", "Shift": "\ue008", "Control": "\ue009"}


class BrowserError(RuntimeError):
    """The browser could not do what it was asked to do."""


class Browser:
    """One window of a browser.

    Args:
        width, height: size of the page in CSS pixels.
    """

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        assert CHROMEDRIVER is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {"args": arguments, "prefs": {"profile.default_content_setting_values.clipboard": 1}}
        logging = {"browser": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logging}
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    self._driver.kill()
                    raise
                time.sleep(0.1)
        self._url += f"/session/{answer['sessionId']}"
        self.resize(width, height)

    def close(self) -> None:
        """End the browser."""
        try:
            self._call("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the page, and whether the system's colours are light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        self.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function, and return its result; of a promise, what it resolves to."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector matches, as a user does: it must be visible."""
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys together."""
        codes = [KEYS.get(key, key) for key in keys]
        downs = [{"type": "keyDown", "value": code} for code in codes]
        ups = [{"type": "keyUp", "value": code} for code in reversed(codes)]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": downs + ups}]})

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches, or "".

        Not ``innerText``: it has nothing of what was not drawn yet.
        """
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def wait(self, condition: str, *arguments: Any, seconds: float = 20) -> Any:
        """Wait until a JavaScript expression is truthy, and return its value."""
        deadline = time.monotonic() + seconds
        while True:
            if value := self.run(f"return {condition}", *arguments):
                return value
            if time.monotonic() > deadline:
                raise BrowserError(f"{condition!r} is not true after {seconds} s")
            time.sleep(0.02)

    def console(self) -> list[str]:
        """Return the messages of the console since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot", None)))

    def dismiss(self, accept: bool = True) -> None:
        """Answer an alert or a question of the page."""
        self._call("POST", "/alert/accept" if accept else "/alert/dismiss", {})

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise BrowserError(f"{value['error']}: {value['message'].splitlines()[0]}") from None
