"""Mutations of work that clients do: puts announced before they are written, puts that nobody
awaits, and copies."""

from __future__ import annotations

from tools.mutate.mutation import Mutation

ONE_SIDED = ("tests/system/test_one_sided.py",)
EARLY = ("tests/system/test_early_commits.py",)

COPIED: tuple[Mutation, ...] = (
    # -- puts that nobody awaits
    Mutation(
        "unanswered-lost",
        "blocks of a put that waited for nobody and failed are counted",
        "tierd/client/blocks/background_puts.py",
        "self._lost[kind] = before + blocks, said",
        "pass",
        ("tests/system/test_background_puts.py", "-k", "lost"),
    ),
    Mutation(
        "unanswered-refused",
        "and one that was refused for want of room is sent again",
        "tierd/client/blocks/background_puts.py",
        "if isinstance(error, Overloaded):",
        "if False:",
        ("tests/system/test_background_puts.py", "-k", "refused_for"),
    ),
    Mutation(
        "unanswered-close",
        "a client that closes waits for its puts",
        "tierd/client/client.py",
        "self._verbs.finish(self._deadline(CLOSE_S))",
        "pass",
        ("tests/system/test_background_puts.py", "-k", "close"),
    ),
    Mutation(
        "unanswered-apart",
        "who cancels a verb takes no answer from a put that waited for nobody",
        "tierd/client/blocks/background_puts.py",
        "with cancellation.apart():",
        "if True:",
        ("tests/system/test_background_puts.py", "-k", "cancels"),
    ),
    Mutation(
        "unanswered-unknown",
        "a flush that has not heard of all puts says so",
        "tierd/client/blocks/background_puts.py",
        "        if self._sent:\n            raise DeadlineExceeded",
        "        if False:\n            raise DeadlineExceeded",
        ("tests/system/test_background_puts.py", "-k", "flush_raises"),
    ),
    # -- copies
    Mutation(
        "copied-trusted",
        "a page with sums that is bad at both copies of a get is a miss",
        "tierd/client/blocks/lease.py",
        "good |= without_sums & np.isin",
        "good |= np.isin",
        (*ONE_SIDED, "-k", "goes_on_writing"),
    ),
    Mutation(
        "saved-sums",
        "an engine's save says the sums of what it has copied",
        "tierd/integrations/store.py",
        "reservation.summed(copy_all_in(*zip(*blocks, strict=True)))",
        "copy_all_in(*zip(*blocks, strict=True))",
        ("tests/system/test_engine_store.py", "-k", "has_copied"),
    ),
    Mutation(
        "pieces-slices",
        "a piece that ends within a slice is not summed as one, also on the way out",
        "tierd/client/blocks/copying.py",
        "if not are_slices(sizes, length, layers):",
        "if False:",
        ("tests/unit/client/blocks/test_copying.py", "-k", "in_pieces"),
    ),
    Mutation(
        "saved-slices",
        "a piece that ends within a slice is not summed as one",
        "tierd/integrations/pieces.py",
        "if not are_slices(lengths, len(page), layers):",
        "if False:",
        ("tests/unit/integrations/test_parts.py", "-k", "is_summed"),
    ),
    Mutation(
        "summed-once",
        "sums are of one commit",
        "tierd/client/blocks/reservation.py",
        'sums, self._sums = self._sums, b""',
        "sums = self._sums",
        ("tests/system/test_engine_store.py", "-k", "of_one_commit"),
    ),
    Mutation(
        "one-sided-hashes",
        "hashes of another shape are read by no loop",
        "tierd/client/blocks/one_sided_get.py",
        "hashes, size = checked_hashes(group.hashes)",
        "hashes, size = np.ascontiguousarray(group.hashes)",
        (*ONE_SIDED, "-k", "that_are_none"),
    ),
    # -- commits that come before their pages are written
    Mutation(
        "withdrawn-pages",
        "pages of a commit that was given up stay with their writer, who may still be writing",
        "tierd/core/core.py",
        "keep_open=True, now=now).plan",
        "keep_open=False, now=now).plan",
        (*EARLY, "-k", "stops"),
    ),
    Mutation(
        "second-thread-refused",
        "work that got no thread is not begun by a later one",
        "tierd/client/blocks/copying.py",
        "self._pool = None  # it may have queued the work, and no later thread must do it",
        "pass",
        ("tests/unit/client/blocks/test_copying.py", "-k", "gets_no_second"),
    ),
    Mutation(
        "second-thread",
        "a put has ended when the second thread of its copy has",
        "tierd/client/blocks/copying.py",
        """            done.result()
""",
        "",
        ("tests/unit/client/blocks/test_copying.py",),
    ),
    Mutation(
        "rest-thrown-away",
        "what follows a call that was refused is not taken for the next call",
        "tierd/server/local_rpc/calls.py",
        "if line.owes_more:",
        "if False:",
        ("tests/unit/server/local_rpc/test_calls.py", "-k", "thrown_away"),
    ),
    Mutation(
        "dropped-handle",
        "no page is touched through a hold that another thread gave back",
        "tierd/client/session/pins.py",
        "if not self._has_handle:\n            raise",
        "if False:\n            raise",
        ("tests/unit/client/test_client.py", "-k", "release_in_another"),
    ),
    Mutation(
        "lost-is-kept",
        "what a failed sync has lost is no copy any more, and memory's is written again",
        "tierd/cache/watch.py",
        "self._flights.note_lost()  # before a probe",
        "pass  # before a probe",
        ("tests/unit/cache/test_lost.py",),
    ),
    Mutation(
        "flush-overlooks-losses",
        "a flush counts nothing that was lost while it went on",
        "tierd/cache/persistence.py",
        "went and now == then for",
        "went for",
        ("tests/unit/cache/test_lost.py",),
    ),
    Mutation(
        "reads-what-is-not-held",
        "what a store has lost is read no more",
        "tierd/tiers/store/moves.py",
        "        rows = rows[held[rows]]\n",
        "",
        ("tests/unit/tiers/test_store_trouble.py",),
    ),
)
