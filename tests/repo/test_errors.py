"""The error tree is complete: each error is drawn, grouped and mapped to a status."""

from __future__ import annotations

import grpc
import pytest

from tierd import errors
from tierd.errors import GRPC_STATUS, CallError, OperatorError, RetryError, SetupError, TierdError

GROUPS = {CallError, SetupError, RetryError, OperatorError}
ALL = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TierdError)}
RAISED = ALL - GROUPS - {TierdError}


def test_every_error_has_a_status_and_nothing_else_has() -> None:
    """Each error that can be raised has a gRPC status, and nothing else has."""
    assert set(GRPC_STATUS) == RAISED


@pytest.mark.parametrize("error", sorted(RAISED, key=lambda error: error.__name__))
def test_statuses_exist(error: type[TierdError]) -> None:
    """Each status is one that gRPC knows, and none claims success."""
    assert GRPC_STATUS[error] in grpc.StatusCode.__members__
    assert GRPC_STATUS[error] != "OK"


@pytest.mark.parametrize("error", sorted(RAISED, key=lambda error: error.__name__))
def test_every_error_says_what_the_caller_can_do(error: type[TierdError]) -> None:
    """Each error belongs to exactly one group, is drawn in the tree and documented."""
    assert [group for group in GROUPS if issubclass(error, group)] == [error.__mro__[1]]
    assert f"── {error.__name__} " in (errors.__doc__ or "")
    assert error.__doc__
