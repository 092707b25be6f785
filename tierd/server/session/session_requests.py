"""Requests of the session socket: what clients say beside gRPC, and what is no request.

One msgpack map a message; one request, one reply (`release` may ask for none; `revoke` and `bye` get none).

    hello  {op, proto, format, sdk, name, credential, engine} -> {ok, session, token, daemon, instance, tiers, ...};
           what else this daemon takes, as `greeting` of listeners.py has it
    map    {op, tier, segment} -> {ok, bytes, writable, catalogue_bytes} and two descriptors: data, catalogue; data
           is a file, or the slab of a GPU where hello's row of the tier has gpu: {ordinal, uuid}
    line   {op, mailbox} -> {ok, mailbox} and one descriptor: a stream for calls, one after another (calls.py). With
           mailbox, for who has none, another: SEQPACKET, whose messages wake nobody (notices.py)
    release {op, leases, reservations, reply} -> {ok} if reply: ends leases, aborts reservations
    forget {op, session} -> {ok}: a session that was cut off, of a former daemon perhaps, that this process uses
           nothing of any more
    revoke {op, request}, no answer: what the call with this `tierd-request` gave, or is still to give, is not wanted
    bye    {op}, no answer but the end: this process uses nothing of this session any more
    ping   {op} -> {ok}
    refused: {ok: false, error: class of tierd.errors, message}

It checks shapes, not rights, and holds no connection (session_connection.py). What is not well-formed raises
InvalidArgument, whatever the bytes.
"""

from __future__ import annotations

from typing import Any

import msgpack

import tierd
from tierd.core.formats.versions import FORMAT_VERSION, PROTO_VERSION
from tierd.errors import InvalidArgument, TierdError, VersionMismatch

MESSAGE_MAX_BYTES = 4096
ENGINE_WORDS, ENGINE_WORD_CHARS = 16, 128
"""What a hello may say of the engine that the client serves: so many pairs of text, so long."""


def request_of(data: bytes) -> dict[str, Any]:
    """The request of a message."""
    if len(data) > MESSAGE_MAX_BYTES:
        raise InvalidArgument(f"session socket: a message above {MESSAGE_MAX_BYTES} bytes; send less")
    try:
        request = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidArgument(
            f"session socket: not a msgpack map ({type(error).__name__}); send one request a message"
        ) from error
    if not isinstance(request, dict):
        raise InvalidArgument(
            f"session socket: a {type(request).__name__} instead of a map; send one request a message"
        )
    return request


def numbers(request: dict[str, Any], name: str) -> list[int]:
    """Ids, none where the field is not there."""
    value = request.get(name, [])
    if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 1 << 64 for number in value):
        raise InvalidArgument(f"session socket: {name} is {value!r:.80}, not a list of ids; correct the request")
    return value


def field(request: dict[str, Any], name: str, kind: type) -> Any:
    """A field of this type."""
    value = request.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(f"session socket: {name} is {value!r:.80}, not {kind.__name__}; correct the request")
    return value


def engine(request: dict[str, Any]) -> dict[str, str]:
    """What a hello says of the engine that the client serves."""
    words = request.get("engine", {})
    if not isinstance(words, dict) or len(words) > ENGINE_WORDS:
        raise InvalidArgument(f"session socket: engine is not a map of at most {ENGINE_WORDS} texts; say less")
    if not all(isinstance(word, str) and len(word) <= ENGINE_WORD_CHARS for pair in words.items() for word in pair):
        raise InvalidArgument(
            f"session socket: engine has what is no text of {ENGINE_WORD_CHARS} characters; shorten it"
        )
    return words


def credential(request: dict[str, Any]) -> str | None:
    """Of a hello, if it has one."""
    return None if request.get("credential") is None else str(field(request, "credential", str))


def check_versions(request: dict[str, Any]) -> None:
    """Of a hello. Raises VersionMismatch."""
    theirs, ours = (request.get("proto"), request.get("format")), (PROTO_VERSION, FORMAT_VERSION)
    if theirs == ours:
        return
    remedy = "use one tierd on both sides"
    if all(isinstance(number, int) for number in theirs):
        remedy = f"upgrade the {'client' if theirs < ours else 'daemon'}'s tierd"
    raise VersionMismatch(
        f"session: the client speaks protocol {theirs[0]!s:.20}, format {theirs[1]!s:.20}"
        f" (SDK {request.get('sdk')!s:.40}), the daemon protocol {PROTO_VERSION}, format {FORMAT_VERSION}"
        f" (tierd {tierd.__version__}); {remedy}"
    )


def refusal(error: TierdError) -> dict[str, Any]:
    """The reply that says why not."""
    return {"ok": False, "error": type(error).__name__, "message": str(error)}
