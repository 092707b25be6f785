"""The mutations, as data: which text goes, what comes in its place, which tests should notice.

Purpose: one row per check whose loss would show somebody wrong bytes, or lose what was promised to be kept. A text stands in its file exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """what: the promise that it breaks. tests: arguments for pytest, the quickest that should notice."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def is_there(self, root: Path) -> bool:
        """Whether its text stands in its file exactly once."""
        path = root / self.file
        return path.exists() and path.read_text(encoding="utf-8").count(self.old) == 1


CATALOGUE = ("tests/unit/tiers/test_catalogue.py",)
SLOTS = ("tests/unit/tiers/test_slots.py",)
NVME = ("tests/unit/tiers/test_nvme.py",)
SESSIONS = ("tests/unit/server/test_sessions.py",)
MOVER = ("tests/unit/test_mover.py",)
CACHE = ("tests/unit/cache/test_cache.py",)
SEALED = ("tests/unit/core/test_sealed.py",)
SEALING = ("tests/unit/cache/test_sealing.py",)
WATCH = ("tests/unit/cache/test_watch.py",)
HANDLES = ("tests/system/test_handles.py",)
CORE = ("tests/unit/core/test_ends_of_ranges.py", "tests/unit/core/test_upkeep.py")

MUTATIONS: tuple[Mutation, ...] = (
    # -- generations
    Mutation(
        "copy-recheck",
        "after a copy the SDK reads the generation words again",
        "tierd/client/lease.py",
        'good[rows] = segment.words[self.handles["slot"][rows]] == self.handles["generation"][rows]',
        "good[rows] = True",
        ("tests/unit/client/test_client.py", "-k", "taken_away"),
    ),
    Mutation(
        "verdict-generation",
        "a verdict about bytes reaches the page only while it has the generation that was looked at",
        "tierd/core/upkeep.py",
        "return np.asarray(pages[generation[pages] == wanted], np.int64)",
        "return np.asarray(pages, np.int64)",
        CORE,
    ),
    Mutation(
        "restore-generation",
        "after a restart a process gets back the page that it had, not what lies there now",
        "tierd/core/upkeep.py",
        'good[at] &= pages_of.generation[found] == extents["generation"][at]',
        "pass",
        CORE,
    ),
    Mutation(
        "generations-rise",
        "a page is never given twice with one generation",
        "tierd/core/index.py",
        "self.generation += len(pages)",
        "self.generation += 0",
        CORE,
    ),
    Mutation(
        "generations-end",
        "past the last generation no page is given",
        "tierd/core/room.py",
        "count = min(count, self._index.generations_left)",
        "count = count + 0",
        CORE,
    ),
    Mutation(
        "retract-word",
        "the generation word of a freed page changes before the page is used again",
        "tierd/tiers/catalogue.py",
        "self._generations[slots] = NO_GENERATION",
        "pass",
        CATALOGUE,
    ),
    Mutation(
        "survivor-generation",
        "an entry counts after a restart only with its page's generation",
        "tierd/tiers/catalogue.py",
        'here &= (metas["generation"] == self._generations[slots]) & (metas["generation"] != NO_GENERATION)',
        'here &= metas["generation"] != NO_GENERATION',
        CATALOGUE,
    ),
    Mutation(
        "late-publish",
        "an entry is not written for a page that has moved on",
        "tierd/tiers/catalogue.py",
        'current = np.flatnonzero(self._generations[slots] == records["generation"])',
        "current = np.arange(len(records))",
        CATALOGUE,
    ),
    Mutation(
        "slot-generation",
        "a slot that holds an earlier occupant is a miss",
        "tierd/tiers/slots.py",
        'for name in ("segment", "offset", "generation"):\n        good &=',
        'for name in ("segment", "offset"):\n        good &=',
        SLOTS,
    ),
    Mutation(
        "slot-store",
        "a slot of another store is a miss",
        "tierd/tiers/slots.py",
        'good & (found["store"] == np.frombuffer(store, dtype=np.uint8)).all(axis=1)',
        "good",
        SLOTS,
    ),
    Mutation(
        "memory-given-once",
        "memory that was made for a segment is given up if its life has ended meanwhile, and not if another has it",
        "tierd/tiers/segments.py",
        "is_alive = self._segments.get(name) is segment",
        "is_alive = True",
        ("tests/unit/tiers/test_arena.py", "-k", "ended"),
    ),
    # -- checksums
    Mutation(
        "entry-checksum",
        "a torn entry of a catalogue is a free page",
        "tierd/tiers/catalogue.py",
        "good = intact(metas, record_checksum) & self._is_here(slots, metas)",
        "good = self._is_here(slots, metas)",
        CATALOGUE,
    ),
    Mutation(
        "entry-table-digest",
        "a damaged slice table frees its page",
        "tierd/tiers/catalogue.py",
        'good[good] = np.all(self._digests(slots[good], metas["slices"][good]) == metas["digest"][good], axis=1)',
        "pass",
        CATALOGUE,
    ),
    Mutation(
        "slot-table-digest",
        "a damaged slice table in a slot's header is a miss",
        "tierd/tiers/slots.py",
        "if table_digest(table) == digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]:",
        "if True:",
        SLOTS,
    ),
    Mutation(
        "stored-digest",
        "what is written to a store is compared with the digest of the commit",
        "tierd/mover.py",
        "return table if table_digest(table) == digests[row] else None",
        "return table",
        MOVER,
    ),
    Mutation(
        "zeros-left",
        "a block waits for the zeros that are being written where it goes",
        "tierd/tiers/nvme.py",
        "await self._zeroing.leave(place)",
        "pass",
        ("tests/unit/tiers/test_zeroing.py",),
    ),
    Mutation(
        "copy-digest",
        "what a transfer has copied is compared with the digest of the commit",
        "tierd/mover.py",
        'same = (hashed.digests == metas["digest"]).all(axis=1)\n    return np.where',
        "same = np.ones(len(metas), np.bool_)\n    return np.where",
        MOVER,
    ),
    Mutation(
        "journal-frame",
        "a frame of the journal is believed only with its checksum",
        "tierd/tiers/journal.py",
        "if checksum != _frame_sum((*origin, offset), payload):",
        "if False:",
        ("tests/unit/tiers/test_journal.py",),
    ),
    Mutation(
        "snapshot-piece",
        "damaged rows of a snapshot are not believed",
        "tierd/tiers/snapshot.py",
        "record_checksum(piece) == int(total)",
        "True",
        ("tests/unit/tiers/test_snapshot.py",),
    ),
    # -- first hits
    Mutation(
        "verify-first-hit",
        "a page that its writer could have changed is verified before anybody else sees it",
        "tierd/cache/verification.py",
        'suspect = (extents["flags"] & UNVERIFIED) != 0',
        "suspect = np.zeros(len(extents), np.bool_)",
        CACHE,
    ),
    Mutation(
        "unverified-flag",
        "a page that a client wrote counts as unverified",
        "tierd/core/puts.py",
        "self._index.tiers[tier].flags[pages] = UNVERIFIED",
        "self._index.tiers[tier].flags[pages] = 0",
        CACHE,
    ),
    Mutation(
        "early-daemon",
        "what was copied from a daemon that has gone is no part of another one's answer",
        "tierd/client/verbs.py",
        "early.session is not lease.hold.link.session",
        "False",
        ("tests/system/test_early_copies.py",),
    ),
    Mutation(
        "sealed-hash",
        "what is hashed of a sealed put is the copy, which its writer cannot change",
        "tierd/mover.py",
        "tables.append(slice_sums(target[begun:end], piece))",
        "tables.append(slice_sums(tier.view(source)[begun:end], piece))",
        SEALING,
    ),
    Mutation(
        "sealed-writer",
        "blocks of sealed puts lie where no session may write",
        "tierd/core/puts.py",
        "own = key._replace(writer=self._index.tiers[tier].spec.own_writer)",
        "own = key",
        SEALED,
    ),
    Mutation(
        "sealed-file",
        "a file that a client could write to is no sealed segment's",
        "tierd/core/mapped.py",
        "strangers = self._writers[place] - {key.writer} if self._is_strict else ()",
        "strangers = ()",
        SEALED,
    ),
    Mutation(
        "bad-though-forgotten",
        "a bad page of an epoch that has ended is withheld, and no lease keeps it",
        "tierd/core/upkeep.py",
        "pages = pages[readable & (pages_of.doom[pages] != Reason.CORRUPTED)]",
        "pages = pages[readable & (pages_of.doom[pages] == 0)]",
        ("tests/unit/core/test_quarantine.py",),
    ),
    # -- syncs
    Mutation(
        "sync-data",
        "the slots of a batch are synced before the journal tells of them",
        "tierd/tiers/ledger.py",
        "await self._sync_data(dirty, records)\n",
        "pass\n",
        NVME,
    ),
    Mutation(
        "settle-retold",
        "what journals told before a crash is told anew before they go",
        "tierd/tiers/recovery.py",
        "told_since(loaded.snapshot, index) if has_news else ()",
        "()",
        ("tests/unit/tiers/test_settle.py",),
    ),
    Mutation(
        "settle-bounded",
        "starts that die again and again leave no more than some journals to read",
        "tierd/tiers/recovery.py",
        " or loaded.journals > RETOLD_JOURNALS:",
        ":",
        ("tests/unit/tiers/test_settle.py",),
    ),
    Mutation(
        "sync-journal",
        "records are synced before anybody is told that a block is durable",
        "tierd/tiers/ledger.py",
        "self._opened.journal.sync()\n        failpoint",
        "failpoint",
        NVME,
    ),
    Mutation(
        "sync-directory",
        "the name of a new file is durable",
        "tierd/tiers/durable.py",
        'failpoint("file.replace.before_directory_sync")\n    disk.sync_directory(path.parent)',
        'failpoint("file.replace.before_directory_sync")',
        ("tests/sim/test_crash_states.py",),
    ),
    # -- processes
    Mutation(
        "pidfd-wait",
        "what a session held is reused only after its process has gone, not when its socket closes",
        "tierd/server/session_socket.py",
        "self._owner.sessions.stop(self.session)",
        "self._owner.sessions._end(self.session)",
        SESSIONS,
    ),
    Mutation(
        "process-start-time",
        "a later process of the same number is not taken for the holder of pages",
        "tierd/processes.py",
        "if find_start_time(pid) == start_time and not has_ended(pidfd):",
        "if not has_ended(pidfd):",
        SESSIONS,
    ),
    Mutation(
        "holds-before-handles",
        "who holds which pages is recorded before the handles leave, so that a restart keeps them",
        "tierd/cache/cache.py",
        "self._hold((session, HoldKind.LEASE, got.lease), served.extents)",
        "pass",
        ("tests/system/test_handles.py", "-k", "restart"),
    ),
    # -- epochs
    Mutation(
        "epoch-current",
        "a namespace id of an ended epoch is refused",
        "tierd/cache/cache.py",
        "if not self.registry.is_current(namespace):",
        "if False:",
        ("tests/system/test_handles.py", "-k", "namespace"),
    ),
    Mutation(
        "epoch-commit",
        "pages that were reserved before an epoch ended are not published in it",
        "tierd/core/puts.py",
        "if every(ok) and not (self.dead and self.dead & set(held.namespaces[commit.rows].tolist())):",
        "if every(ok):",
        ("tests/unit/core/test_upkeep.py", "tests/unit/core/test_puts.py"),
    ),
    Mutation(
        "epoch-adopt",
        "blocks of an ended epoch are not taken in after a restart",
        "tierd/server/adoption.py",
        'mine = among(metas["namespace"], namespaces)',
        "mine = np.ones(len(metas), np.bool_)",
        ("tests/system/test_handles.py", "-k", "namespace"),
    ),
    Mutation(
        "epoch-events",
        "watchers hear of no block as stored whose epoch ended while it flew",
        "tierd/cache/flights.py",
        "self._announce_stored(self._held(batch[statuses == BlockStatus.READY]))",
        "self._announce_stored(batch[statuses == BlockStatus.READY])",
        ("tests/unit/cache/test_flights.py",),
    ),
    Mutation(
        "watch-another-life",
        "a watcher that comes back with a number of another life is told of the gap",
        "tierd/cache/events.py",
        "if after > self._last:",
        "if False:",
        ("tests/system/test_handles.py", "-k", "watch"),
    ),
    Mutation(
        "settle-doomed",
        "a lease is not settled on pages that were taken out while their transfers flew",
        "tierd/core/gets.py",
        "lost = (doom == int(Reason.CORRUPTED)) if lease.settled else (doom > 0)",
        "lost = doom < 0",
        ("tests/unit/core/test_gets.py", "tests/unit/core/test_upkeep.py"),
    ),
    # -- who may
    Mutation(
        "tenant",
        "another tenant's namespace is refused",
        "tierd/cache/cache.py",
        "if namespace.tenant != self.tenant_of(session):",
        "if False:",
        ("tests/unit/server/test_guard.py",),
    ),
    Mutation(
        "token-secret",
        "the number of a session without its secret opens nothing",
        "tierd/server/sessions.py",
        "if session is None or not matches or",
        "if session is None or",
        SESSIONS,
    ),
    Mutation(
        "segment-writer",
        "only its one writer gets a descriptor that can write to a segment",
        "tierd/server/listeners.py",
        "is_writable = found[0].writer == session.id",
        "is_writable = True",
        ("tests/system/test_handles.py", "-k", "segment"),
    ),
    Mutation(
        "revoked-call",
        "what a call gave that its client has given up comes back",
        "tierd/server/grants.py",
        "if request in self._revoked.get(session, ()):",
        "if False:",
        ("tests/unit/server/test_grants.py",),
    ),
    Mutation(
        "stream-page",
        "a stream touches no page that its reservation or lease has lost",
        "tierd/cache/cache.py",
        "if (session, kind, number) not in self._holdings:",
        "if False:",
        ("tests/unit/server/test_streams.py",),
    ),
    Mutation(
        "pinned-victims",
        "a pinned page is no victim",
        "tierd/core/index.py",
        " & (pins[self.page[tier][at]] == 0)",
        "",
        ("tests/unit/core/test_room.py", "tests/unit/core/test_gets.py"),
    ),
    # -- queues and stores that are out of service
    Mutation(
        "withdrawn-waiter",
        "who waits no longer for a turn leaves the client's queue",
        "tierd/client/credits.py",
        "self._waiting.remove(waiter)",
        "pass",
        ("tests/unit/client/test_client_credits.py",),
    ),
    Mutation(
        "watch-refuse",
        "what waits for a store that goes out of service fails at once",
        "tierd/cache/watch.py",
        "self._mover.refuse(position)",
        "pass",
        WATCH,
    ),
    Mutation(
        "watch-writable",
        "a store that is out of service takes no writes",
        "tierd/cache/watch.py",
        "self._core.set_writable(position, breaker.writes and may)",
        "pass",
        WATCH,
    ),
    Mutation(
        "watch-serving",
        "a store whose reads hang is read no more",
        "tierd/cache/watch.py",
        "self._core.set_serving(position, breaker.reads and may)",
        "pass",
        WATCH,
    ),
    # -- former lives
    Mutation(
        "adopted-unread",
        "a slot that a former life left counts as durable only once it was read",
        "tierd/tiers/nvme.py",
        'extents["flags"] = UNVERIFIED',
        'extents["flags"] = 0',
        ("tests/system/test_restart.py", "-k", "durable"),
    ),
    Mutation(
        "commits-ended",
        "the end of the daemon waits for what is being hashed",
        "tierd/server/assembly.py",
        "stack.push_async_callback(daemon.cache.commits_ended)",
        "pass",
        ("tests/unit/server/test_assembly.py",),
    ),
    Mutation(
        "closed-without-its-daemon",
        "what a client held that was closed while its daemon died is told to the successor",
        "tierd/client/connection.py",
        "self.forgettable.append(self._closed.popleft())",
        "self._closed.popleft()",
        ("tests/system/test_client.py", "-k", "closed_without"),
    ),
    # -- the hash process
    Mutation(
        "hash-process-gone",
        "a commit that waits for sums of a process that has ended hears of it",
        "tierd/hashing/process.py",
        "for _ in range(each.left):",
        "for _ in range(0):",
        ("tests/unit/cache/test_ahead.py",),
    ),
    Mutation(
        "hash-process-memory",
        "memory that has ended is not kept by the hash process",
        "tierd/cache/flights.py",
        "self._mover.hashing.detach(segment.replaces)",
        "pass",
        ("tests/unit/cache/test_ahead.py",),
    ),
    Mutation(
        "hash-process-order",
        "each page gets its own sums",
        "tierd/cache/ahead.py",
        "life = self.asked.popleft()",
        "life = self.asked.pop()",
        ("tests/unit/cache/test_ahead.py",),
    ),
    Mutation(
        "releases-overtaken",
        "what a client let go of before a Reserve is room for it",
        "tierd/cache/releases.py",
        "self.hear(asker)",
        "pass",
        ("tests/system/test_views.py", "-k", "let_go_of"),
    ),
    # -- full disks
    Mutation(
        "full-journal",
        "records for which there was no space are written by the next sync, before that says that blocks are durable",
        "tierd/tiers/ledger.py",
        "self._pending = records + self._pending  # true all the same, and for the next flight",
        "pass",
        NVME,
    ),
    Mutation(
        "failed-write",
        "a block that could not be written is told as failed",
        "tierd/mover.py",
        "return np.full(len(batch), BlockStatus.FAILED, dtype=np.uint16)",
        "return np.full(len(batch), BlockStatus.READY, dtype=np.uint16)",
        MOVER,
    ),
)
