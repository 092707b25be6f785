"""Namespaces and trust domains, by id and by content.

The registry turns (tenant, spec) into stable ids and bumps epochs. It stores nothing: `records` and
`restore` are plain bytes. An id is given once and keeps its meaning. Of the epochs of one (tenant,
spec) only the last is current.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import kinds
from tierd.core.formats.block import KVGeometry, Namespace, NamespaceSpec, bumped, namespace_digest
from tierd.errors import CorruptRecord, InvalidArgument, NotFound, Overloaded, SessionLost

TENANT_LIMIT = 4096
"""Namespaces of one tenant, ranks counted, past epochs included."""
NAMESPACE_LIMIT = 65_536
"""Of all tenants together."""


class NamespaceRegistry:
    """All namespaces of an instance. Ids count from 1; a namespace of R ranks takes R consecutive ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, Namespace] = {}  # every rank's id -> its namespace
        self._records: list[bytes] = []  # every open of a new one returns all, and JSON takes long
        self._current: dict[tuple[str, NamespaceSpec], Namespace] = {}
        self._past: set[int] = set()  # ids of ended epochs: hashing a spec takes long, and every call needs this
        self._domains: dict[str, int] = {}
        self._of_tenant: Counter[str] = Counter()  # ids
        self._next_id = 1

    def domain_of(self, tenant: str) -> int:
        """The trust domain of a tenant, from 1; made on first use."""
        return self._domains.setdefault(tenant, max(self._domains.values(), default=0) + 1)

    def keep_domain(self, tenant: str, domain: int) -> None:
        """Restores a tenant's domain from the previous run, before any new one is made."""
        self._domains.setdefault(tenant, domain)

    def open(self, spec: NamespaceSpec, *, tenant: str) -> tuple[Namespace, bool]:
        """The current namespace of this spec, and whether it is new. Raises InvalidArgument, Overloaded."""
        found = self._current.get((tenant, spec.checked()))
        if found is not None:
            return found, False
        spec.check_texts()
        self._check_tenant(tenant, spec.rank_count)
        namespace = Namespace(
            id=self._next_id,
            tenant=tenant,
            domain=self.domain_of(tenant),
            epoch=1,
            digest=namespace_digest(spec, tenant=tenant, epoch=1),
            spec=spec,
        )
        self._add(namespace)
        return namespace, True

    def get(self, namespace_id: int) -> Namespace:
        """The namespace that this id, of any rank, belongs to. Raises NotFound."""
        namespace = self._by_id.get(namespace_id)
        if namespace is None:
            raise NotFound(
                f"namespace {namespace_id}: not known to this daemon; open it with OpenNamespace, "
                "`tierctl namespaces` lists all"
            )
        return namespace

    def named(self, namespace_id: int, digest: bytes) -> Namespace:
        """The namespace with this rank-0 id and digest. The id may come from another registry;
        digests are equal in all. Raises SessionLost."""
        namespace = self._by_id.get(namespace_id)
        if namespace is None or namespace.id != namespace_id or namespace.digest != digest:
            raise SessionLost(
                f"namespace {namespace_id}: this daemon has another one of that id, or none; open it again"
            )
        return namespace

    def layers_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Layers of a block in each of these namespaces: [n]. Raises NotFound."""
        return self._each(ids, lambda namespace: namespace.spec.geometry.layers)

    def tokens_per_block_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Tokens of a full block in each of these namespaces: [n]. Raises NotFound."""
        return self._each(ids, lambda namespace: namespace.spec.tokens_per_block)

    def epochs_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Epoch of each of these namespaces: [n]. Raises NotFound."""
        return self._each(ids, lambda namespace: namespace.epoch)

    def domains_of(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Trust domain of each of these namespaces: [n]. Raises NotFound."""
        return self._each(ids, lambda namespace: self.domain_of(namespace.tenant))

    def _each(self, ids: NDArray[np.uint32], what: Callable[[Namespace], int]) -> NDArray[np.uint32]:
        out = np.zeros(len(ids), np.uint32)
        for one in kinds(ids):
            out[ids == one] = what(self.get(one))
        return out

    def is_current(self, namespace: Namespace) -> bool:
        """Whether no later epoch has begun."""
        return namespace.id not in self._past

    def check_bumps(self, ending: Iterable[Namespace]) -> None:
        """Raises Overloaded if one more epoch of each exceeds the limit of ids of a tenant or of
        all."""
        more = Counter[str]()
        for namespace in ending:
            more[namespace.tenant] += namespace.spec.rank_count
        self._check_room(more.total())
        for tenant, count in more.items():
            self._check_tenant(tenant, count)

    def _check_room(self, count: int) -> None:
        if len(self._by_id) + count > NAMESPACE_LIMIT:
            raise Overloaded(f"namespaces: {NAMESPACE_LIMIT} exist, the limit; reuse one, or purge the instance")

    def bump(self, namespace: Namespace) -> Namespace:
        """Begins the next epoch and returns it."""
        self._check_tenant(namespace.tenant, namespace.spec.rank_count)
        following = bumped(namespace, namespace_id=self._next_id)
        self._add(following)
        return following

    def _check_tenant(self, tenant: str, count: int) -> None:
        has = self._of_tenant[tenant]
        if has + count > TENANT_LIMIT:
            raise Overloaded(f"namespaces: tenant {tenant} has {has}, the limit is {TENANT_LIMIT}; reuse one")

    def all(self) -> list[Namespace]:
        """Every namespace, past epochs included, by id."""
        return list({n.id: n for n in self._by_id.values()}.values())

    def current(self, *, model: str | None = None) -> list[Namespace]:
        """The namespaces whose epoch is running, of one model or of all."""
        return [n for n in self._current.values() if model is None or n.spec.model == model]

    def records(self) -> list[bytes]:
        """One self-contained JSON record per namespace, in order of creation."""
        return list(self._records)

    def restore(self, records: Iterable[bytes]) -> None:
        """Takes in namespaces of the previous run, if unknown. Raises CorruptRecord if two
        disagree."""
        for namespace in sorted(map(namespace_from_record, records), key=lambda n: n.id):
            known = self._by_id.get(namespace.id)
            if known is None:
                self.keep_domain(namespace.tenant, namespace.domain)
                self._add(namespace)
            elif known != namespace:
                raise CorruptRecord(
                    f"namespace {namespace.id}: two records disagree ({known.tenant}/{known.spec.model} and "
                    f"{namespace.tenant}/{namespace.spec.model}); remove the store that belongs to another daemon"
                )

    def _add(self, namespace: Namespace) -> None:
        self._check_room(namespace.spec.rank_count)
        self._of_tenant[namespace.tenant] += namespace.spec.rank_count
        self._records.append(namespace_record(namespace))
        for namespace_id in namespace.ids:
            self._by_id[namespace_id] = namespace
        self._next_id = max(self._next_id, namespace.ids.stop)
        key = (namespace.tenant, namespace.spec)
        known = self._current.get(key)
        if known is None or known.epoch < namespace.epoch:
            self._current[key] = namespace
            self._past |= {known.id} if known is not None else set()
        else:
            self._past.add(namespace.id)


def namespace_record(namespace: Namespace) -> bytes:
    """The full text of every field, canonical JSON."""
    given = asdict(namespace) | {"digest": namespace.digest.hex(), "spec": namespace.spec.fields()}
    return json.dumps(given, sort_keys=True, separators=(",", ":")).encode()


@lru_cache(maxsize=1024)  # every tier and the state directory hold the same records
def namespace_from_record(record: bytes) -> Namespace:
    """The inverse of namespace_record. Raises CorruptRecord."""
    try:
        given = json.loads(record)
        spec = given.pop("spec")
        geometry = KVGeometry(**spec.pop("geometry"))
        digest = bytes.fromhex(given.pop("digest"))
        namespace = Namespace(**given, digest=digest, spec=NamespaceSpec(**spec, geometry=geometry))
        _check_types(namespace)
    except (ValueError, TypeError, KeyError, AttributeError, InvalidArgument, RecursionError) as error:
        raise CorruptRecord(f"namespace record: {error}; it is dropped with the blocks that need it") from error
    if namespace_digest(namespace.spec, tenant=namespace.tenant, epoch=namespace.epoch) != namespace.digest:
        raise CorruptRecord(f"namespace {namespace.id}: its digest does not match its text; it is dropped")
    return namespace


def _check_types(namespace: Namespace) -> None:
    """Checks types and bounds, which JSON does not have. Raises ValueError, InvalidArgument."""
    for part in (namespace, namespace.spec.checked(), namespace.spec.geometry):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.type in ("int", "str") and type(value).__name__ != field.type:
                raise ValueError(f"{field.name} is {value!r:.40}, not {field.type}")
            if isinstance(value, int) and not 0 <= value < 1 << 32:
                raise ValueError(f"{field.name} is {value}, outside 0 to {(1 << 32) - 1}")
