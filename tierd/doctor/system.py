"""Kernel, Python, limits, clock, NUMA nodes, and the daemon's directories."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tierd import places
from tierd.config import Config
from tierd.doctor.check import Check, Host, existing, unwritable
from tierd.linux import kernel
from tierd.linux.trust import find_stranger

LEAST_DESCRIPTORS = 4096
"""A client has a connection and an event, a segment one descriptor, gRPC a few for each."""
FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
"""Clock sources that are read without a call of the kernel."""
PACKAGES = ("tierd", "grpcio", "protobuf", "numpy")


def check_system(config: Config, host: Host) -> Iterator[Check]:
    """All checks of this module."""
    yield check_kernel(host)
    yield Check("versions", "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    yield check_descriptors()
    yield check_locked_memory(config)
    yield check_clock(host)
    yield check_numa(config, host)
    for name, directory in (("runtime_dir", config.server.runtime_dir), ("state_dir", config.server.state_dir)):
        yield check_directory(f"server.{name}", directory)


def check_kernel(host: Host) -> Check:
    """The kernel's release."""
    release = host.read("/proc/sys/kernel/osrelease")
    numbers = kernel.release_of(release)
    least = ".".join(map(str, kernel.LEAST))
    if numbers < kernel.LEAST:
        return Check(
            "kernel", "failure", f"Linux {release}", "`tierd serve` refuses to start", f"boot Linux {least} or newer"
        )
    if numbers < (6, 5):
        return Check(
            "kernel",
            "note",
            f"Linux {release}",
            "clients in containers with a pid namespace of their own are refused",
            "boot Linux 6.5 or newer, or share the pid namespace",
        )
    return Check("kernel", "ok", f"Linux {release}")


def check_descriptors() -> Check:
    """RLIMIT_NOFILE of this process; a unit has its own. The daemon raises the soft limit to the
    hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        return Check(
            "nofile",
            "warning",
            f"{most} open files at most for this process",
            "with many sessions or segments the daemon refuses clients",
            f"raise the hard limit to {LEAST_DESCRIPTORS} or more: LimitNOFILE= of the unit, or ulimit -Hn",
        )
    return Check("nofile", "ok", "no limit" if most == resource.RLIM_INFINITY else f"{most} open files at most")


def check_locked_memory(config: Config) -> Check:
    """RLIMIT_MEMLOCK, which counts for memory that a GPU's driver registers."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if most == resource.RLIM_INFINITY else f"{most >> 20} MiB locked at most by this process"
    wanted = sum(tier.capacity for tier in config.host)
    if not any(device.kind == "cuda" for device in config.device):
        return Check("memlock", "skipped", f"{found}; no GPU is configured")
    if most != resource.RLIM_INFINITY and most < wanted:
        return Check(
            "memlock",
            "warning",
            found,
            f"the {wanted >> 20} MiB of the host tier cannot be registered, so copies to the GPU are slower",
            "set LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
        )
    return Check("memlock", "ok", found)


def check_clock(host: Host) -> Check:
    """The kernel's clock source. Every call of the data plane reads the clock."""
    source = host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        return Check("clock", "skipped", "the kernel names no clock source")
    if source not in FAST_CLOCKS:
        return Check(
            "clock",
            "warning",
            f"clock source {source}",
            "reading the clock takes microseconds instead of nanoseconds, in every call",
            "find out from dmesg why tsc was given up; boot with tsc=reliable if the machine is sound",
        )
    return Check("clock", "ok", f"clock source {source}")


def check_numa(config: Config, host: Host) -> Check:
    """Nodes of memory against host tiers."""
    nodes = [path.name for path in host.matching("/sys/devices/system/node", "node[0-9]*")]
    if len(nodes) > 1 and len(config.host) == 1 and not config.host[0].arena_dir:
        return Check(
            "numa",
            "note",
            f"{len(nodes)} nodes, one host tier",
            "clients on the other nodes copy through the link between sockets",
            "mount a tmpfs for each node (mpol=bind:N) and give each a [[host]] table with its arena_dir",
        )
    return Check("numa", "ok", f"{max(1, len(nodes))} node{'s' if len(nodes) > 1 else ''}")


def check_directory(name: str, directory: str) -> Check:
    """A directory that the daemon makes or uses: it must be writable, and no other user's."""
    path = Path(directory)
    stranger = find_stranger(path)
    if stranger:
        return Check(
            name,
            "failure",
            f"{directory}: {stranger} is on the way",
            "`tierd serve` refuses to start, since that user could replace its files",
            f"remove it, or set {name} to a directory of your own",
        )
    if fault := unwritable(name, name, existing(path)):
        return fault
    socket = os.fsencode(os.path.join(directory, places.SESSION_SOCKET_NAME))
    return Check(name, "ok", f"{directory} ({len(socket)} of {places.SOCKET_PATH_MAX_BYTES} bytes of a socket's path)")
