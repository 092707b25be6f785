"""Every error that tierd raises, grouped by what the caller can do about it.

    TierdError
    ├── CallError            fix the call
    │   ├── InvalidArgument      a value is malformed or out of range
    │   ├── NotFound             an id names nothing: namespace, lease, reservation, block
    │   ├── StaleHandle          the generation or epoch behind a handle has moved on
    │   ├── NotPermitted         the identity may not do this
    │   ├── ViewsAlive           a lease was closed while arrays made from it are alive
    │   └── ForkedClient         a handle was used in a child of the process that owns it
    ├── SetupError           fix the configuration or the machine
    │   ├── ConfigError          a setting is unknown, malformed or impossible
    │   ├── AlreadyOwned         another daemon holds the instance or the store
    │   ├── VersionMismatch      proto, format or SDK versions do not meet
    │   └── Unsupported          this platform cannot do it
    ├── RetryError           try again later, or do without
    │   ├── Unavailable          no daemon, or it is shutting down
    │   ├── DeadlineExceeded     the call ran out of time
    │   ├── Overloaded           a queue or a share is full
    │   └── SessionLost          the daemon ended or restarted: open a session again
    └── OperatorError        tell an operator
        ├── TierFailed           a tier cannot read or write
        └── CorruptRecord        stored bytes are not what was committed

A message names the thing, the fault, the value, the limit and the remedy. A miss, a rejected put
and a short prefix are results, not errors. The dict `GRPC_STATUS` maps each class to the name of
its gRPC status code. The class name travels in the trailing metadata under `ERROR_KEY`, so the
client raises the daemon's error.
"""

from __future__ import annotations

ERROR_KEY = "tierd-error"
RETRY_KEY = "tierd-retry-ms"
"""The trailer of an Overloaded with a `retry_after_s`, in milliseconds."""


class TierdError(Exception):
    """Root of the tree; never raised itself."""


class CallError(TierdError):
    """The call is wrong; the same call will fail again."""


class InvalidArgument(CallError):
    """A value is malformed or out of range."""


class NotFound(CallError):
    """An id names nothing that this session can see."""


class StaleHandle(CallError):
    """The page behind a handle now holds another block, or its epoch has ended."""


class NotPermitted(CallError):
    """The caller's identity may not do this."""


class ViewsAlive(CallError):
    """A lease cannot be closed while arrays made from its views are alive."""


class ForkedClient(CallError):
    """A handle made before a fork was used in the child."""


class SetupError(TierdError):
    """The configuration or the machine must change."""


class ConfigError(SetupError):
    """A setting is unknown, malformed or impossible."""


class AlreadyOwned(SetupError):
    """Another daemon holds the instance or the store."""


class VersionMismatch(SetupError):
    """Versions of the protocol, a format or the SDK do not meet."""


class Unsupported(SetupError):
    """This platform cannot do what was asked."""


class RetryError(TierdError):
    """The same call may succeed later."""


class Unavailable(RetryError):
    """No daemon answers, or it is shutting down."""


class DeadlineExceeded(RetryError):
    """The call ran out of time."""


class Overloaded(RetryError):
    """A queue, a batch bound or a session's share is full. retry_after_s: 0 if unknown."""

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SessionLost(RetryError):
    """The session no longer exists; the client opens another."""


class OperatorError(TierdError):
    """An operator must look at the machine."""


class TierFailed(OperatorError):
    """A tier cannot read or write."""


class CorruptRecord(OperatorError):
    """Stored bytes are not what was committed."""


GRPC_STATUS: dict[type[TierdError], str] = {
    InvalidArgument: "INVALID_ARGUMENT",
    NotFound: "NOT_FOUND",
    StaleHandle: "FAILED_PRECONDITION",
    NotPermitted: "PERMISSION_DENIED",
    ViewsAlive: "FAILED_PRECONDITION",
    ForkedClient: "FAILED_PRECONDITION",
    ConfigError: "FAILED_PRECONDITION",
    AlreadyOwned: "FAILED_PRECONDITION",
    VersionMismatch: "FAILED_PRECONDITION",
    Unsupported: "UNIMPLEMENTED",
    Unavailable: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Overloaded: "RESOURCE_EXHAUSTED",
    SessionLost: "UNAUTHENTICATED",
    TierFailed: "INTERNAL",
    CorruptRecord: "DATA_LOSS",
}
