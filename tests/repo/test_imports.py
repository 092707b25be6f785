"""Imports go down only. Each part is strong by what it need not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.repo.source import Module, imports, modules

EDGE = {"errors", "config", "units", "places", "clock", "failpoint", "processes", "trust"}
"""What every part may use, besides core."""

PARTS: dict[str, set[str]] = {
    "errors": set(),
    "failpoint": {"errors"},
    "units": set(),
    "places": set(),
    "trust": set(),
    "clock": set(),
    "bearer": {"errors"},
    "chunks": set(),
    "wire_codecs": {"chunks", "errors"},
    "children": set(),
    "huge_pages": set(),
    "native": set(),
    "processes": set(),
    "metrics": set(),
    "logs": set(),
    "notify": set(),
    "settings": {"core", "units"},
    "config": {"core", "errors", "places", "settings", "units"},
    "core": {"errors"},
    "policies": {"core", "errors"},
    "simulator": {"core", "policies", "config", "errors", "units"},
    "kernels": {"core"} | EDGE,
    "codecs": {"core", "kernels"} | EDGE,
    "gpu": {"core", "kernels", "children"} | EDGE,
    "tiers": {"huge_pages", "core", "codecs"} | EDGE,
    "mover": {"core", "tiers", "codecs"} | EDGE,
    "cache": {"core", "policies", "mover", "tiers", "metrics", "logs"} | EDGE,
    "events": {"core", "cache", "_proto"} | EDGE,
    "server": {"core", "cache", "events", "tiers", "_proto", "bearer", "chunks", "wire_codecs", "huge_pages"}
    | {"metrics", "logs", "notify"}
    | EDGE,
    "client": {"core", "_proto", "bearer", "chunks", "wire_codecs", "huge_pages", "native"} | EDGE,
    "worker": {"core", "client", "kernels"} | EDGE,
    "integrations": {"core", "client", "events"} | EDGE,
    "cli": {"core", "policies", "client", "_proto"} | EDGE,
    "testing": {"core", "client"} | EDGE,
}
"""Part -> the parts that it may import."""

BUILDERS: dict[str, set[str]] = {
    "tiers/cuda.py": {"gpu"},  # over the GPU process, which knows of tiers how they sum
    "tiers/direct.py": {"gpu"},
    "tiers/slabs.py": {"gpu"},
    # It stands beside the tiers: of theirs it knows how files are mapped and what names the checksums.
    "gpu/hosts.py": {"tiers"},
    "gpu/sums.py": {"tiers"},
    "client/device.py": {"kernels"},  # NVIDIA's driver by its bindings, and no kernel
    "server/lifecycle.py": {"policies", "mover"},
    "server/assembly.py": {"policies", "mover"},
    "server/learned.py": {"policies"},  # it keeps what the learner of reuse knows
    "cli/daemon.py": {"server", "logs"},
    "cli/leftovers.py": {"server", "tiers"},
    "cli/fsck.py": {"server", "tiers"},  # what a daemon keeps, read while none runs
    # Paged caches are tables of the worker's pages under the paged kernel.
    "integrations/transformers/attention.py": {"kernels", "worker"},
    "integrations/transformers/paged.py": {"worker"},
    "integrations/transformers/store.py": {"worker"},
    "cli/advice.py": {"integrations"},  # which versions of engines were run
    "cli/conversation.py": {"worker"},
    "cli/simulate.py": {"simulator"},
    "cli/trace.py": {"simulator"},
    "cli/replay.py": {"simulator"},
    "cli/demo.py": {"worker", "testing", "kernels"},
    "simulator/sizes.py": {"server"},  # tiers as a daemon makes them
}
"""The modules that put parts together, and what they may see beyond their part's row."""

FOREIGN: dict[str, set[str]] = {
    "core": {"numpy"},
    "policies": {"numpy"},
    "client": {"numpy", "grpc", "google", "msgpack", "xxhash", "array_api_compat"},
    "errors": set(),
    "places": set(),
    "trust": set(),
    "units": set(),
    "clock": set(),
    "bearer": set(),
    "chunks": set(),
    "wire_codecs": {"numpy", "lz4"},
    "huge_pages": set(),
    "native": set(),
    "notify": set(),
}
"""Part -> the packages beyond the standard library that it may import; a part that is not listed may use any."""

GPU_TIERS = {"checksum", "mapping"}
"""The modules of tiers that the GPU process may use; they know nothing of it, nor of tiers."""

CLIENT_CORE = {"block", "directory", "layout", "meta", "model", "sets", "versions", "words"}
"""The modules of core that the SDK may use: identity, dtypes, and how what it maps is laid out and read."""


def parts_imported(module: Module) -> set[str]:
    names = (name.split(".") for name in imports(module.tree))
    return {name[1] for name in names if name[0] == "tierd" and len(name) > 1} - {module.part}


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_down_only(module: Module) -> None:
    """A module imports only what its part may know."""
    if module.name == "__init__.py":
        assert parts_imported(module) == set()
        return
    beyond = parts_imported(module) - PARTS[module.part] - BUILDERS.get(module.name, set())
    assert not beyond, f"tierd/{module.name} must not know {', '.join(sorted(beyond))}"


@pytest.mark.parametrize("part", FOREIGN)
def test_foreign_packages_stay_where_they_belong(part: str) -> None:
    """The pure parts and the SDK import only the packages that their row names."""
    names = {name.split(".")[0] for module in modules() if module.part == part for name in imports(module.tree)}
    assert names - set(sys.stdlib_module_names) - {"tierd"} <= FOREIGN[part]


@pytest.mark.parametrize(
    "module", [module for module in modules() if module.part == "client"], ids=lambda module: module.name
)
def test_sdk_uses_only_identity_and_dtypes_of_core(module: Module) -> None:
    """The SDK knows block hashes and the values on the wire, nothing of how the daemon decides."""
    used = {name.split(".")[2] for name in imports(module.tree) if name.startswith("tierd.core.")}
    assert used <= CLIENT_CORE


def test_gpu_process_knows_no_tier() -> None:
    """It maps files and names checksums as the tiers do, and knows nothing else of them."""
    names = {name for module in modules() if module.part == "gpu" for name in imports(module.tree)}
    assert {name.split(".")[2] for name in names if name.startswith("tierd.tiers.")} <= GPU_TIERS


BARRIER = ("core/words.py", "threading")
"""A lock's acquire and release are the memory barriers of words.py."""


def test_core_has_no_clock_no_chance_and_no_loop() -> None:
    """Core and policies import nothing that waits, tells the time or rolls dice."""
    banned = {"time", "random", "asyncio", "threading", "socket", "os", "secrets", "datetime"}
    names = {
        (module.name, name.split(".")[0])
        for module in modules()
        if module.part in ("core", "policies")
        for name in imports(module.tree)
    }
    assert {pair for pair in names if pair[1] in banned} <= {BARRIER}


def test_sdk_import_is_light() -> None:
    """`import tierd.client` brings in no torch, no pydantic, no terminal, no codec and no part of the daemon."""
    program = "import sys, tierd.client; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "pydantic",
        "rich",
        "click",
        "structlog",
        "lz4",
        "tierd.config",
        "tierd.server",
        "tierd.core.core",
    }
    assert heavy.isdisjoint(loaded)
