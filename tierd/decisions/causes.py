"""The causes of hits and misses. `tierctl explain` shows the names; each text says what one means.

This is the only list of them. deploy/docs/explanation/why-it-missed.md has an example of each.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from tierd.core.admission import Verdict
from tierd.core.formats.model import Reason


class Cause(enum.StrEnum):
    """Why a block or a request hit or missed."""

    HIT_NEAR = "hit_near"
    HIT_FAR = "hit_far"
    NEVER_STORED = "never_stored"
    BEFORE_RECORD = "before_record"
    EVICTED = "evicted"
    NOT_ADMITTED = "not_admitted"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_SALT = "other_salt"
    OTHER_TENANT = "other_tenant"
    EPOCH_BUMPED = "epoch_bumped"
    CORRUPT = "corrupt"
    READ_FAILED = "read_failed"
    TOO_COARSE = "too_coarse"
    EVICTED_BY_OPERATOR = "evicted_by_operator"
    STORE_FAILED = "store_failed"
    OUT_OF_SERVICE = "out_of_service"
    BUSY = "busy"
    NO_ROOM = "no_room"
    SLOWER_THAN_COMPUTING = "slower_than_computing"


MEANINGS: Mapping[Cause, str] = {
    Cause.HIT_NEAR: "Served from memory. Nothing was waited for.",
    Cause.HIT_FAR: "Served after a read from NVMe.",
    Cause.NEVER_STORED: "No client stored it since the daemon started, and no earlier run had its namespace.",
    Cause.BEFORE_RECORD: "It was not there, and the record does not go back to the reason.",
    Cause.EVICTED: "Its last copy was evicted to make room.",
    Cause.NOT_ADMITTED: "Admission declined to write it to NVMe; then memory evicted it.",
    Cause.OTHER_NAMESPACE: "Another namespace has the same tokens; model, adapter, dtype, layout or another part differs.",
    Cause.OTHER_SALT: "A namespace that differs in the salt alone has the same tokens: engines put their hash seed there.",
    Cause.OTHER_TENANT: "Another tenant's namespace has the same tokens; tenants share no blocks.",
    Cause.EPOCH_BUMPED: "An operator ended the epoch in which it was stored.",
    Cause.CORRUPT: "Its page had wrong bytes and is in quarantine.",
    Cause.READ_FAILED: "It was there, but the read failed or was late.",
    Cause.TOO_COARSE: "It is stored by a lossy codec with a greater error than the client accepts.",
    Cause.EVICTED_BY_OPERATOR: "An operator evicted it, or made its tier smaller.",
    Cause.STORE_FAILED: "The store that held its last copy failed.",
    Cause.OUT_OF_SERVICE: "The tier that holds it is out of service.",
    Cause.BUSY: "The read queue of the tier that holds it was full.",
    Cause.NO_ROOM: "The tier that was asked for had no room for it: sessions held it, or it has too few segments.",
    Cause.SLOWER_THAN_COMPUTING: "The engine expected loading to take longer than computing.",
}
"""Cause -> what it means, in one sentence."""

LOSSES: Mapping[Reason, Cause] = {
    Reason.EVICTED: Cause.EVICTED,
    Reason.CORRUPTED: Cause.CORRUPT,
    Reason.FAILED: Cause.STORE_FAILED,
    Reason.EPOCH_BUMPED: Cause.EPOCH_BUMPED,
    Reason.ADMIN: Cause.EVICTED_BY_OPERATOR,
}
"""Why a tier lost a block -> the cause of later misses. Pages freed for other reasons lose nothing."""

DECLINED: Mapping[Verdict, str] = {
    Verdict.PARTIAL: "it is the last, short block of a prompt",
    Verdict.UNLIKELY: "another use was not likely enough",
    Verdict.BUDGET: "the wear budget was used up",
}
"""Verdicts after which an evicted block was never written to NVMe -> the reason in words."""
