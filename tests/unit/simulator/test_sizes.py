"""Sizes and policies of simulated tiers in the form that users write."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from tierd.config import Config, HostConfig, read_config, resolve
from tierd.core.formats.model import TierKind
from tierd.errors import ConfigError, InvalidArgument
from tierd.policies.eviction import EVICTION
from tierd.server.assembly import build_tiers
from tierd.simulator.choices import CLAIRVOYANT, DEFAULT, names, parse_choice
from tierd.simulator.rivals import RIVALS
from tierd.simulator.sequences import Measure
from tierd.simulator.sizes import Size, parse_size, tiers_of

HOST, NVME, DEVICE = TierKind.HOST, TierKind.NVME, TierKind.DEVICE


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", Size("64GiB", bytes=64 << 30)),
        (" 512 MiB ", Size("512 MiB", bytes=512 << 20)),
        ("1000000", Size("1000000", bytes=10**6)),
        ("5%", Size("5%", share=Fraction(1, 20))),
        ("0.1 %", Size("0.1 %", share=Fraction(1, 1000))),
        ("817blocks", Size("817blocks", blocks=817)),
        ("1 block", Size("1 block", blocks=1)),
    ],
)
def test_sizes_are_bytes_per_cent_or_blocks(text: str, size: Size) -> None:
    """A size keeps its text, and means bytes, per cent or blocks."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not a number with a unit"),
        ("many", "not a number with a unit"),
        ("-5%", "not a number with a unit"),
        ("5 furlongs", "unknown unit"),
        ("0%", "not above 0"),
        ("101%", "at most 100"),
        ("2.5blocks", "whole number of blocks"),
        ("0blocks", "1 or more"),
        ("0", "below 4096 bytes"),
        ("4kB", "below 4096 bytes"),
    ],
)
def test_what_is_no_size_is_refused_with_the_form(text: str, fault: str) -> None:
    """The error names the fault of the value and shows a right one."""
    with pytest.raises(ValueError, match=fault):
        parse_size(text)


def test_per_cent_round_down() -> None:
    """Per cent round down like published figures, without the error of binary fractions."""
    assert parse_size("5%").count(111_932) == 5_596
    assert parse_size("0.1%").count(81_743) == 81
    assert parse_size("29%").count(100) == 29


def test_bytes_mean_the_tiers_of_a_daemon() -> None:
    """Sizes in bytes give exactly the tiers and the session share of a daemon with these capacities."""
    written = '[[host]]\ncapacity = "64 MiB"\nhigh_watermark = 0.7\nlow_watermark = 0.5\n[[nvme]]\ncapacity = "1 GiB"\n'
    config = read_config(written)
    tiers = tiers_of(
        {HOST: parse_size("100MB"), NVME: parse_size("1 GiB")},
        distinct=10,
        longest=10,
        measure=Measure(),
        config=config,
    )
    changed = dataclasses.replace(config, host=(dataclasses.replace(config.host[0], capacity=10**8, segment="auto"),))
    built = build_tiers(resolve(changed), instance="none")
    assert tiers.specs == tuple(tier.spec for tier in built)
    assert tiers.session_share == config.server.session_share
    assert not tiers.measure.whole


def test_no_sizes_mean_the_configured_tiers() -> None:
    """Without sizes a run has the configured tiers, and reports their sizes."""
    tiers = tiers_of({}, distinct=10, longest=10, measure=Measure(), config=Config())
    assert tiers.specs == tuple(tier.spec for tier in build_tiers(resolve(Config()), instance="none"))
    assert (tiers.texts[DEVICE], tiers.texts[HOST], tiers.texts[NVME]) == ("", "512 MiB", "4 GiB")


def test_blocks_mean_room_for_just_so_many() -> None:
    """Blocks or per cent count equal pages, plus slot headers and headroom for the longest request."""
    tiers = tiers_of(
        {HOST: parse_size("7blocks"), NVME: parse_size("30%")},
        distinct=99,
        longest=10,
        measure=Measure(1 << 20),
        config=Config(),
    )
    assert [spec.kind for spec in tiers.specs] == [HOST, NVME]
    sizes = [4096 + spec.slot_overhead_bytes for spec in tiers.specs]
    rests = [spec.capacity_bytes - spec.headroom_bytes for spec in tiers.specs]
    assert [rest // size for rest, size in zip(rests, sizes, strict=True)] == [7, 29]
    assert [spec.headroom_bytes // size for spec, size in zip(tiers.specs, sizes, strict=True)] == [10, 10]
    assert [spec.slot_overhead_bytes for spec in tiers.specs] == [0, 4096]
    assert tiers.session_share == 1.0


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({NVME: "1GiB"}, "needs a host tier"),
        ({DEVICE: "1GiB", NVME: "5%"}, "needs a host tier"),
        ({HOST: "1GiB", NVME: "5%"}, "mix bytes and blocks"),
        ({HOST: "0.5%"}, "less than one of 99 blocks"),
    ],
)
def test_impossible_tiers_are_refused(sizes: dict[TierKind, str], fault: str) -> None:
    """Impossible or meaningless tiers are an error with the remedy."""
    parsed = {kind: parse_size(text) for kind, text in sizes.items()}
    with pytest.raises(InvalidArgument, match=fault):
        tiers_of(parsed, distinct=99, longest=10, measure=Measure(), config=Config())


def test_the_daemons_own_errors_come_through() -> None:
    """A capacity that no daemon accepts is refused with the daemon's error."""
    with pytest.raises(ConfigError, match="does not divide"):
        tiers_of(
            {HOST: parse_size("100MB")},
            distinct=9,
            longest=10,
            measure=Measure(),
            config=Config(host=(HostConfig(segment="16 MiB"),)),  # type: ignore[arg-type]
        )


def test_every_policy_of_the_daemon_has_a_name_here() -> None:
    """The names are the daemon's policies, their rivals, the default and the clairvoyant."""
    assert set(names()) == {DEFAULT, CLAIRVOYANT, *EVICTION, *RIVALS}


def test_a_choice_names_one_policy_or_one_for_each_kind() -> None:
    """A plain name applies to all tiers. Unnamed kinds keep their configured policy."""
    config = Config(host=(HostConfig(eviction="lfu"),))
    specs = tiers_of({}, distinct=9, longest=10, measure=Measure(), config=config).specs
    nvme = config.nvme[0].eviction

    def chosen(text: str) -> list[str]:
        return [spec.eviction for spec in parse_choice(text).applied(specs)]

    assert chosen("lru") == ["lru", "lru"]
    assert chosen("default") == ["lfu", nvme]
    assert chosen("host:clairvoyant") == ["clairvoyant", nvme]
    assert chosen("nvme:lfu + host:default") == ["lfu", "lfu"]


@pytest.mark.parametrize("text", ["", "mru", "host:mru", "tape:lru", "host:lru+host:lru", "host:lru+lru", "lru+lfu"])
def test_what_is_no_choice_is_refused(text: str) -> None:
    """An unknown policy, an unknown kind, or a repeated kind is refused."""
    with pytest.raises(ValueError, match="is no policy|is no kind"):
        parse_choice(text)
