"""The web page in a headless Chromium, over a real daemon under load.

Needs Playwright and a browser: `pip install 'tierd[page-test]'`, and Debian's chromium or
`playwright install chromium`.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest

from tests.system.warm import Daemon
from tierd.client import Client, NamespaceSpec
from tierd.testing.daemon import SMALL

api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install 'tierd[page-test]'")

SOON_MS = 20_000
PHONE, DESK = {"width": 360, "height": 780}, {"width": 1360, "height": 900}
CHARTS = ("occupancy", "hits", "misses", "transfers", "depths", "map")
HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = {"executable_path": found} if (found := shutil.which("chromium")) else {}
    with api.sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(args=["--no-sandbox"] if os.geteuid() == 0 else [], **options)
        except api.Error as error:
            pytest.skip(f"no Chromium starts here (Debian: chromium): {str(error)[:300]}")
        yield running
        running.close()


def config(port: int) -> str:
    return SMALL.replace("[server]", f'[server]\nmetrics_listen = "127.0.0.1:{port}"\npage = true', 1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """The address of a daemon whose clients put and get more than its memory holds."""
    port, stop = free_port(), threading.Event()

    def load(client: Client) -> None:
        space, chance = (
            client.open_namespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=65536)),
            random.Random(7),
        )
        while not stop.wait(0.005):
            prompt = [chance.randrange(60)] * 16 + list(range(16 * 15))
            if client.get(space, [*prompt, *range(16)]).tokens < len(prompt):
                client.put(space, prompt, [bytes(65536)] * 16)

    with Daemon(config(port)) as daemon, Client(daemon.target) as client:
        client.introduce({"engine": HOSTILE})
        working = threading.Thread(target=load, args=(client,))
        working.start()
        yield f"http://localhost:{port}/"
        stop.set()
        working.join(20)


class Tab:
    """A page in the browser. requests, faults: addresses asked for, and messages of errors."""

    def __init__(self, browser: Any, address: str, *, size: dict[str, int] = DESK, scheme: str = "light") -> None:
        self._context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self._context.new_page()
        self.page.set_default_timeout(SOON_MS)
        self.requests, self.faults = list[str](), list[str]()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.faults.append(message.text))
        self.page.goto(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def drawn(self) -> None:
        """Waits until every chart holds marks."""
        for chart in CHARTS:
            self.page.wait_for_selector(f"#{chart} .mark", state="attached")


def test_every_chart_is_drawn_and_nothing_is_loaded_from_elsewhere(browser: Any, busy: str) -> None:
    """Under load every chart holds marks. The page asks only its own origin, and nothing goes wrong."""
    with Tab(browser, busy) as tab:
        tab.drawn()
        assert tab.page.locator("#tiles dt").count() == 6
        assert tab.page.locator("#tiers tr").count() == 3
        assert "%" in tab.page.locator("#tiles dd").first.inner_text()
        assert {url.split("?")[0] for url in tab.requests if not url.startswith("data:")} == {busy, f"{busy}page.json"}
        assert tab.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_fits_a_phone_and_the_dark(browser: Any, busy: str, size: dict[str, int], scheme: str) -> None:
    """No width scrolls sideways, no axis text is cut, and text differs from its ground in light and dark."""
    with Tab(browser, busy, size=size, scheme=scheme) as tab:
        tab.drawn()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        cut = """[...document.querySelectorAll('svg.chart text')].filter(text => {
            const [inner, outer] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
            return inner.left < outer.left - 1 || inner.right > outer.right + 1; }).map(text => text.textContent)"""
        assert tab.page.evaluate(cut) == []
        light = """(name => { const [r, g, b] = getComputedStyle(document.body)[name].match(/\\d+/g).map(Number); return .2 * r + .7 * g + .1 * b; })"""
        ink, ground = (tab.page.evaluate(f"{light}('{name}')") for name in ("color", "backgroundColor"))
        assert (ink < 60 and ground > 200) if scheme == "light" else (ink > 200 and ground < 60)


def test_keys_reach_everything(browser: Any, busy: str) -> None:
    """Tab reaches buttons and charts; arrows move a chart's cursor, and Escape hides it."""
    with Tab(browser, busy) as tab:
        tab.drawn()
        reached = set()
        for _ in range(24):
            tab.page.keyboard.press("Tab")
            reached.add(
                tab.page.evaluate(
                    "document.activeElement.closest('section,header')?.id || document.activeElement.tagName"
                )
            )
        assert reached >= {*CHARTS, "decisions", "sessions"}
        tab.page.locator("#occupancy svg").focus()
        tab.page.keyboard.press("ArrowLeft")
        assert "host.0" in tab.page.locator("#occupancy .tip").inner_text()
        tab.page.keyboard.press("Escape")
        assert not tab.page.locator("#occupancy .tip").is_visible()
        tab.page.locator("#map svg").first.focus()
        tab.page.keyboard.press("Home")
        assert "from 0 B" in tab.page.locator("#map .tip").first.inner_text()
        tab.page.get_by_role("button", name="hits").press("Enter")
        assert "hits of a page" in tab.page.locator("#map .steps").inner_text()


def test_text_of_clients_stays_text(browser: Any, busy: str) -> None:
    """A client's words with markup are shown as they are, and run nothing."""
    with Tab(browser, busy) as tab:
        tab.drawn()
        assert HOSTILE in tab.page.locator("#sessions").inner_text()
        assert (tab.page.title(), tab.page.locator("#sessions img").count()) == ("tierd", 0)


def test_a_daemon_that_goes_and_returns(browser: Any) -> None:
    """A fresh daemon has words where there is no data. When it ends a banner says so; after a
    restart the banner goes, and the samples begin anew."""
    port = free_port()
    with Daemon(config(port)) as daemon, Tab(browser, f"http://127.0.0.1:{port}/") as tab:
        tab.page.wait_for_selector("#occupancy .mark", state="attached")
        for section in ("hits", "misses", "transfers"):
            assert tab.page.locator(f"#{section} .empty").inner_text().endswith("yet.")
        assert tab.faults == []
        before = tab.page.evaluate("seen.run")
        daemon.kill()
        tab.page.wait_for_selector("#banner", state="visible")
        assert "Trying again" in tab.page.locator("#banner").inner_text()
        assert tab.page.locator("#state").inner_text() == "out of reach"
        daemon.start()
        tab.page.wait_for_selector("#banner", state="hidden")
        assert tab.page.evaluate("seen.run") != before
        assert tab.page.evaluate("seen.rows.length === seen.last")
