"""Draining: the daemon takes no new work, ends old work, and answers operators."""

from __future__ import annotations

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
