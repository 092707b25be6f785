"""Requests of the session socket: the messages beside gRPC, and the check of their form.

One msgpack map a message; one request, one reply. A `release` may ask for none; `revoke` and `bye`
get none.

    hello  {op, proto, format, sdk, name, credential, engine}
           -> {ok, session, token, daemon, instance, tiers, ...}: `greeting` of listeners.py
    map    {op, tier, segment} -> {ok, bytes, writable, catalogue_bytes}
           and two descriptors: data (a file, or a GPU's slab if hello's tier has gpu), catalogue
    line   {op, mailbox} -> {ok, mailbox} and one descriptor: a stream for calls (calls.py)
           with mailbox: another one, SEQPACKET, for notices (notices.py), if the client has none
    release {op, leases, reservations, reply} -> {ok} if reply: ends leases, aborts reservations
    forget {op, session} -> {ok}: this process uses nothing of that stopped or restored session
    revoke {op, request}, no reply: take back what the call with this `tierd-request` gives
    bye    {op}, no reply but the end: this process uses nothing of this session
    ping   {op} -> {ok}
    refused: {ok: false, error: class of tierd.errors, message}

This module checks form, not rights, and holds no connection (session_connection.py). Malformed
bytes raise InvalidArgument.
"""

from __future__ import annotations

from typing import Any

import msgpack

import tierd
from tierd.core.formats.versions import FORMAT_VERSION, PROTO_VERSION
from tierd.errors import InvalidArgument, TierdError, VersionMismatch

MESSAGE_MAX_BYTES = 4096
ENGINE_WORDS, ENGINE_WORD_CHARS = 16, 128
"""Limits of a hello's engine field: pairs of text, and their length."""


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
    """A list of ids, empty if the field is missing."""
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
    """The hello's data of the engine that the client serves."""
    words = request.get("engine", {})
    if not isinstance(words, dict) or len(words) > ENGINE_WORDS:
        raise InvalidArgument(f"session socket: engine is not a map of at most {ENGINE_WORDS} texts; send less")
    if not all(isinstance(word, str) and len(word) <= ENGINE_WORD_CHARS for pair in words.items() for word in pair):
        raise InvalidArgument(
            f"session socket: engine has a value that is no text of at most {ENGINE_WORD_CHARS} characters; shorten it"
        )
    return words


def credential(request: dict[str, Any]) -> str | None:
    """The hello's credential, if any."""
    return None if request.get("credential") is None else str(field(request, "credential", str))


def check_versions(request: dict[str, Any]) -> None:
    """Checks a hello's versions. Raises VersionMismatch."""
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
    """The reply with the error."""
    return {"ok": False, "error": type(error).__name__, "message": str(error)}
