"""The page over HTTP: a WSGI application in front of that of /metrics.

Only GET and HEAD of its three paths are answered. A `Host` that is no name of loopback is refused,
so that no site can read the page through a visitor's browser (DNS rebinding). The policy in the
headers lets the page load nothing but its own JSON.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from tierd.page.view import View

ANSWER_S = 3.0
"""Time for the event loop's answer."""
QUERY_CHARACTERS = 200
WHOLE_LIMIT = 1 << 53

Application = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]
Answer = tuple[str, dict[str, str], bytes]
"""Status line, headers, body."""


class Refusal(Exception):
    """A request that gets no page. Arguments: the status line, and a text for people."""


class App:
    """The application. metrics: answers /metrics. loop: the daemon's."""

    def __init__(self, view: View, *, metrics: Application, loop: asyncio.AbstractEventLoop) -> None:
        self._view, self._metrics, self._loop = view, metrics, loop
        self._page, policy = _document()
        self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:16]}"'
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    def __call__(self, environ: Mapping[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request; it runs in that request's thread."""
        if environ["PATH_INFO"] == "/metrics":
            return self._metrics(environ, start)
        try:
            status, headers, body = self._answer(environ)
        except Refusal as refusal:
            status, headers, body = refusal.args[0], {"Content-Type": "text/plain"}, f"{refusal.args[1]}\n".encode()
        start(status, [*headers.items(), *self._headers.items(), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: Mapping[str, Any]) -> Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            raise Refusal("405 Method Not Allowed", "method: only GET and HEAD are answered")
        if not _is_loopback(environ.get("HTTP_HOST", "")):
            raise Refusal("403 Forbidden", "host: no name of loopback; open the page as http://localhost:PORT/")
        if environ["PATH_INFO"] == "/":
            headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-cache", "ETag": self._tag}
            is_known = environ.get("HTTP_IF_NONE_MATCH") == self._tag
            return ("304 Not Modified", headers, b"") if is_known else ("200 OK", headers, self._page)
        if environ["PATH_INFO"] == "/page.json":
            return "200 OK", {"Content-Type": "application/json", "Cache-Control": "no-store"}, self._json(environ)
        raise Refusal("404 Not Found", "path: unknown; this daemon has /, /page.json and /metrics")

    def _json(self, environ: Mapping[str, Any]) -> bytes:
        asked = _asked(environ.get("QUERY_STRING", ""))
        coming = asyncio.run_coroutine_threadsafe(self._view.answer(**asked), self._loop)
        try:
            return coming.result(ANSWER_S)
        except (TimeoutError, CancelledError):
            coming.cancel()
            raise Refusal("503 Service Unavailable", f"daemon: no answer within {ANSWER_S:g} s; try again") from None


def _asked(query: str) -> dict[str, Any]:
    """The arguments of `View.answer`. Raises Refusal."""
    if len(query) > QUERY_CHARACTERS:
        raise Refusal("414 URI Too Long", f"query: {len(query)} characters, the limit is {QUERY_CHARACTERS}")
    try:
        named = {name: values[-1] for name, values in parse_qs(query, max_num_fields=8).items()}
        numbers = {name: int(named.get(name, "0")) for name in ("since", "walk")}
    except ValueError:
        raise Refusal("400 Bad Request", "query: since and walk are whole numbers of an earlier answer") from None
    if not all(0 <= number < WHOLE_LIMIT for number in numbers.values()):
        raise Refusal("400 Bad Request", f"query: since and walk are from 0 to {WHOLE_LIMIT - 1}")
    return {"run": named.get("run", ""), **numbers}


def _is_loopback(host: str) -> bool:
    """Whether a Host header names loopback, with any port: a tunnel may have another one."""
    name = host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _document() -> tuple[bytes, str]:
    """The page with its style and script inside, and the policy that allows these two alone."""
    folder = resources.files("tierd.page")
    page, style, script = (folder.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    assert page.count("/*style*/") == page.count("/*script*/") == 1
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.replace("/*style*/", style).replace("/*script*/", script).encode(), policy


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
