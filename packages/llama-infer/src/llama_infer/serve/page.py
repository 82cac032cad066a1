"""The chat page at `/`: three files next to this one, put into one answer that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from starlette.responses import Response

STYLE, SCRIPT, NAME = "/* page.css */", "/* page.js */", "{{ model }}"


class Page:
    """Args: name: of the model."""

    def __init__(self, name: str) -> None:
        folder = files(__package__)
        html, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
        filled = html.replace(NAME, escape(name)).replace(STYLE, style).replace(SCRIPT, script)
        self._body = filled.encode("utf-8")
        # No script but this one runs, whatever a model writes, and nothing is sent anywhere but here.
        allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; img-src data:"
        self._headers = {
            "content-security-policy": f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def response(self) -> Response:
        return Response(self._body, headers=self._headers, media_type="text/html")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
