"""The chat page, at ``/``."""

from fastapi import APIRouter
from starlette.responses import Response

from fastinfer.server.page import load_page


async def chat_page() -> Response:
    """Return the page. It needs no key: the page asks for one if the server wants it."""
    page = load_page()
    return Response(page.body, headers=page.headers)


router = APIRouter()
router.add_api_route("/", chat_page, methods=["GET", "HEAD"], include_in_schema=False)
