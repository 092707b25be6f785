"""Reasons why engines share no blocks or are served badly, and settings that remedy them.

Pure functions turn rows of sessions into sentences with remedies. They do not ask the daemon and
draw nothing. Unknown facts give no advice. Engines that share a namespace get no advice about
sharing. Engines of equal configuration get one sentence together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tierd.integrations.versions import WINDOWS, has_run, release_of

FIELDS = {
    "hash_seed": ("hash seeds", "PYTHONHASHSEED"),
    "hash_algorithm": ("hash algorithms", "the engine's hash algorithm (vLLM: --prefix-caching-hash-algo sha256_cbor)"),
    "tokens_per_block": ("block sizes", "the engine's block size (vLLM: --block-size, SGLang: --page-size)"),
    "dtype": ("KV dtypes", "the KV cache's dtype (vLLM: --kv-cache-dtype and --dtype)"),
    "layout": ("KV layouts", "the KV layout (vLLM: VLLM_KV_CACHE_LAYOUT, SGLang: --hicache-mem-layout)"),
    "rank_count": ("numbers of ranks", "the tensor and pipeline parallel sizes"),
    "codec": ("codecs", "tierd's option `codec`, and the calibration"),
}
"""Fields that may differ between engines that should share: field -> display name, setting."""
SEEDLESS = "xxhash"
"""vLLM starts hash chains of these algorithms with random bytes, new in each process."""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace that an engine has opened: id, and the spec's fields by name."""

    id: int
    spec: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Engine:
    """A session of a client that introduced an engine. words: named as in tierd.integrations.facts.
    tenant: the owner of the blocks that the engine sees."""

    session: int
    pid: int
    name: str
    tenant: str
    words: Mapping[str, str]
    spaces: tuple[Space, ...] = ()

    @property
    def kind(self) -> str:
        """The engine's name, such as "vllm"."""
        return self.words.get("engine", "")

    @property
    def model(self) -> str:
        """The engine's model name, else that of its latest namespace."""
        return self.words.get("model", "") or str(self._latest.get("model", ""))

    @property
    def label(self) -> str:
        """A name for sentences."""
        return f"{self.name or self.kind} (pid {self.pid})"

    def value(self, name: str) -> str:
        """One of FIELDS, from the words, else from the latest namespace; empty if unknown."""
        said = self.words.get("ranks", "").partition("/")[2] if name == "rank_count" else self.words.get(name, "")
        return said or _of_spec(self._latest, name)

    @property
    def weights(self) -> str:
        """The digest of the weights in its latest namespace."""
        return str(self._latest.get("weights_digest") or "")

    @property
    def _latest(self) -> Mapping[str, object]:
        return self.spaces[-1].spec if self.spaces else {}


@dataclass(frozen=True, slots=True)
class Advice:
    """sessions: those affected. is_urgent: whether blocks get lost or requests fail."""

    sessions: tuple[int, ...]
    fault: str
    remedy: str
    is_urgent: bool = True


def advise(engines: Sequence[Engine]) -> list[Advice]:
    """All advice, urgent first."""
    said = [*_merged(engines), *_apart(engines)]
    return sorted(said, key=lambda advice: not advice.is_urgent)


def version_advice(engine: Engine) -> Advice | None:
    """Advice about a version that this release does not support, or that no test ran on."""
    window, found = WINDOWS.get(engine.kind), engine.words.get("version", "")
    if window is None or not found or has_run(engine.kind, found):
        return None
    ran = ", ".join(window.ran)
    if window.first <= release_of(found) < window.end:
        return _advice(
            engine,
            f"{engine.kind} {found} is supported, but the tests of this release ran on {ran}",
            "nothing is needed; to use a tested version, install one of these",
            is_urgent=False,
        )
    return _advice(
        engine,
        f"{engine.kind} {found} is outside the versions that this tierd supports ({engine.kind}{window})",
        f"install one of {ran}, or a tierd that supports {found}",
    )


def policy_advice(engine: Engine) -> Advice | None:
    """Advice about a policy that fails a request if one of its blocks cannot be loaded."""
    if engine.words.get("load_failure_policy") != "fail":
        return None
    return _advice(
        engine,
        "a block that cannot be loaded fails its request",
        'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
    )


def hash_advice(engine: Engine) -> Advice | None:
    """Advice about hashes that no other process, or only a similar one, can compute."""
    algorithm = engine.words.get("hash_algorithm", "")
    if algorithm.startswith(SEEDLESS) or (engine.kind == "vllm" and algorithm == "builtin"):
        return _advice(
            engine,
            f"block hashes by {algorithm} are valid in this process alone: after a restart, and for "
            "others, every block is a miss",
            "set --prefix-caching-hash-algo sha256_cbor",
        )
    if algorithm != "sha256" or engine.kind != "vllm":
        return None
    return _advice(
        engine,
        "block hashes by sha256 cover Python pickles: another Python version may compute different hashes",
        "set --prefix-caching-hash-algo sha256_cbor on every engine that shares",
        is_urgent=False,
    )


ALONE: tuple[Callable[[Engine], Advice | None], ...] = (version_advice, policy_advice, hash_advice)
"""Rules about one engine."""


def differences(one: Engine, other: Engine) -> list[str]:
    """The FIELDS that are known for both engines and differ."""
    return [name for name in FIELDS if one.value(name) and other.value(name) and one.value(name) != other.value(name)]


def shares(one: Engine, other: Engine) -> bool:
    """Whether two engines have a namespace in common."""
    return bool({space.id for space in one.spaces} & {space.id for space in other.spaces})


def apart_advice(one: Engine, other: Engine) -> Advice | None:
    """The reason why two engines of one model share no blocks although they probably should."""
    if not _comparable(one, other) or shares(one, other):
        return None
    sessions, who = (one.session, other.session), f"{one.label} and {other.label} both serve {one.model}"
    if one.tenant != other.tenant:
        fault = f"{who} but belong to different tenants ({one.tenant}, {other.tenant}): they share no block"
        return Advice(sessions, fault, "if they trust each other, give both uids one name in identity.tenants", False)
    names = differences(one, other)
    if not names:
        return None
    what = "; ".join(f"{FIELDS[name][0]} {one.value(name)} and {other.value(name)}" for name in names)
    remedy = "set the same on both: " + "; ".join(FIELDS[name][1] for name in names)
    return Advice(sessions, f"{who} but share no block: {what}", remedy)


def _comparable(one: Engine, other: Engine) -> bool:
    """Whether both have one kind and model and, if known, the same weights. Engines of different
    kinds always name blocks differently."""
    is_alike = (one.kind, one.model) == (other.kind, other.model)
    return bool(one.model) and is_alike and (one.weights == other.weights or "" in (one.weights, other.weights))


def _merged(engines: Sequence[Engine]) -> Iterator[Advice]:
    """Advice about single engines. Equal advice is merged."""
    found: dict[tuple[str, str, bool], list[Engine]] = {}
    for engine in engines:
        for rule in ALONE:
            advice = rule(engine)
            if advice:
                found.setdefault((advice.fault, advice.remedy, advice.is_urgent), []).append(engine)
    for (fault, remedy, is_urgent), whom in found.items():
        yield Advice(tuple(e.session for e in whom), f"{_names(whom)}: {fault}", remedy, is_urgent)


def _apart(engines: Sequence[Engine]) -> Iterator[Advice]:
    """Advice for pairs, one per configuration and reason: an engine has a scheduler and workers."""
    alike: dict[tuple[str, ...], Engine] = {}
    for engine in engines:
        known = (engine.kind, engine.model, engine.weights, engine.tenant, *(engine.value(name) for name in FIELDS))
        alike.setdefault(known, engine)
    said: list[set[tuple[str, ...]]] = []
    for one, other in sorted(combinations(alike.values(), 2), key=lambda pair: -len(differences(*pair))):
        what = {(name, *sorted((one.value(name), other.value(name)))) for name in differences(one, other)}
        what.add((one.kind, one.model, *sorted((one.tenant, other.tenant))))
        advice = apart_advice(one, other)
        if advice and not any(what <= known for known in said):
            said.append(what)
            yield advice


def _names(engines: Sequence[Engine]) -> str:
    more = len(engines) - 2
    names = ", ".join(engine.label for engine in engines[:2])
    return f"{names} and {more} more" if more > 0 else names


def _advice(engine: Engine, fault: str, remedy: str, *, is_urgent: bool = True) -> Advice:
    return Advice((engine.session,), fault, remedy, is_urgent)


def _of_spec(spec: Mapping[str, object], name: str) -> str:
    if name == "codec":
        return str(spec.get("codec", "none")) if spec else ""
    geometry = spec.get("geometry")
    held = geometry if name in ("dtype", "layout") and isinstance(geometry, Mapping) else spec
    return str(held.get(name) or "")
