"""The page's paths, headers and refusals, by WSGI."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tierd.page import app as module
from tierd.page.app import App

ANSWER = b'{"state":"serving"}'


class Answers:
    """The page's view: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.is_stuck = False

    async def answer(self, **asked: Any) -> bytes:
        self.asked.append(asked)
        await asyncio.sleep(3600 if self.is_stuck else 0)
        return ANSWER


class Visited:
    """An application over an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.view = Answers()
        self.app = App(self.view, metrics=lambda _environ, start: start("200 OK", []) or [b"metrics"], loop=self.loop)  # type: ignore[arg-type]

    def get(
        self, path: str = "/", *, query: str = "", method: str = "GET", **headers: str
    ) -> tuple[str, dict[str, str], bytes]:
        """Status, headers, body."""
        told = {}
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "HTTP_HOST": "localhost:9440"}
        body = b"".join(self.app(environ | headers, lambda status, named: told.update(status=status, **dict(named))))
        return told.pop("status"), told, body


@pytest.fixture
def visited() -> Iterator[Visited]:
    made = Visited()
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join(10)
    made.loop.close()


def test_the_policy_allows_the_pages_own_script_and_style_alone(visited: Visited) -> None:
    """The policy names the hashes of the script and the style in the page, its own JSON, and nothing else."""
    status, headers, body = visited.get()
    assert status == "200 OK"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    text = body.decode()
    for directive, element in (("script-src", "script"), ("style-src", "style")):
        (inside,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert policy[directive] == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_the_page_is_self_contained(visited: Visited) -> None:
    """The page has no address but names of XML, no attribute with a program, and no style attribute."""
    text = visited.get()[2].decode()
    assert set(re.findall(r"https?://[^'\" )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<[^>]+\s(on\w+|style|src|srcset)=", text.split("<script>")[0])
    assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(|new Function", text)


def test_a_known_page_is_not_sent_again(visited: Visited) -> None:
    """A reader with the page's tag gets 304 without a body."""
    tag = visited.get()[1]["ETag"]
    status, headers, body = visited.get(HTTP_IF_NONE_MATCH=tag)
    assert (status, body, headers["ETag"]) == ("304 Not Modified", b"", tag)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9440", "127.0.0.1:80", "127.9.9.9", "[::1]:9440", "a.localhost"]
)
def test_names_of_loopback_are_answered(visited: Visited, host: str) -> None:
    """Any name of loopback with any port is answered, since a tunnel has a port of its own."""
    assert visited.get(HTTP_HOST=host)[0] == "200 OK"
    assert visited.get("/page.json", HTTP_HOST=host)[0] == "200 OK"


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:9440",
        "10.0.0.1",
        "localhost.evil.example",
        "[::2]:1",
        "127.0.0.1.evil.example",
        "[",
        "]",
        "::1",
    ],
)
def test_other_names_are_refused(visited: Visited, host: str) -> None:
    """A name that is no name of loopback is refused, with the remedy (DNS rebinding)."""
    for path in ("/", "/page.json"):
        status, _, body = visited.get(path, HTTP_HOST=host)
        assert (status, b"localhost" in body) == ("403 Forbidden", True)
    assert visited.view.asked == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get", ""])
def test_only_get_and_head(visited: Visited, method: str) -> None:
    """Methods but GET and HEAD are refused."""
    assert visited.get("/page.json", method=method)[0] == "405 Method Not Allowed"


def test_head_has_no_body(visited: Visited) -> None:
    """HEAD gives the headers of GET, without the body."""
    for path in ("/", "/page.json"):
        status, headers, body = visited.get(path, method="HEAD")
        assert (status, body, headers) == ("200 OK", b"", visited.get(path)[1])


@pytest.mark.parametrize(
    "path", ["/page.html", "/page.js", "//", "/../page.json", "/page.json/", "", "/metrics/", "\xff" * 900]
)
def test_other_paths_are_not_found(visited: Visited, path: str) -> None:
    """There are three paths, and the answer to any other names them."""
    status, _, body = visited.get(path)
    assert (status, b"/metrics" in body) == ("404 Not Found", True)


def test_metrics_stay_where_they_were(visited: Visited) -> None:
    """/metrics goes to its own application, whatever the host."""
    assert visited.get("/metrics", HTTP_HOST="evil.example")[2] == b"metrics"


def test_a_reader_names_what_it_has(visited: Visited) -> None:
    """The query's run, sample and walk reach the view; without a query the reader has nothing."""
    assert visited.get("/page.json", query="run=ab&since=7&walk=2")[2] == ANSWER
    visited.get("/page.json")
    assert visited.view.asked == [{"run": "ab", "since": 7, "walk": 2}, {"run": "", "since": 0, "walk": 0}]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("since=x", "400"),
        ("walk=-1", "400"),
        (f"since={1 << 53}", "400"),
        ("since=1e9", "400"),
        ("&".join(f"a{i}=1" for i in range(9)), "400"),
        ("since=" + "9" * 200, "414"),
    ],
)
def test_a_bad_query_is_refused(visited: Visited, query: str, status: str) -> None:
    """A query that no answer gave is refused before the loop hears of it."""
    assert visited.get("/page.json", query=query)[0].startswith(status)
    assert visited.view.asked == []


def test_a_loop_that_does_not_answer_is_not_waited_for(visited: Visited, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends with 503 if the event loop has no answer in time."""
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    visited.view.is_stuck = True
    status, _, body = visited.get("/page.json")
    assert (status, b"try again" in body) == ("503 Service Unavailable", True)
