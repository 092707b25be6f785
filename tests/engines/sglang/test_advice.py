"""With a prefill rate, SGLang learns only of pages that are worth loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "sglang", reason="sglang is not installed: make test-engines runs this in an environment of its own"
)

from prometheus_client import REGISTRY

from tests.engines.sglang.pools import PAGE, backend, fill, indices, mha, page
from tests.system.raw import RawClient
from tests.system.shim.iofault import READS, IoFaults
from tests.system.test_encoded_stores import evict
from tierd._proto import admin_pb2 as apb
from tierd.testing import Daemon

KEYS = [f"p{number}" for number in range(6)]
NEAR = 2
FAST, SLOW, MEDIUM = 1e12, 1.0, 240.0
"""Tokens a second: no load is as fast, none as slow. With MEDIUM all pages take DELAY_S / 10."""
DELAY_S = 1.0
CONFIG = '[[host]]\ncapacity = "16 MiB"\n[[nvme]]\ncapacity = "16 MiB"\nadmission = "all"\n'


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


def stored(daemon: Daemon, model: str, **given: Any) -> Any:
    """A backend whose pages, 0 and on of its pool, are in the store alone."""
    pool = mha("page_first")
    fill(pool, seed=1)
    made = backend(daemon.target, pool, model_name=model, **given)
    assert all(made.batch_set_v1(KEYS, indices(*range(len(KEYS)))))
    with RawClient(daemon.target) as operator:
        operator.call(operator.admin.Flush, apb.FlushRequest(deadline_s=30))
    evict(daemon)
    return made


def load(made: Any, keys: list[str]) -> None:
    """Loads pages, whose bytes are right."""
    pool = made.mem_pool_host
    assert made.batch_get_v1(keys, indices(*range(8, 8 + len(keys)))) == [True] * len(keys)
    assert [page(pool, (8 + i) * PAGE) for i in range(len(keys))] == [page(pool, i * PAGE) for i in range(len(keys))]


@pytest.mark.parametrize("version", [1, 2])
def test_a_fast_engine_computes_everything(daemon: Daemon, version: int) -> None:
    """If computing is faster, no page is offered. Whether a page exists is told as before."""
    made = stored(daemon, f"fast {version}", extra={"prefill_tokens_per_s": FAST})
    offered = made.batch_exists(KEYS) if version == 1 else made.batch_exists_v2(KEYS).kv_hit_pages
    assert offered == 0
    assert made.exists(KEYS[-1]) and not made.exists("none")


@pytest.mark.parametrize(
    "extra", [{"prefill_tokens_per_s": SLOW}, {}, {"prefill_tokens_per_s": FAST, "advisor": False}]
)
def test_others_load_everything(daemon: Daemon, extra: dict[str, Any]) -> None:
    """A slow engine, one whose rate is not known, and one without the advisor load all pages. Only the
    first one's loads are decisions."""
    made = stored(daemon, f"slow {extra}", extra=extra)
    assert made.batch_exists(KEYS) == len(KEYS)
    load(made, KEYS)
    assert made._store.advice.take_counts()["advised_loads"] == (extra.get("prefill_tokens_per_s") == SLOW)


def test_a_store_that_becomes_slow_is_left(tmp_path: Path) -> None:
    """After one slow load, only near pages are offered. SGLang's endpoint has decisions and regret."""
    labels = {"model_name": "told", "tp_rank": "0", "pp_rank": "0"}

    def told(name: str) -> float:
        return REGISTRY.get_sample_value(f"sglang:tierd_{name}_total", labels) or 0.0

    with IoFaults(tmp_path) as io, Daemon(CONFIG, env=io.env) as daemon:
        made = stored(daemon, "told", extra={"prefill_tokens_per_s": MEDIUM}, enable_storage_metrics=True)
        io.arm(READS, f"delay:{DELAY_S}", "*/nvme-0/*")
        assert made.batch_exists(KEYS) == len(KEYS), "nothing is known of the store yet"
        load(made, KEYS)
        assert made.get_stats().prefetch_pgs == [len(KEYS)]
        assert told("advised_loads") == 1 and told("regret_us") > 0
        evict(daemon)
        load(made, KEYS[:NEAR])
        assert made.batch_exists(KEYS) == NEAR
        made.get_stats()
        assert (told("advised_loads"), told("advised_computes")) == (2, 0)
        assert told("advised_compute_tokens") == (len(KEYS) - NEAR) * PAGE
        made.close()
