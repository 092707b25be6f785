"""The registry of namespaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierd.core.formats import block
from tierd.core.formats.block import TEXT_LIMIT, KVGeometry, NamespaceSpec, namespace_digest
from tierd.core.index import namespaces
from tierd.core.index.namespaces import NamespaceRegistry, namespace_from_record, namespace_record
from tierd.errors import CorruptRecord, InvalidArgument, NotFound, Overloaded, SessionLost

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096, rank_count=2)


def test_same_spec_gives_same_ids() -> None:
    """Opening a spec twice gives one namespace."""
    registry = NamespaceRegistry()
    first, is_new = registry.open(SPEC, tenant="a")
    assert is_new and registry.open(SPEC, tenant="a") == (first, False)


def test_ranks_take_consecutive_ids() -> None:
    """Every rank's id leads to its namespace, and the next namespace begins after the last."""
    registry = NamespaceRegistry()
    first, _ = registry.open(SPEC, tenant="a")
    other, _ = registry.open(NamespaceSpec(model="n", tokens_per_block=16, block_bytes=1), tenant="a")
    assert list(first.ids) == [1, 2] and other.id == 3
    assert registry.get(2) is first


def test_an_id_with_its_digest() -> None:
    """`named` needs the digest and the first rank's id, because another registry may reuse the id."""
    registry = NamespaceRegistry()
    first, _ = registry.open(SPEC, tenant="a")
    other, _ = registry.open(SPEC, tenant="b")
    assert registry.named(first.id, first.digest) is first and registry.named(other.id, other.digest) is other
    for number, digest in ((1, other.digest), (2, first.digest), (99, other.digest), (1, b"x")):
        with pytest.raises(SessionLost):
            registry.named(number, digest)


@pytest.mark.parametrize("field", ["model", "weights_digest", "adapter", "group", "salt", "codec"])
def test_every_text_field_is_part_of_identity(field: str) -> None:
    """Changing any text of a spec gives another digest."""
    registry = NamespaceRegistry()
    one, _ = registry.open(SPEC, tenant="a")
    other, _ = registry.open(
        NamespaceSpec(**({"model": "m", "tokens_per_block": 16, "block_bytes": 4096, field: "x"})), tenant="a"
    )
    assert one.digest != other.digest


def test_tenants_share_nothing() -> None:
    """The same spec of two tenants has two ids, two digests and two domains."""
    registry = NamespaceRegistry()
    one, _ = registry.open(SPEC, tenant="a")
    other, _ = registry.open(SPEC, tenant="b")
    assert {one.id} & set(other.ids) == set() and one.digest != other.digest and one.domain != other.domain


def test_bump_ends_the_old_epoch() -> None:
    """After a bump the old namespace is not current, and opening the spec gives the new one."""
    registry = NamespaceRegistry()
    old, _ = registry.open(SPEC, tenant="a")
    new = registry.bump(old)
    assert not registry.is_current(old) and registry.open(SPEC, tenant="a") == (new, False)
    assert new.digest != old.digest and new.epoch == old.epoch + 1


def test_records_restore_everything() -> None:
    """A registry restored from records has the same namespaces, epochs and domains, and new ids."""
    registry = NamespaceRegistry()
    old, _ = registry.open(SPEC, tenant="a")
    registry.bump(old)
    registry.open(SPEC, tenant="b")
    again = NamespaceRegistry()
    again.restore(registry.records())
    assert again.all() == registry.all() and again.current() == registry.current()
    fresh, _ = again.open(NamespaceSpec(model="n", tokens_per_block=1, block_bytes=1), tenant="c")
    assert fresh.id == max(i for n in registry.all() for i in n.ids) + 1
    assert fresh.domain not in {n.domain for n in registry.all()}


def test_an_older_epoch_that_is_restored_later_is_past() -> None:
    """Stores restore their records in any order, and the newest epoch is current."""
    registry = NamespaceRegistry()
    old, _ = registry.open(SPEC, tenant="a")
    new = registry.bump(old)
    again = NamespaceRegistry()
    again.restore([namespace_record(new)])
    again.restore([namespace_record(old)])
    assert (again.is_current(old), again.is_current(new)) == (False, True)
    assert again.open(SPEC, tenant="a") == (new, False)


def test_record_round_trip() -> None:
    """A record gives back its namespace."""
    namespace, _ = NamespaceRegistry().open(SPEC, tenant="a")
    assert namespace_from_record(namespace_record(namespace)) == namespace


def test_changed_record_is_refused() -> None:
    """A record whose text was changed does not pass for another namespace."""
    namespace, _ = NamespaceRegistry().open(SPEC, tenant="a")
    with pytest.raises(CorruptRecord):
        namespace_from_record(namespace_record(namespace).replace(b'"model":"m"', b'"model":"n"'))


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"null", b'{"spec":3}', b"\xff"])
def test_garbage_record_is_refused(record: bytes) -> None:
    """Bytes that are no record raise CorruptRecord, and no other error."""
    with pytest.raises(CorruptRecord):
        namespace_from_record(record)


def test_impossible_spec_is_refused() -> None:
    """A spec that no block can have is InvalidArgument and registers nothing."""
    registry = NamespaceRegistry()
    with pytest.raises(InvalidArgument):
        registry.open(NamespaceSpec(model="m", tokens_per_block=0, block_bytes=1), tenant="a")
    with pytest.raises(NotFound):
        registry.get(1)


@pytest.mark.parametrize("field", ["model", "weights_digest", "adapter", "group", "salt"])
def test_text_of_a_spec_is_bounded(field: str) -> None:
    """Every store keeps each spec, so the registry bounds the text of a spec."""
    registry = NamespaceRegistry()
    assert registry.open(replace(SPEC, **{field: "x" * TEXT_LIMIT}), tenant="a")[1]
    with pytest.raises(InvalidArgument, match=f"namespace.{field}: 4097 characters, the limit is 4096"):
        registry.open(replace(SPEC, **{field: "x" * (TEXT_LIMIT + 1)}), tenant="a")


def test_longer_text_that_was_kept_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace older than the text limit is restored, and opens."""
    spec = replace(SPEC, model="x" * (TEXT_LIMIT + 1))
    with monkeypatch.context() as before:
        before.setattr(block, "TEXT_LIMIT", TEXT_LIMIT + 1)
        old = NamespaceRegistry()
        namespace, _ = old.open(spec, tenant="a")
    registry = NamespaceRegistry()
    registry.restore(old.records())
    assert registry.open(spec, tenant="a") == (namespace, False)


def test_no_tenant_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant at its limit opens and bumps nothing new, keeps its own, and blocks no other.
    The registry always restores stored records."""
    monkeypatch.setattr(namespaces, "TENANT_LIMIT", 4)
    registry = NamespaceRegistry()
    first, _ = registry.open(SPEC, tenant="a")
    registry.bump(first)
    with pytest.raises(Overloaded, match="tenant"):
        registry.bump(first)
    with pytest.raises(Overloaded, match="tenant"):
        registry.open(replace(SPEC, model="n"), tenant="a")
    assert not registry.open(SPEC, tenant="a")[1]
    assert registry.open(SPEC, tenant="b")[1]
    monkeypatch.setattr(namespaces, "TENANT_LIMIT", 1)
    again = NamespaceRegistry()
    again.restore(registry.records())
    assert again.all() == registry.all()


OLDER = NamespaceSpec(
    model="llama",
    tokens_per_block=32,
    block_bytes=8192,
    weights_digest="a",
    adapter="b",
    group="c",
    salt="d",
    rank_count=3,
    geometry=KVGeometry(2, 4, 8, "bfloat16", "HND"),
)
OLDER_RECORD = (
    b'{"digest":"f5b56983263fef02cc7f939f2209187ac6538759bb3721d3b935155736416688","domain":1,"epoch":1,"id":1,"spec":'
    b'{"adapter":"b","block_bytes":8192,"geometry":{"dtype":"bfloat16","head_dim":8,"kv_heads":4,"layers":2,"layout":'
    b'"HND"},"group":"c","model":"llama","rank_count":3,"salt":"d","tokens_per_block":32,"weights_digest":"a"},'
    b'"tenant":"t"}'
)
"""As written before namespaces had a codec."""


def test_digests_and_records_are_those_of_before_codecs() -> None:
    """Without a codec, digest and record equal those that earlier releases wrote; both are read."""
    assert namespace_digest(SPEC, tenant="t", epoch=2).hex().startswith("d35bfb80cd81c4139815bd51fcaca3b0")
    assert namespace_digest(OLDER, tenant="t", epoch=2).hex().startswith("5f2ea357bffc1a982e76a6ac38fa19be")
    namespace, _ = NamespaceRegistry().open(OLDER, tenant="t")
    assert namespace_record(namespace) == OLDER_RECORD
    assert namespace_from_record(OLDER_RECORD) == namespace


def test_a_record_has_the_codec() -> None:
    """A namespace with a codec is the same after its record was written and read."""
    namespace, _ = NamespaceRegistry().open(replace(OLDER, codec="transform-1@" + "0f" * 16), tenant="t")
    assert namespace_from_record(namespace_record(namespace)) == namespace


@pytest.mark.parametrize(
    "codec", ["Rot", "rot 4", "rot@", "rot@0f", "@" + "0f" * 16, "rot@" + "0F" * 16, "x" * 65, "-", "a\n"]
)
def test_a_codec_has_the_form_of_a_name(codec: str) -> None:
    """A codec is a name, perhaps with the hash of a calibration; the error names the form."""
    with pytest.raises(InvalidArgument, match=r"namespace\.codec: .*NAME@HASH"):
        NamespaceRegistry().open(replace(SPEC, codec=codec), tenant="t")
