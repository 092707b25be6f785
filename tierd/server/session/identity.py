"""Identifies clients by the kernel's data of their process, or by a credential.

One function maps peer and credential to an identity, for every kind of connection. A request never
names its tenant. A credential names a tenant and never makes an operator. A wrong credential is
refused, not ignored.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierd.errors import ConfigError, NotPermitted

TENANT_MAX_BYTES = 64
"""The length of the session table's field."""

CREDENTIAL_LEAST_CHARS = 16
"""A shorter secret could be guessed."""

_LINE = re.compile(r"(?P<tenant>\S+)\s+(?P<credential>\S+)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as the kernel knows it. start_time: clock ticks since boot (/proc/<pid>/stat)."""

    pid: int
    uid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a caller. domain: the tenant's trust domain. is_admin: root or the daemon's
    own user, without a credential."""

    uid: int
    pid: int
    tenant: str
    domain: int
    is_admin: bool


def _foreign_uid() -> int:
    """The kernel's placeholder for a uid that a user namespace does not map."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


@dataclass(frozen=True)
class IdentityRules:
    """The configuration's rules. credentials: tenant to secret. owner: uid of the daemon."""

    tenants: Mapping[int, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict)
    owner: int = field(default_factory=os.geteuid)
    foreign_uid: int = field(default_factory=_foreign_uid)


def identify(peer: Peer, *, credential: str | None, rules: IdentityRules, domain_of: Callable[[str], int]) -> Identity:
    """The identity of a process. domain_of: the trust domain of a tenant. Raises NotPermitted."""
    if credential is not None:
        tenant = _tenant_of_credential(credential, rules)
        return Identity(peer.uid, peer.pid, tenant, domain_of(tenant), is_admin=False)
    tenant = rules.tenants.get(peer.uid, "")
    if not tenant and peer.uid == rules.foreign_uid:
        raise NotPermitted(
            f"session: uid {peer.uid} stands for every user that this daemon's user namespace does not map; run both in one"
            " user namespace, or give the client a credential (identity.credential_file)"
        )
    tenant = tenant or f"uid-{peer.uid}"
    return Identity(peer.uid, peer.pid, tenant, domain_of(tenant), is_admin=peer.uid in (0, rules.owner))


def load_rules(tenants: Mapping[int, str], credential_file: str = "") -> IdentityRules:
    """The rules of a configuration. Raises ConfigError. The credential file has `tenant credential`
    lines; # begins a comment."""
    for uid, tenant in tenants.items():
        _check_tenant(tenant, where=f"identity.tenants[{uid}]")
    return IdentityRules(
        tenants=dict(tenants), credentials=_read_credentials(credential_file) if credential_file else {}
    )


def _tenant_of_credential(credential: str, rules: IdentityRules) -> str:
    """Compares with every secret in constant time, so the time reveals nothing."""
    given = credential.encode()
    found = ""
    for tenant, secret in rules.credentials.items():
        if hmac.compare_digest(secret.encode(), given):
            found = tenant
    if not found:
        raise NotPermitted(
            "session: the credential is not in the daemon's identity.credential_file; correct it there or in the client,"
            " or send none to be known by uid"
        )
    return found


def _read_credentials(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"identity.credential_file: {path} cannot be read ({error}); create it with mode 0600"
        ) from error
    credentials: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"identity.credential_file: {path}, line {number}"
        tenant, credential = _credential(text, where=where)
        if tenant in credentials or credential in credentials.values():
            raise ConfigError(f"{where}: the tenant or the credential is repeated; give each tenant one of its own")
        credentials[tenant] = credential
    return credentials


def _credential(text: str, *, where: str) -> tuple[str, str]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: not `tenant credential`; write two words")
    _check_tenant(match["tenant"], where=where)
    if len(match["credential"]) < CREDENTIAL_LEAST_CHARS:
        raise ConfigError(
            f"{where}: the credential has {len(match['credential'])} characters, below {CREDENTIAL_LEAST_CHARS};"
            " make one with `openssl rand -hex 32`"
        )
    return match["tenant"], match["credential"]


def _check_tenant(tenant: str, *, where: str) -> None:
    size = len(tenant.encode())
    if not 1 <= size <= TENANT_MAX_BYTES:
        raise ConfigError(
            f"{where}: the tenant's name has {size} bytes, outside 1 to {TENANT_MAX_BYTES}; choose another"
        )
