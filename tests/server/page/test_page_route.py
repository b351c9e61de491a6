import base64
import hashlib
import re

import pytest

from fastinfer.server.page import load_page

fastapi = pytest.importorskip("fastapi")


def test_the_page_is_served_with_its_policy() -> None:
    from fastapi.testclient import TestClient

    from fastinfer.server.routes import page

    app = fastapi.FastAPI()
    app.include_router(page.router)
    client = TestClient(app)
    answer = client.get("/")
    assert (answer.status_code, answer.content) == (200, load_page().body)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == load_page().headers["Content-Security-Policy"]
    assert client.head("/").status_code == 200
    assert "/" not in app.openapi()["paths"]


def test_the_policy_has_the_hash_of_each_script_and_style() -> None:
    page = load_page()
    policy = page.headers["Content-Security-Policy"]
    blocks = re.findall(rb"<(script|style)\b[^>]*>(.*?)</\1>", page.body, re.DOTALL)
    assert [kind for kind, _ in blocks] == [b"style", b"script"]
    for _, content in blocks:
        assert base64.b64encode(hashlib.sha256(content).digest()).decode() in policy


def test_the_page_uses_nothing_from_elsewhere() -> None:
    """No address but the names of SVG, no attribute with a script or a style, and no way to parse HTML."""
    text = load_page().body.decode()
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
