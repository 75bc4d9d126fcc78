"""/dashboard: the live page. It reads /stats once a second, and chats through /v1/chat/completions."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter()

_PAGE = (Path(__file__).parent.parent / "dashboard.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """Content-Security-Policy: the page's own script and style by their hashes, this server's endpoints, nothing else."""
    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)

    return (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


_HEADERS = {"Content-Security-Policy": _policy(_PAGE), "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache"}


@router.get("/dashboard", include_in_schema=False)
async def dashboard() -> HTMLResponse:
    """The page: one file, which needs nothing from elsewhere and holds no secrets."""
    return HTMLResponse(_PAGE, headers=_HEADERS)
