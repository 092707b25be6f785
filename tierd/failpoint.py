"""Fault points: named places where a test can kill the process, raise an error, or delay.

    failpoint("nvme.journal.before_sync")

One line in production code, at most one for each batch or transfer, which costs nothing while no
fault is armed. Faults of single system calls are injected by a shim (tests/system). Every point
stands once in the code and once in POINTS. Faults are armed only by TIERD_FAILPOINTS or
TIERD_FAILPOINT_SOCKET in the environment at start, or by `arm` in a test's process.

A fault is written as `action[:argument][@first][xtimes]`:

    kill             SIGKILL to this process              error:EIO        OSError with this errno
    delay:0.5        seconds of sleep, in this thread     count            nothing but counted

It lasts from the first hit, or that after @, for as many hits as x says, else forever.
TIERD_FAILPOINTS holds `point=fault`, separated by semicolons.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tierd.errors import InvalidArgument

POINTS: Mapping[str, str] = {
    "arena.begin.before_catalogue": "a segment has its memory, but no catalogue",
    "arena.begin.before_discard": "a recovered segment ends, its file still exists",
    "arena.begin.before_rename": "the old segment's catalogue is removed, its file has the old name",
    "arena.close.before_catalogue": "a segment is taken from the tier, its files still exist",
    "arena.close.before_discard": "a segment taken from the tier has no catalogue, its data file still exists",
    "arena.names.before_append": "a namespace is new to the arena",
    "arena.open.after_recovery": "the surviving segments are mapped",
    "arena.open.before_recovery": "the arena's lock is taken",
    "arena.prepare.before_catalogue": "a catalogue has a header, no room for entries",
    "arena.prepare.before_memory": "a segment waits for a file",
    "arena.publish.before_seal": "entries are written, their checksums not",
    "arena.recovery.before_removal": "the segments to keep are chosen, the others still exist",
    "arena.spare.before_file": "a spare file is about to be made",
    "arena.stamp.before_marks": "generations are chosen, but not written",
    "assembly.before_adoption": "tiers are open, their blocks not in the index",
    "assembly.before_parts": "tiers and session table are open",
    "background.before_demotion": "a demotion is decided",
    "background.before_freeing": "an epoch has ended, also for the next start; some of its blocks have pages",
    "cache.acquire.before_hold": "a lease is settled, but not in the session table",
    "cache.acquire.before_landing": "a lease exists, its transfers are in flight",
    "cache.acquire.before_promise": "a lease on pages being filled is not in the session table",
    "cache.commit.before_hash": "a commit begins",
    "cache.commit.before_hold": "blocks are published, the lease on them is not in the session table",
    "cache.commit.before_publish": "blocks are hashed, not published",
    "cache.end.before_return": "a process has ended, its holds still belong to it",
    "cache.persist.before_sync": "blocks are on the store, not synced",
    "cache.persist.before_write": "blocks are to become durable",
    "cache.release.before_unpin": "a lease ends",
    "cache.reserve.before_hold": "pages are reserved, but not in the session table",
    "cuda.direct.before_read": "a GPU process has the files, it is about to be asked to read from them",
    "cuda.direct.before_return": "blocks of a store are on a GPU and checksummed, but not reported",
    "cuda.host.before_attach": "a GPU process is about to map a host segment",
    "cuda.load.before_return": "blocks are on a GPU and checksummed, but not reported",
    "cuda.open.before_gpu": "an earlier daemon's files of a GPU tier are removed, no GPU process has started",
    "cuda.probe.before_gpu": "a GPU process has died, the next one has not started",
    "cuda.slab.before_drop": "a slab is dropped, its GPU process still has it",
    "cuda.slab.before_spare": "a slab is made and its descriptor received, but it is not registered",
    "cuda.store.before_return": "blocks are copied from a GPU, but not reported",
    "file.replace.before_directory_sync": "the file has its name, not yet durable",
    "file.replace.before_rename": "the temporary file is synced",
    "file.replace.before_sync": "the temporary file is written",
    "flights.finish.before_books": "a batch is copied, but the core is not told",
    "holds.append.before_seal": "rows are written, their last words not",
    "holds.erase.before_clear": "pages are freed, the session table still lists their holders",
    "holds.grow.before_map": "the table is full",
    "holds.holder.before_seal": "a session's record is written, its last word not",
    "instance.namespaces.before_replace": "a namespace is new to the daemon",
    "lifecycle.before_ready": "sockets are bound, readiness is not reported",
    "lifecycle.before_settle": "SIGTERM has come",
    "loads_by_layer.note.before_note": "some layers of all blocks have come, clients are not told",
    "mover.copy.before_copy": "a batch is about to be copied between two mapped tiers",
    "mover.device.before_load": "a batch is about to go from host memory to a GPU",
    "mover.device.before_store": "a batch is about to go from a GPU to host memory",
    "mover.direct.before_read": "a batch is about to go from a store directly to a GPU",
    "mover.load.before_decode": "encoded blocks are read and verified, but not decoded",
    "mover.load.before_verify": "a batch is read, but not verified",
    "mover.publish.before_catalogue": "a batch is verified, but not published",
    "mover.store.before_encode": "a batch is about to be encoded for a store",
    "mover.store.before_hash": "a batch is about to go to a store",
    "nvme.close.before_sync": "the store is about to close",
    "nvme.compact.before_journal": "a compaction begins",
    "nvme.compact.before_removal": "the snapshot is complete, the files that it replaces still exist",
    "nvme.compact.before_snapshot": "the old journals are read",
    "nvme.data.before_sync": "slots are written, not synced",
    "nvme.journal.after_sync": "records are durable, but not reported",
    "nvme.journal.before_append": "slots are synced, but not in the journal",
    "nvme.journal.before_first": "a new journal has its header",
    "nvme.journal.before_sync": "records are appended, not synced",
    "nvme.load.before_piece": "the daemon serves, some thousand blocks are read from the store, but not in the index",
    "nvme.open.before_directory_sync": "slot files are made, their names not yet durable",
    "nvme.open.before_index": "the store's lock is taken, nothing is read",
    "nvme.open.before_settle": "slot files exist, the index is read and not yet rewritten",
    "nvme.settle.before_journal": "the snapshot is complete, no journal follows it",
    "nvme.settle.before_removal": "the new journal and the old ones exist",
    "nvme.slots.before_read": "a run of slots is about to be read",
    "nvme.slots.before_write": "a run of slots is about to be written",
    "nvme.write.before_note": "slots are written, but not recorded",
    "operator.epoch.before_bump": "an epoch is about to end",
    "operator.epoch.before_forgetting": "an epoch has ended, its blocks are still in the index",
    "session.hello.before_reply": "a session is registered, its client has no reply",
    "session.map.before_reply": "a segment counts as mapped, its descriptors are not sent",
}
"""Every point, and where it stands."""

_FAULT = re.compile(r"(kill|error|delay|count)(?::([A-Z0-9.]+))?(?:@(\d+))?(?:x(\d+))?")


@dataclass(slots=True)
class _Fault:
    """first: the hit at which it begins, from 1; times: hits that it lasts, 0 forever."""

    action: str
    argument: float
    first: int
    times: int
    hits: int = 0

    @property
    def is_due(self) -> bool:
        return self.hits >= self.first and (not self.times or self.hits < self.first + self.times)


_armed: dict[str, _Fault] = {}
_changed = threading.Condition()
_watchers: list[Callable[[str], None]] = []


def failpoint(name: str) -> None:
    """Does nothing unless a fault is armed here. Raises OSError if that is the fault."""
    if _armed:
        _hit(name)
    if _watchers:
        _watchers[-1](name)


def watch(see: Callable[[str], None] | None) -> None:
    """Calls `see` at every point passed, until None is given. Simulations raise faults there."""
    _watchers[:] = [see] if see else []


def arm(name: str, fault: str) -> None:
    """Sets the fault of a point, with its count from 0. Raises InvalidArgument."""
    if name not in POINTS:
        raise InvalidArgument(f"fault point {name!r}: it does not exist; tierd/failpoint.py lists them")
    parsed = _parse(fault)
    with _changed:
        _armed[name] = parsed


def disarm(name: str = "") -> None:
    """Removes the fault of one point, or of all. Hits are forgotten."""
    with _changed:
        if name:
            _armed.pop(name, None)
        else:
            _armed.clear()


def hits() -> dict[str, int]:
    """How often each armed point was passed."""
    with _changed:
        return {name: fault.hits for name, fault in _armed.items()}


def await_hits(name: str, *, count: int, timeout_s: float) -> bool:
    """Waits until an armed point was passed so often; False on timeout."""
    with _changed:
        return _changed.wait_for(lambda: name in _armed and _armed[name].hits >= count, timeout_s)


def arm_from(environ: Mapping[str, str] = os.environ) -> None:
    """Arms the faults in TIERD_FAILPOINTS. Raises InvalidArgument."""
    for text in filter(None, environ.get("TIERD_FAILPOINTS", "").split(";")):
        name, _, fault = text.partition("=")
        arm(name.strip(), fault.strip())


def _hit(name: str) -> None:
    with _changed:
        fault = _armed.get(name)
        if fault is None:
            return
        fault.hits += 1
        is_due = fault.is_due
        _changed.notify_all()
    if is_due:
        _do(name, fault)


def _do(name: str, fault: _Fault) -> None:
    if fault.action == "kill":
        _die()
    if fault.action == "error":
        number = int(fault.argument)
        raise OSError(number, f"{os.strerror(number)} (fault point {name})")
    if fault.action == "delay":
        time.sleep(fault.argument)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("killed")  # the signal comes before this line does


def _parse(text: str) -> _Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"fault {text!r}: not action[:argument][@first][xtimes]; try kill, error:EIO@3 or delay:0.5x1"
        )
    action, argument, first, times = match.groups()
    return _Fault(action, _argument(action, argument or ""), first=int(first or 1), times=int(times or 0))


def _argument(action: str, text: str) -> float:
    try:
        if action == "error":
            return int(getattr(errno, text))
        if action == "delay":
            return float(text)
    except (AttributeError, ValueError):
        raise InvalidArgument(f"fault {action}:{text}: needs the name of an errno, such as EIO, or seconds") from None
    return 0.0
