"""Mutations of what decides who is served what: processes, epochs, rights, queues, former lives, the hash process, full disks."""

from __future__ import annotations

from tools.mutate.mutation import Mutation

NVME = ("tests/unit/tiers/test_nvme.py",)
SESSIONS = ("tests/unit/server/test_sessions.py",)
MOVER = ("tests/unit/test_mover.py",)
WATCH = ("tests/unit/cache/test_watch.py",)

SERVED: tuple[Mutation, ...] = (
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
