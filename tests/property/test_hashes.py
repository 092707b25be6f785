"""Chains of block hashes: their inputs, and independence of all else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.formats.block import NamespaceSpec, block_spans, fold_hashes, hash_tokens, namespace_digest

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
sizes = st.integers(1, 9)
digests = st.binary(min_size=32, max_size=32)
words = st.text(max_size=3)
spec_fields = st.fixed_dictionaries(
    {},
    optional={
        "weights_digest": words,
        "adapter": words,
        "group": words,
        "salt": words,
        "rank_count": st.integers(1, 4),
        "codec": st.sampled_from(["", "int8", "rot-4-4", "int8@" + "0" * 32]),
    },
)
owners = st.tuples(st.sampled_from("ab"), st.integers(1, 2))


def chain(tokens, digest, size, **more) -> list[bytes]:
    return [row.tobytes() for row in hash_tokens(tokens, digest=digest, tokens_per_block=size, **more)]


@given(tokens=token_lists, size=sizes, digest=digests, cut=st.integers(0, 40))
def test_a_prefix_of_the_tokens_has_a_prefix_of_the_hashes(tokens, size, digest, cut):
    """The chain of a shorter sequence begins the chain of a longer one."""
    short = chain(tokens[:cut], digest, size)
    assert chain(tokens, digest, size)[: len(short)] == short


@given(tokens=token_lists.filter(bool), size=sizes, digest=digests, data=st.data())
def test_a_changed_token_changes_its_block_and_every_later_one(tokens, size, digest, data):
    """Hashes before the changed token stay; all others change."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= 1
    before, after = chain(tokens, digest, size, with_tail=True), chain(changed, digest, size, with_tail=True)
    assert before[: at // size] == after[: at // size]
    assert not set(before[at // size :]) & set(after)


@given(tokens=token_lists, size=sizes, digest=digests, data=st.data())
def test_a_chain_goes_on_from_its_parent(tokens, size, digest, data):
    """Hashing the rest from the parent's hash gives the rest of the chain."""
    whole = chain(tokens, digest, size, with_tail=True)
    blocks = data.draw(st.integers(0, len(tokens) // size))
    parent = whole[blocks - 1] if blocks else bytes(32)
    assert chain(tokens[blocks * size :], digest, size, parent=parent, with_tail=True) == whole[blocks:]


@given(tokens=token_lists, size=sizes, digest=digests)
def test_no_two_blocks_of_a_chain_share_a_hash(tokens, size, digest):
    """Equal tokens at another place of the sequence are another block."""
    hashes = chain(tokens, digest, size, with_tail=True)
    assert len(set(hashes)) == len(hashes) == -(-len(tokens) // size)


@given(tokens=token_lists, size=st.integers(2, 9), digest=digests)
def test_a_short_block_is_not_the_full_one_that_it_becomes(tokens, size, digest):
    """The hash covers the number of tokens, and the short tail is hashed only on request."""
    full, tail = len(tokens) // size, len(tokens) % size
    assert len(chain(tokens, digest, size)) == full
    if tail:
        grown = tokens + [0] * (size - tail)
        assert chain(tokens, digest, size, with_tail=True)[-1] != chain(grown, digest, size)[-1]


@given(tokens=token_lists.filter(bool), size=sizes, one=digests, other=digests)
def test_namespaces_share_no_hash(tokens, size, one, other):
    """The same tokens under another digest have no hash in common."""
    shared = set(chain(tokens, one, size, with_tail=True)) & set(chain(tokens, other, size, with_tail=True))
    assert bool(shared) == (one == other)


@given(one=spec_fields, other=spec_fields, owner=owners, other_owner=owners)
def test_a_digest_tells_apart_whatever_differs(one, other, owner, other_owner):
    """Two digests are equal exactly if spec, tenant and epoch are."""
    specs = [NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096, **fields) for fields in (one, other)]
    made = [
        namespace_digest(spec, tenant=tenant, epoch=epoch)
        for spec, (tenant, epoch) in zip(specs, (owner, other_owner), strict=True)
    ]
    assert (made[0] == made[1]) == (specs[0] == specs[1] and owner == other_owner)


@given(st.lists(st.binary(max_size=40), max_size=8), digests, digests)
def test_folded_hashes_are_bound_to_their_namespace(theirs, one, other):
    """An engine's own hashes fold one to one, to different hashes in different namespaces."""
    folded = [row.tobytes() for row in fold_hashes(theirs, digest=one)]
    assert len(set(folded)) == len(set(theirs))
    if one != other:
        assert not set(folded) & {row.tobytes() for row in fold_hashes(theirs, digest=other)}


@given(st.integers(0, 200), sizes)
def test_spans_cover_the_tokens_once(tokens, size):
    """Spans with the tail are consecutive, full but for the last, and end with the tokens."""
    spans = list(block_spans(tokens, size, with_tail=True))
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(tokens))
    assert all(stop - start == size for start, stop in spans[:-1])


def test_hashes_do_not_depend_on_how_tokens_are_held():
    """A list, an int64 array and a big-endian array of the same tokens hash alike."""
    tokens = [1, 2, 70_000, 4]
    expected = chain(tokens, b"d" * 32, 2)
    for dtype in ("<i8", ">u4", "<u4"):
        assert chain(np.array(tokens, dtype=dtype), b"d" * 32, 2) == expected
