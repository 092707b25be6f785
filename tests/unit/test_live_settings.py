"""Settings that change while the daemon runs: their names, their values as text, and differences."""

from __future__ import annotations

from typing import Any

import pytest

from tierd.config import Config, load_config, read_config, resolve
from tierd.errors import ConfigError
from tierd.live_settings import NAMES_LIMIT, differences, only_live, settings_of, with_changes

CONFIG = load_config(None, environ={"TIERD_RUNTIME_DIR": "/run/t", "TIERD_STATE_DIR": "/var/t"})


def changed(**texts: str) -> Config:
    return with_changes(CONFIG, {name.replace("__", "."): text for name, text in texts.items()})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("host.0.high_watermark", "0.9", 0.9),
        ("server.log_level", "debug", "debug"),
        ("server.log_level", '"debug"', "debug"),
        ("server.call_timeout", "5 s", 5.0),
        ("nvme.0.wear_budget", "1 GiB", 1 << 30),
        ("scrub.bandwidth", "50 MiB/s", 50 << 20),
        ("mover.prefetch_on_lookup", "false", False),
        ("nvme.0.eviction", "lru", "lru"),
    ],
)
def test_values_are_read_as_in_a_file(name: str, text: str, value: Any) -> None:
    """A value is TOML; a text needs no quotes, and a unit is read."""
    assert {s.name: s.value for s in settings_of(with_changes(CONFIG, {name: text}))}[name] == value


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"host.0.high_watermark": "0.6"}, ["low_watermark", "below the high watermark of 0.6"]),
        ({"host.0.high_watermark": "1.5"}, ["host.0.high_watermark", "1"]),
        ({"server.log_level": "loud"}, ["server.log_level", "'debug'"]),
        ({"server.queue_limit": '"3"'}, ["server.queue_limit", "integer"]),
        ({"server.queue_limit": "3\nclock = 1"}, ["server.queue_limit", "integer"]),
        ({"nvme.0.wear_burst": "nan"}, ["nvme.0.wear_burst"]),
        ({"host.0.hi_watermark": "0.9"}, ["host.0.hi_watermark", "host.0.high_watermark"]),
        ({"host.1.headroom": "0.1"}, ["host.1.headroom", "host.0.headroom"]),
        ({"host.0.verify": "always"}, ["host.0.verify", "restart"]),
        ({"server.log_level": "debug", "server.clock": "replay"}, ["server.clock", "restart"]),
        ({f"a{i}": "1" for i in range(NAMES_LIMIT + 1)}, [str(NAMES_LIMIT), "split"]),
    ],
)
def test_wrong_changes_are_refused_with_their_names(texts: dict[str, str], said: list[str]) -> None:
    """Wrong names and values, contradictions and settings that need a restart are named."""
    with pytest.raises(ConfigError) as error:
        with_changes(CONFIG, texts)
    assert all(word in str(error.value) for word in said), error.value


def test_two_watermarks_can_cross_their_old_values_together() -> None:
    """Settings of one change are checked together."""
    host = changed(host__0__low_watermark="0.85", host__0__high_watermark="0.95").host[0]
    assert (host.low_watermark, host.high_watermark) == (0.85, 0.95)


def test_values_and_defaults_have_one_form() -> None:
    """Without a file each live setting's value is its default, letter for letter."""
    listed = [setting for setting in settings_of(CONFIG) if setting.is_live]
    assert [s.name for s in listed if s.text(s.value) != s.default] == []
    assert all(setting.allowed for setting in listed if type(setting.value) is not bool)


def test_differences_tell_live_settings_from_others() -> None:
    """A live setting comes with both values as in TOML, any other with its name alone."""
    text = '[server]\nlog_level = "debug"\nclock = "replay"\n[scrub]\nperiod = "1 h"\n'
    wanted = resolve(read_config(text), environ={"TIERD_RUNTIME_DIR": "/run/t", "TIERD_STATE_DIR": "/var/t"})
    live, rest = differences(CONFIG, wanted)
    assert [tuple(c) for c in live] == [
        ("server.log_level", '"info"', '"debug"'),
        ("scrub.period", "86400.0", "3600.0"),
    ]
    assert rest == ["server.clock"]
    taken = only_live(CONFIG, wanted)
    assert (taken.server.clock, taken.scrub.period) == ("monotonic", 3600.0)
    assert differences(CONFIG, CONFIG) == ([], [])


def test_another_number_of_tiers_needs_a_restart() -> None:
    """A tier that is added is one name, and its settings are none."""
    two = with_changes(CONFIG, {"server.log_level": "debug"})
    two = resolve(Config(server=two.server, host=(*two.host, *two.host), nvme=two.nvme))
    assert (differences(CONFIG, two)[1], only_live(CONFIG, two).server.log_level) == (["host"], "debug")


def test_every_live_setting_can_be_set_to_its_own_value() -> None:
    """A change to the shown values is accepted, and changes nothing."""
    shown = {s.name: s.text(s.value) for s in settings_of(CONFIG) if s.is_live}
    assert with_changes(CONFIG, shown) == CONFIG and len(shown) > 25
