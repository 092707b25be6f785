"""The settings that a running daemon can change, as text and as differences of two configs.

Pure: nothing is applied here. `server/operators/live.py` applies them. A name is `section.key`, or
`section.index.key` for a tier, such as `host.0.high_watermark`. A value is as in TOML; a text needs
no quotes.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tierd.config import HostConfig, check, validated
from tierd.errors import ConfigError
from tierd.settings import SECTIONS, TIER_SECTIONS, Config, bounds, toml_value
from tierd.units import parse_seconds

NAMES_LIMIT = 100
"""Settings in one change at most."""


class Setting(NamedTuple):
    """A setting of a config. info: its pydantic field."""

    name: str
    value: Any
    info: Any

    @property
    def is_live(self) -> bool:
        """Whether a running daemon can change it."""
        return bool(self.info.json_schema_extra.get("live"))

    def text(self, value: Any) -> str:
        """A value of it, as in TOML."""
        return toml_value(value, unit=self.info.json_schema_extra["unit"])

    @property
    def default(self) -> str:
        """Its default, in the form of `text`."""
        value = self.info.get_default(call_default_factory=True)
        is_time = isinstance(value, str) and self.info.json_schema_extra["unit"] == "seconds"
        return self.text(parse_seconds(value) if is_time else value)

    @property
    def allowed(self) -> str:
        """Its choices, or its unit and bounds."""
        choices = [text for text in getattr(self.info.annotation, "__args__", ()) if isinstance(text, str)]
        return " | ".join(choices) or ", ".join(filter(None, (self.info.json_schema_extra["unit"], bounds(self.info))))


class Change(NamedTuple):
    """A setting with two values, as texts in TOML."""

    name: str
    before: str
    after: str


def settings_of(config: Config) -> Iterator[Setting]:
    """Every setting of a config, in the order of the tables."""
    for section in SECTIONS:
        held = getattr(config, section)
        tables = enumerate(held) if section in TIER_SECTIONS else [(None, held)]
        for index, table in tables:
            where = section if index is None else f"{section}.{index}"
            for key, info in type(table).__pydantic_fields__.items():
                yield Setting(f"{where}.{key}", getattr(table, key), info)


def with_changes(config: Config, texts: Mapping[str, str]) -> Config:
    """A resolved config with these settings changed, checked whole. texts: by name.

    Raises ConfigError: an unknown name, one that needs a restart, a value out of its bounds, or
    settings that contradict each other.
    """
    if len(texts) > NAMES_LIMIT:
        raise ConfigError(f"set: {len(texts)} settings in one change, above {NAMES_LIMIT}; split them")
    known = {setting.name: setting for setting in settings_of(config)}
    plain = dataclasses.asdict(config)
    for name, text in texts.items():
        if name not in known:
            near = difflib.get_close_matches(name, [n for n, s in known.items() if s.is_live], n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{name}: unknown setting; the nearest that can be set is {near}, `tierctl set` lists all"
            )
        if not known[name].is_live:
            raise ConfigError(
                f"{name}: cannot change while the daemon runs; write it into the configuration file and restart"
            )
        section, *index, key = name.split(".")
        table = plain[section][int(index[0])] if index else plain[section]
        table[key] = _value(text)
    changed = validated(plain)
    hosts = (dataclasses.replace(host, capacity=_whole_segments(host)) for host in changed.host)
    changed = dataclasses.replace(changed, host=tuple(hosts))
    check(changed)
    return changed


def differences(before: Config, after: Config) -> tuple[list[Change], list[str]]:
    """From one resolved config to another: the live settings that differ, and the names of others.

    A kind of tier with another number of tables is one name.
    """
    live = []
    rest = [kind for kind in TIER_SECTIONS if len(getattr(before, kind)) != len(getattr(after, kind))]
    new = {setting.name: setting.value for setting in settings_of(after)}
    for setting in settings_of(before):
        if setting.name.split(".")[0] in rest or new[setting.name] == setting.value:
            continue
        if setting.is_live:
            live.append(Change(setting.name, setting.text(setting.value), setting.text(new[setting.name])))
        else:
            rest.append(setting.name)
    return live, rest


def only_live(before: Config, after: Config) -> Config:
    """`before` with the live settings of `after`, checked. Raises ConfigError."""
    live, _ = differences(before, after)
    return with_changes(before, {change.name: change.after for change in live})


def _whole_segments(host: HostConfig) -> int:
    """The capacity, rounded down to whole segments; at least one."""
    return max(1, host.capacity // host.segment) * host.segment


def _value(text: str) -> Any:
    """A value in TOML; any other text is itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
