"""Log lines: one event name in plain words, values as fields, for people or as JSON.

`configure` runs once at start, `get_logger` anywhere. Each line of a call carries the call's id
(call_context.py). Lines go to stderr, never to stdout, also those of other
libraries (grpc, asyncio). A line holds no token, no credential and no hash of more than 8 bytes.
Logging never raises: on a full disk or a closed pipe, only the line is lost.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from tierd import call_context

_TRACEBACK = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
"""Without the values of variables, here and on the console: they hold tokens and bytes of blocks,
and printing takes seconds."""
_LEVELS = logging.getLevelNamesMapping()


def configure(*, style: Literal["console", "json"], level: str, stream: TextIO | None = None) -> None:
    """Sets up the process's logs. level: debug, info, warning or error. stream: default stderr."""
    stream = sys.stderr if stream is None else stream
    structlog.configure(
        processors=_processors(style=style, is_terminal=stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Forgiving(stream))),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Forward()], level=max(_LEVELS[level.upper()], logging.WARNING), force=True)


def get_logger(part: str) -> FilteringBoundLogger:
    """A logger whose lines carry the part's name, such as "mover"."""
    return cast(FilteringBoundLogger, structlog.get_logger(part=part))


def _processors(*, style: str, is_terminal: bool) -> list[Processor]:
    shared: list[Processor] = [
        _add_call,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if style == "json":
        return [*shared, _TRACEBACK, structlog.processors.JSONRenderer(default=str)]
    return [
        *shared,
        structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=structlog.dev.plain_traceback),
    ]


def _add_call(_logger: Any, _method: str, line: EventDict) -> EventDict:
    return {**call_context.fields(), **line}


class _Forgiving:
    """A stream that drops lines that cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Writes the text if possible."""
        with suppress(OSError, ValueError):  # a closed stream, or characters outside its encoding
            self._stream.write(text)

    def flush(self) -> None:
        """Flushes if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Forward(logging.Handler):
    """Forwards the standard library's log lines, with the logger's name as the part."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record; an exception in it comes as the traceback's text."""
        fields: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        get_logger(record.name).log(record.levelno, record.getMessage(), **fields)
