"""The text of `tierctl explain`, without a daemon."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tierd._proto import admin_pb2 as pb
from tierd.cli.explain import draw_requests


@pytest.mark.parametrize(
    ("bytes", "said"), [(0, "no record: server.decisions is 0; set it"), (1 << 20, "no such request yet")]
)
def test_an_empty_answer_says_if_there_is_a_record(bytes: int, said: str) -> None:
    """Without requests the text says that there are none yet, or that the record is off, and the remedy."""
    console = Console(file=io.StringIO(), width=200)
    draw_requests(console, pb.ExplainReply(bytes=bytes), "")
    assert console.file.getvalue().strip().startswith(said)  # type: ignore[attr-defined]  # a StringIO
