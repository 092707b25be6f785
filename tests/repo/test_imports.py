"""Imports go down only: each part imports only the parts of its row."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.repo.source import PACKAGE, Module, imports, modules

EDGE = {"errors", "config", "units", "places", "pictures", "clock", "failpoint", "linux"}
"""Every part may use these, besides core."""

PARTS: dict[str, set[str]] = {
    "errors": set(),
    "failpoint": {"errors"},
    "units": set(),
    "places": set(),
    "pictures": {"errors"},
    "clock": set(),
    "native": set(),
    "linux": {"errors", "failpoint"},
    "checksum": {"core", "errors"},
    "tcp": {"errors"},
    "exposition": set(),
    "http_server": set(),
    "metrics": {"exposition", "http_server"},
    "call_context": set(),
    "logs": {"call_context"},
    "tracing": {"call_context", "errors"},
    "tier_settings": {"core", "units"},
    "settings": {"core", "tier_settings", "units"},
    "config": {"core", "errors", "places", "settings", "tier_settings", "units"},
    "live_settings": {"config", "errors", "settings", "units"},
    "core": {"errors"},
    "policies": {"core", "errors"},
    "ceiling": {"core", "policies"},
    "simulator": {"core", "policies", "config", "errors", "pictures", "units"},
    "kernels": {"core"} | EDGE,
    "codecs": {"core", "checksum", "native"} | EDGE,
    "store_codecs": {"core", "codecs", "checksum"} | EDGE,
    "gpu": {"core", "kernels", "checksum"} | EDGE,
    "tiers": {"core", "checksum", "native"} | EDGE,
    "encoded_copies": {"core", "codecs", "store_codecs", "tiers", "checksum"} | EDGE,
    "loads_by_layer": {"core", "tiers", "checksum"} | EDGE,
    "mover": {"core", "store_codecs", "encoded_copies", "loads_by_layer", "tiers", "tracing", "checksum"} | EDGE,
    "advisor": set(),
    "decisions": {"core"},
    "cache": {
        "core",
        "advisor",
        "decisions",
        "store_codecs",
        "policies",
        "mover",
        "loads_by_layer",
        "tiers",
        "metrics",
        "logs",
        "tracing",
        "checksum",
    }
    | EDGE,
    "events": {"core", "cache", "_proto"} | EDGE,
    "page": {"core", "cache", "metrics", "_proto"} | EDGE,
    "server": {
        "core",
        "advisor",
        "codecs",
        "store_codecs",
        "cache",
        "decisions",
        "events",
        "page",
        "tiers",
        "_proto",
        "tcp",
        "metrics",
        "logs",
        "call_context",
        "tracing",
        "checksum",
        "live_settings",
    }
    | EDGE,
    "client": {"core", "advisor", "_proto", "tcp", "tracing", "native"} | EDGE,
    "worker": {"core", "client", "codecs", "kernels"} | EDGE,
    "quality": {"core", "codecs", "worker"} | EDGE,
    "integrations": {"core", "client", "codecs", "events", "native"} | EDGE,
    "cli": {"core", "policies", "client", "_proto"} | EDGE,
    "plan": {"core", "codecs", "simulator"} | EDGE,
    "doctor": {"core", "kernels", "tiers", "integrations"} | EDGE,
    "testing": {"core", "client"} | EDGE,
    "ttft": {"core", "advisor", "client", "testing", "loads_by_layer"} | EDGE,
}
"""Part -> the parts that it may import."""

BUILDERS: dict[str, set[str]] = {
    "tiers/device/cuda.py": {"gpu"},  # over the GPU process, which knows how tiers sum
    "tiers/device/direct.py": {"gpu"},
    "tiers/device/slabs.py": {"gpu"},
    "client/session/device.py": {"kernels"},  # NVIDIA's driver by its bindings, and no kernel
    "server/lifecycle.py": {"policies", "mover"},
    "server/assembly.py": {"policies", "mover"},
    "server/operators/ceiling.py": {"ceiling"},
    "server/operators/learned.py": {"policies"},  # it stores the state of the reuse learner
    "cli/daemon.py": {"server", "logs"},
    "cli/configuration.py": {"server", "settings"},  # it checks a file as a daemon would
    "cli/explain.py": {"decisions"},  # the names of causes
    "cli/leftovers.py": {"server", "tiers"},
    "cli/fsck.py": {"server", "tiers"},  # it reads a daemon's files while none runs
    # Paged caches are tables of the worker's pages under the paged kernel.
    "integrations/transformers/attention.py": {"kernels", "worker"},
    "integrations/transformers/paged.py": {"worker"},
    "integrations/transformers/store.py": {"worker"},
    "cli/advice.py": {"integrations"},  # the versions of engines that were run
    "cli/conversation.py": {"worker"},
    "cli/simulate.py": {"simulator"},
    "cli/stored_form.py": {"simulator", "codecs"},
    "cli/quality.py": {"quality", "codecs", "worker"},
    "cli/codecs.py": {"quality", "codecs"},
    "cli/calibrate.py": {"quality", "codecs", "worker"},
    "cli/trace.py": {"simulator"},
    "cli/replay.py": {"simulator"},
    "cli/doctor.py": {"doctor"},
    "cli/plan.py": {"plan", "simulator"},
    "cli/bench.py": {"ttft"},
    "cli/bench_report.py": {"ttft"},
    "cli/demo.py": {"worker", "testing", "kernels"},
    "cli/coded_demo.py": {"worker", "testing", "codecs"},
    "simulator/sizes.py": {"server"},  # tiers as a daemon makes them
}
"""The modules that put parts together, and their imports beyond their part's row."""

FOREIGN: dict[str, set[str]] = {
    "core": {"numpy"},
    "policies": {"numpy"},
    "ceiling": {"numpy"},
    "client": {"numpy", "grpc", "google", "msgpack", "xxhash", "array_api_compat"},
    "errors": set(),
    "places": set(),
    "units": set(),
    "clock": set(),
    "native": set(),
    "linux": {"numpy"},
    "tcp": {"numpy", "lz4"},
}
"""Part -> the packages beyond the standard library that it may import. A part that is not listed
may use any."""

CLIENT_CORE = {"formats", "arrays"}
"""The rooms of core that the SDK may use: identity, dtypes, layouts of mapped memory, number sets."""

ROOMS: dict[str, tuple[str, ...]] = {
    "core": (
        "formats",
        "arrays",
        "plan plan_builder forms admission eviction",
        "index",
        "space",
        "requests",
        "reports",
    ),
}
"""Rooms of a part from below: a module imports from its own room and those before it."""

ROOM_FILES = 12
"""Modules of a room at most."""
CROWDED = ("core", "tiers", "server", "client")
"""The parts that are divided into rooms."""
DESCRIBED = (*CROWDED, "policies")
"""The parts whose rooms have a README each."""


def parts_imported(module: Module) -> set[str]:
    names = (name.split(".") for name in imports(module.tree))
    return {name[1] for name in names if name[0] == "tierd" and len(name) > 1} - {module.part}


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_down_only(module: Module) -> None:
    """A module imports only the parts of its row."""
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
    """The SDK imports only identity, dtypes and layouts from core, and none of its decisions."""
    used = {name.split(".")[2] for name in imports(module.tree) if name.startswith("tierd.core.")}
    assert used <= CLIENT_CORE


def _floor(room: str) -> int:
    floors = [number for number, names in enumerate(ROOMS["core"]) if room in names.split()]
    return floors[0] if floors else len(ROOMS["core"])


@pytest.mark.parametrize(
    "module", [module for module in modules() if module.part == "core"], ids=lambda module: module.name
)
def test_rooms_of_core_know_only_those_below(module: Module) -> None:
    """A module of core imports from its own room and from rooms below it."""
    mine = _floor(module.name.split("/")[1].removesuffix(".py"))
    used = {name.split(".")[2] for name in imports(module.tree) if name.startswith("tierd.core.")}
    assert {room for room in used if _floor(room) > mine} == set()


@pytest.mark.parametrize("part", CROWDED)
def test_rooms_are_small(part: str) -> None:
    """No folder of the large parts has more than 12 modules."""
    folders = Counter(module.name.rpartition("/")[0] for module in modules() if module.part == part)
    assert {folder: count for folder, count in folders.items() if count > ROOM_FILES} == {}


@pytest.mark.parametrize("part", DESCRIBED)
def test_rooms_say_what_lives_there(part: str) -> None:
    """Each room has a README that names all of its modules."""
    for folder in {(PACKAGE / module.name).parent for module in modules() if module.part == part}:
        text = (folder / "README.md").read_text(encoding="utf-8")
        names = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert {name for name in names if f"`{name}`" not in text} == set(), folder


BARRIER = ("core/formats/words.py", "threading")
"""A lock's acquire and release are the memory barriers of words.py."""


def test_core_has_no_clock_no_chance_and_no_loop() -> None:
    """Core and policies import no module that waits, reads a clock or draws random numbers."""
    banned = {"time", "random", "asyncio", "threading", "socket", "os", "secrets", "datetime"}
    names = {
        (module.name, name.split(".")[0])
        for module in modules()
        if module.part in ("core", "policies")
        for name in imports(module.tree)
    }
    assert {pair for pair in names if pair[1] in banned} <= {BARRIER}


def test_sdk_import_is_light() -> None:
    """`import tierd.client` loads no torch, pydantic, terminal, codec or part of the daemon."""
    program = "import sys, tierd.client; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "pydantic",
        "rich",
        "click",
        "structlog",
        "lz4",
        "opentelemetry",
        "tierd.config",
        "tierd.server",
        "tierd.core.core",
    }
    assert heavy.isdisjoint(loaded)
