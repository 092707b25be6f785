"""Draining: the daemon takes no new work, ends old work, and answers operators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.system.raw import RawClient, put_blocks
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.testing import chain


def test_draining_refuses_new_work_and_lets_operators_watch() -> None:
    """A drained daemon refuses reservations, keeps leased pages until the release, and answers operators."""
    names = chain(1, 2)
    with Daemon() as daemon, RawClient(daemon.target) as worker:
        namespace = worker.open_namespace()
        reservation, _ = worker.reserve(namespace, names)
        worker.call(worker.cache.Commit, pb.CommitRequest(reservation=reservation))
        group = pb.Group(namespace=namespace, hashes=names.tobytes())
        lease = worker.call(worker.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST)).lease
        assert worker.call(worker.admin.Drain, apb.DrainRequest(deadline_s=0.05)).leases_left == 1
        more = pb.PutGroup(namespace=namespace, blocks=put_blocks(chain(2, 1)).tobytes())
        refused = worker.error_of(worker.cache.Reserve, pb.ReserveRequest(groups=[more], tier=pb.TIER_KIND_HOST))
        with RawClient(daemon.target) as operator:
            status = operator.call(operator.admin.Status, apb.StatusRequest())
            worker.call(worker.cache.Release, pb.ReleaseRequest(leases=[lease]))
            left = operator.call(operator.admin.Drain, apb.DrainRequest(deadline_s=10)).leases_left
    assert (refused, status.state, status.leases, left) == ("Unavailable", "draining", 1, 0)


def test_a_drain_can_be_undone() -> None:
    """After an undo the daemon takes reservations and sessions again, and keeps its memory at its end."""
    names = chain(1, 2)
    with Daemon() as daemon:
        with RawClient(daemon.target) as worker:
            namespace = worker.open_namespace()
            assert worker.call(worker.admin.Drain, apb.DrainRequest(deadline_s=1, release=True)).leases_left == 0
            worker.call(worker.admin.Drain, apb.DrainRequest(undo=True))
            reservation, _ = worker.reserve(namespace, names)
            worker.call(worker.cache.Commit, pb.CommitRequest(reservation=reservation))
        daemon.stop()
        daemon.start()
        with RawClient(daemon.target) as later:
            status = later.call(later.admin.Status, apb.StatusRequest())
    assert (status.state, status.blocks) == ("serving", 2)


def test_an_undo_ends_a_drain_that_waits() -> None:
    """A drain that waits for a lease answers when another operator undoes it, and frees nothing."""
    names = chain(1, 2)
    with Daemon() as daemon, RawClient(daemon.target) as worker, RawClient(daemon.target) as other:
        namespace = worker.open_namespace()
        reservation, _ = worker.reserve(namespace, names)
        worker.call(worker.cache.Commit, pb.CommitRequest(reservation=reservation))
        group = pb.Group(namespace=namespace, hashes=names.tobytes())
        worker.call(worker.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(worker.call, worker.admin.Drain, apb.DrainRequest(deadline_s=60, release=True))
            while other.call(other.admin.Status, apb.StatusRequest()).state != "draining":
                pass
            assert other.call(other.admin.Drain, apb.DrainRequest(undo=True)).leases_left == 1
            assert waits.result(timeout=30).leases_left == 1
        assert other.call(other.admin.Status, apb.StatusRequest()).state == "serving"
