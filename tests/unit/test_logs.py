"""Log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import structlog

from tierd import logs
from tierd.call_context import InCall


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root, level = logging.getLogger(), logging.getLogger().level
    handlers = list(root.handlers)
    stream = io.StringIO()
    logs.configure(style="json", level="info", stream=stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_is_one_object_a_line(lines: io.StringIO) -> None:
    """One JSON object holds event, level, part, time and fields."""
    logs.get_logger("mover").info("transfer failed", tier="nvme.0", bytes=4096)
    line = json.loads(lines.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "transfer failed", "level": "info", "part": "mover", "tier": "nvme.0", "bytes": 4096}


def test_level_is_the_least_that_is_written(lines: io.StringIO) -> None:
    """Lines below the level write nothing."""
    logs.get_logger("core").debug("detail")
    assert lines.getvalue() == ""


async def test_request_id_is_on_every_line_of_its_task_only(lines: io.StringIO) -> None:
    """Concurrent calls do not share request ids, and no id stays after its call."""

    async def handle(request_id: str) -> None:
        with InCall(request_id, "Get"):
            await asyncio.sleep(0)
            logs.get_logger("server").info(request_id)

    await asyncio.gather(handle("a"), handle("b"))
    logs.get_logger("server").info("after")
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line.get("call")) for line in written] == [("a", "a"), ("b", "b"), ("after", None)]


def test_other_libraries_take_the_same_road(lines: io.StringIO) -> None:
    """A line of the standard library's logging has the same form and includes its exception."""
    try:
        raise OSError("disk on fire")
    except OSError:
        logging.getLogger("asyncio").exception("task %s died", "x")
    line = json.loads(lines.getvalue())
    assert (line["event"], line["part"], line["level"]) == ("task x died", "asyncio", "error")
    assert "disk on fire" in json.dumps(line)


def test_values_that_json_cannot_hold_are_written_as_text(lines: io.StringIO) -> None:
    """A path in a field is written as plain text."""
    logs.get_logger("tiers").warning("odd", value=Path("/x"))
    assert json.loads(lines.getvalue())["value"] == "/x"


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_line_that_cannot_be_written_harms_nobody(style: Literal["console", "json"]) -> None:
    """On a full disk the line is lost, and the caller continues."""
    full = open("/dev/full", "w")  # noqa: SIM115 - to close it raises
    try:
        logs.configure(style=style, level="info", stream=full)
        logs.get_logger("mover").info("copied")
        logging.getLogger("grpc").error("call failed")
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_console_is_for_people() -> None:
    """The console style writes the event and its fields to a file as plain text without colours."""
    stream = io.StringIO()
    try:
        logs.configure(style="console", level="debug", stream=stream)
        logs.get_logger("mover").debug("copied", blocks=3)
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    assert "copied" in stream.getvalue()
    assert "blocks=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_shows_no_values(style: Literal["console", "json"]) -> None:
    """A traceback has no variable values: they hold tokens, and megabytes that print for seconds."""
    stream = io.StringIO()
    logs.configure(style=style, level="info", stream=stream)
    try:
        fail_with(f"a {'secret'}")
    except OSError:
        logging.getLogger("grpc").exception("call failed")
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    assert "fail_with" in stream.getvalue()
    assert "disk on fire" in stream.getvalue()
    assert "a secret" not in stream.getvalue()


def fail_with(token: str) -> None:
    raise OSError("disk on fire" if token else "")
