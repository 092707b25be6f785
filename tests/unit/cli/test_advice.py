"""The advice about engines: pure functions over rows, tested by tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierd.cli.advice import FIELDS, Engine, Space, advise, differences

WORDS = {
    "engine": "vllm",
    "version": "0.32.0",
    "model": "llama-3-8b",
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "0",
    "tokens_per_block": "16",
    "dtype": "bfloat16",
    "layout": "NHD",
    "ranks": "0/1",
    "load_failure_policy": "recompute",
    "codec": "none",
}
GOOD = Engine(1, 100, "vllm worker", "search", WORDS, (Space(1),))
OTHER = replace(GOOD, session=2, pid=200, spaces=(Space(9),))


def with_words(engine: Engine, /, **words: str) -> Engine:
    return replace(engine, words=engine.words | words)


ALONE = {
    "too old": ({"version": "0.29.1"}, "outside", "install one of 0.31, 0.32", True),
    "not run": ({"version": "0.33.0"}, "tests of this release ran on 0.31, 0.32", "one of these", False),
    "no release": ({"version": "dev"}, "outside", "install", True),
    "fails": ({"load_failure_policy": "fail"}, "fails its request", '"kv_load_failure_policy": "recompute"', True),
    "xxhash": ({"hash_algorithm": "xxhash"}, "this process alone", "sha256_cbor", True),
    "xxhash_cbor": ({"hash_algorithm": "xxhash_cbor"}, "this process alone", "sha256_cbor", True),
    "pickles": ({"hash_algorithm": "sha256"}, "pickles", "sha256_cbor", False),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_is_said_of_one_engine(case: str) -> None:
    """Each fault of a version, a load failure policy or a hash algorithm gets advice with its remedy."""
    words, fault, remedy, is_urgent = ALONE[case]
    (said,) = advise([with_words(GOOD, **words)])
    assert "vllm worker (pid 100)" in said.fault and fault in said.fault and remedy in said.remedy
    assert (said.sessions, said.is_urgent) == ((1,), is_urgent)


@pytest.mark.parametrize("words", [{}, {"engine": "mine", "version": "7"}, {"version": ""}, {"version": "0.31.2+cpu"}])
def test_nothing_is_said_of_what_is_well_or_unknown(words: dict[str, str]) -> None:
    """An engine that is configured well, or one with too few known settings, gets no warning."""
    assert advise([with_words(GOOD, **words)]) == []


APART = {
    "hash_seed": {"hash_seed": "1"},
    "hash_algorithm": {"hash_algorithm": "sha512_cbor"},
    "tokens_per_block": {"tokens_per_block": "32"},
    "dtype": {"dtype": "float16"},
    "layout": {"layout": "HND"},
    "rank_count": {"ranks": "1/2"},
    "codec": {"codec": "rot-4-4"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_two_engines_that_could_share_are_told_why_they_do_not(name: str) -> None:
    """The advice names both engines, shows both values of each difference and gives the remedy."""
    other = with_words(OTHER, **APART[name])
    (said,) = advise([GOOD, other])
    assert said.sessions == (1, 2) and said.is_urgent
    assert "pid 100" in said.fault and "pid 200" in said.fault and "llama-3-8b" in said.fault
    assert f"{FIELDS[name][0]} {GOOD.value(name)} and {other.value(name)}" in said.fault
    assert said.remedy == f"set the same on both: {FIELDS[name][1]}"


SILENT = {
    "the same": OTHER,
    "a shared namespace": replace(with_words(OTHER, layout="HND"), spaces=(Space(4), Space(1))),
    "another model": with_words(OTHER, model="llama-3-70b", layout="HND"),
    "another engine": replace(OTHER, words={**WORDS, "engine": "mine", "layout": "HND"}),
    "not known of one": with_words(OTHER, dtype=""),
    "other weights": replace(with_words(OTHER, dtype="float16"), spaces=(Space(9, {"weights_digest": "b"}),)),
}


@pytest.mark.parametrize("case", SILENT)
def test_engines_that_share_or_were_never_meant_to_are_left_alone(case: str) -> None:
    """No warning if engines share a namespace, differ in model, engine or weights, or lack a word."""
    first = replace(GOOD, spaces=(Space(1, {"weights_digest": "a"}),))
    assert advise([first, SILENT[case]]) == []


def test_another_tenant_is_a_note() -> None:
    """Engines of two tenants share nothing by design: a note names the setting that joins them."""
    (said,) = advise([GOOD, replace(OTHER, tenant="ads")])
    assert not said.is_urgent and "(search, ads)" in said.fault and "identity.tenants" in said.remedy


def test_namespaces_speak_where_the_engine_does_not() -> None:
    """Block size, dtype, layout and ranks come from the latest namespace's spec if the words lack them."""
    bare = {"engine": "vllm", "version": "0.32.0"}
    spec = {"model": "m", "tokens_per_block": 16, "rank_count": 1, "geometry": {"dtype": "bf16", "layout": "NHD"}}
    one = replace(GOOD, words=bare, spaces=(Space(1, {}), Space(2, spec)))
    other = replace(
        OTHER,
        words=bare,
        spaces=(
            Space(3, spec | {"tokens_per_block": 32, "geometry": {"dtype": "f16", "layout": "HND"}, "codec": "int8"}),
        ),
    )
    assert differences(one, other) == ["tokens_per_block", "dtype", "layout", "codec"]
    assert "both serve m but share no block" in advise([one, other])[0].fault


def test_engines_that_are_configured_alike_are_spoken_of_once() -> None:
    """Two groups of sixteen equal workers get one advice for the pair and one for all, urgent first."""
    workers = [
        replace(with_words(GOOD, version="0.33.0", ranks=f"{i}/16"), session=i, pid=i, spaces=(Space(1),))
        for i in range(16)
    ]
    others = [
        replace(with_words(w, dtype="float16"), session=w.session + 16, pid=w.pid + 16, spaces=(Space(2),))
        for w in workers
    ]
    pair, note = advise([*workers, *others])
    assert pair.sessions == (0, 16) and note.sessions == tuple(range(32))
    assert "(pid 0), vllm worker (pid 1) and 30 more" in note.fault


def test_one_mismatch_between_engines_of_several_processes_is_said_once() -> None:
    """Two engines of several processes get one advice with all differences; each other pair gets its own."""

    def engine(number: int, **words: str) -> list[Engine]:
        return [
            replace(
                with_words(GOOD, role=role, **words | {"hash_seed": seed}),
                session=10 * number + at,
                pid=number,
                spaces=(Space(number),),
            )
            for at, (role, seed) in enumerate([("worker", ""), ("scheduler", words.get("hash_seed", "0"))])
        ]

    (said,) = advise([*engine(1), *engine(2, tokens_per_block="32")])
    assert "block sizes 16 and 32" in said.fault
    (said,) = advise([*engine(1), *engine(2, tokens_per_block="32", hash_seed="9")])
    assert "block sizes 16 and 32" in said.fault and "hash seeds 0 and 9" in said.fault
    assert len(advise([*engine(1), *engine(2, tokens_per_block="32"), *engine(3, tokens_per_block="64")])) == 3
    (note,) = advise([*engine(1), *(replace(one, tenant="ads") for one in engine(2))])
    assert "(search, ads)" in note.fault
