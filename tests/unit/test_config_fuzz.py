"""Every setting with values of every kind gives a valid configuration or a ConfigError by name."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.depth import count
from tierd.config import Config, read_config, resolve
from tierd.errors import ConfigError
from tierd.settings import SECTIONS, TIER_SECTIONS

ENVIRON = {"TIERD_RUNTIME_DIR": "/run/t", "TIERD_STATE_DIR": "/state"}
KEYS = [(section, key) for section, kind in SECTIONS.items() for key in kind.__pydantic_fields__]  # type: ignore[attr-defined]
PATHS = [
    (section, key)
    for section, key in KEYS
    if SECTIONS[section].__pydantic_fields__[key].json_schema_extra["unit"] == "path"  # type: ignore[attr-defined]
]
TEXTS = [
    "", "auto", "~", "~/x", "relative", "./x", "../x", "/", "/\0", "\0", "/tmp/é\u202e", "/" + "x" * 300, "/" + "x/" * 3000, "é" * 5000, "\n", "on", "all", "lru", "nan",
    "inf", "-1 s", "1e400 s", "9" * 400 + " TB", "9" * 400 + ".5 h", "9" * 30 + " MiB", "0 B", "1 B", "4 KiB", "0.0001 us", "5 days", "12", "64 MiB/s", "127.0.0.1:٣",
    "127.0.0.1:99999", "[::1]:0", "::1:80", "[::1%lo]:5", "tcp://127.0.0.1:5557", "ipc://x", "ipc://", "tcp://", "localhost:0", "host:",
]  # fmt: skip
NUMBERS = [
    0,
    -1,
    1,
    3,
    4095,
    4096,
    2**31,
    2**63,
    2**64,
    10**30,
    10**4000,
    0.0,
    -0.0,
    0.5,
    1.5,
    1e300,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
]
ODD = st.one_of(
    st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.booleans(), st.just([]), st.just([[1], {"a": 1}]), st.dictionaries(st.sampled_from(["1", "-1", "x", "", "9" * 30]), st.sampled_from(["", "t", 1])),
    st.integers(), st.floats(), st.text(max_size=20), st.datetimes(),
)  # fmt: skip


def toml(value: Any) -> str:
    """The value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value).replace("+", "")


def config_of(written: list[tuple[str, str, Any]]) -> Config:
    """The resolved configuration of these settings, with each table written once."""
    lines: list[str] = []
    for section in dict.fromkeys(section for section, _, _ in written):
        lines.append(f"[[{section}]]" if section in TIER_SECTIONS else f"[{section}]")
        lines += [f"{key} = {toml(value)}" for key, value in {k: v for s, k, v in written if s == section}.items()]
    return resolve(read_config("\n".join(lines)), environ=ENVIRON)


@pytest.mark.parametrize(("section", "key"), KEYS, ids=[".".join(key) for key in KEYS])
def test_every_key_with_each_odd_value(section: str, key: str) -> None:
    """Each setting accepts a value, or a ConfigError names the faulty setting and the remedy."""
    for value in [*TEXTS, *NUMBERS, True, [], {}]:
        said = ""
        try:
            config_of([(section, key, value)])
        except ConfigError as error:
            said = str(error)
        assert not said or (";" in said and any(word in said for word in (key, section, "TOML"))), (value, said)


@settings(
    max_examples=count(test=60, nightly=20_000, weekly=100_000), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.tuples(st.sampled_from(KEYS), ODD), min_size=1, max_size=4))
def test_settings_together(written: list[tuple[tuple[str, str], Any]]) -> None:
    """Any settings give a complete configuration or a ConfigError; resolving it again changes nothing."""
    try:
        config = config_of([(*key, value) for key, value in written])
    except ConfigError:
        return
    assert resolve(config, environ={}) == config
    assert all(
        tier.segment > 0 and tier.capacity % tier.segment == 0 for tier in (*config.device, *config.host, *config.nvme)
    )


@settings(max_examples=count(test=100, nightly=20_000, weekly=100_000), deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="[]{}=\"'.,#\n ahostnvme0123", max_size=60)))
def test_any_text(text: str) -> None:
    """Any text is a configuration or a ConfigError."""
    with contextlib.suppress(ConfigError):
        resolve(read_config(text), environ=ENVIRON)


@pytest.mark.parametrize("path", ["x", "./x", "../x", "~", "~/x", "~root/x", "/x\0"])
@pytest.mark.parametrize(("section", "key"), PATHS, ids=[".".join(key) for key in PATHS])
def test_paths_are_absolute(section: str, key: str, path: str) -> None:
    """A path that depends on the working directory or the user, or is impossible, is refused by name."""
    with pytest.raises(ConfigError, match=rf"{section}.*{key}: .* is no absolute path"):
        config_of([(section, key, path)])


@pytest.mark.parametrize("name", ["TIERD_RUNTIME_DIR", "TIERD_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"])
def test_paths_of_the_environment_are_absolute(name: str) -> None:
    """Paths from the environment obey the same rule."""
    with pytest.raises(ConfigError, match="'here.* is no absolute path"):
        resolve(Config(), environ={name: "here"})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("/a", "/a/b"), ("/a", "/a/b/c"), ("/a/", "/a"), ("/a", "/a/./"), ("/", "/a"), ("/a/../b", "/b/c")],
)
def test_stores_lie_apart(outer: str, inner: str) -> None:
    """A store inside another store's directory is refused, in any order and spelling; siblings are not."""
    for first, second in ((outer, inner), (inner, outer)):
        with pytest.raises(ConfigError, match=r"nvme\.\d\.path: .*give each"):
            resolve(read_config(f'[[nvme]]\npath = "{first}"\n[[nvme]]\npath = "{second}"'), environ=ENVIRON)
    resolve(read_config('[[nvme]]\npath = "/a"\n[[nvme]]\npath = "/ab"'), environ=ENVIRON)


@pytest.mark.parametrize("value", ["0", '"0 B"', "1", "-1", "-4096", '"4095 B"', "0.0"])
def test_a_segment_is_pages(value: str) -> None:
    """A segment below one page is refused; only "auto" lets the daemon choose the size."""
    for section in TIER_SECTIONS:
        with pytest.raises(ConfigError, match=rf"{section}\.0\.segment"):
            resolve(read_config(f"[[{section}]]\nsegment = {value}"), environ=ENVIRON)
