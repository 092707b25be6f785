"""Engines: installed versions, whether they can load tierd, and the seed of their block hashes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from tierd.doctor.check import Check, Host
from tierd.errors import Unsupported
from tierd.integrations.versions import WINDOWS, check_version, has_run

SEED = "PYTHONHASHSEED"
SEEDED = "vllm"
"""The engine whose hashes of the xxhash kind begin with random bytes, unless the seed is set."""
SEEDLESS = "xxhash"


def check_engines(host: Host) -> Iterator[Check]:
    """All checks of this module: of engines in this environment, and of running ones."""
    found = {name: version for name in WINDOWS if (version := installed(name))}
    if not found:
        yield Check("engines", "skipped", "none is installed in this environment")
    for name, version in found.items():
        yield check_engine(name, version)
    running = dict(running_engines(host))
    for pid, (seed, is_seedless) in running.items():
        yield check_seed(f"{SEEDED} of pid {pid}", seed, is_seedless=is_seedless)
    if SEEDED in found and not running:
        yield check_seed("this environment", host.environ.get(SEED, ""))


def installed(name: str) -> str:
    """The version in this Python environment; "" without."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_engine(name: str, version: str) -> Check:
    """A version against the window of this release."""
    try:
        check_version(name, version)
    except Unsupported as error:
        fault, _, remedy = str(error).rpartition("; ")
        return Check(f"engines.{name}", "failure", fault, f"{name} cannot use tierd", remedy)
    ran = ", ".join(WINDOWS[name].ran)
    if not has_run(name, version):
        return Check(
            f"engines.{name}",
            "note",
            f"{name} {version}; the tests of this release ran on {ran}",
            "it should work, but nobody has tried",
            "nothing is needed; or install a tested version",
        )
    return Check(f"engines.{name}", "ok", f"{name} {version}")


def running_engines(host: Host) -> Iterator[tuple[int, tuple[str, bool]]]:
    """Process ids of running vLLM servers, their seed, and whether their command line names hashes
    of the xxhash kind; of processes that may be read."""
    for path in host.matching("/proc", "[0-9]*"):
        words = host.read(f"/proc/{path.name}/cmdline").split("\0")
        if any(word.rpartition("/")[2] == SEEDED for word in words[:3]):
            held = host.read(f"/proc/{path.name}/environ").split("\0")
            if held != [""]:
                seed = dict(word.partition("=")[::2] for word in held).get(SEED, "")
                yield int(path.name), (seed, any(SEEDLESS in word for word in words))


def check_seed(whose: str, seed: str, *, is_seedless: bool = False) -> Check:
    """The seed of an engine's process. "random" is as none. is_seedless: the engine needs one."""
    if seed in ("", "random"):
        return Check(
            "engines.hash-seed",
            "warning" if is_seedless else "note",
            f"{SEED} is not set for {whose}",
            "with vLLM's hash algorithms of the xxhash kind, no process finds another's blocks",
            f"take --prefix-caching-hash-algo sha256_cbor, or export {SEED}=0 for all engines before they start",
        )
    return Check("engines.hash-seed", "ok", f"{SEED}={seed} for {whose}")
