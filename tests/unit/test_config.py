"""The configuration: accepted settings, refused settings and the words of each refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.config import Config, auto_segment_bytes, load_config, read_config, resolve, split_address
from tierd.errors import ConfigError
from tierd.settings import SECTIONS

MIB = 1 << 20
ENVIRON = {"TIERD_RUNTIME_DIR": "/run/t", "TIERD_STATE_DIR": "/state"}


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(read_config(text), environ=ENVIRON)
    return str(caught.value)


def test_defaults_fit_a_laptop() -> None:
    """Without a file: one host tier of 512 MiB, one store of 4 GiB in the state directory, no device tier."""
    config = load_config(None, environ=ENVIRON)
    assert [tier.capacity for tier in config.host] == [512 * MIB]
    assert [(tier.capacity, tier.path) for tier in config.nvme] == [(4096 * MIB, "/state/nvme-0")]
    assert config.device == ()


def test_nothing_but_the_arena_is_left_open() -> None:
    """After load_config every directory and every segment size has a value."""
    config = load_config(None, environ=ENVIRON)
    assert (config.server.runtime_dir, config.server.state_dir) == ("/run/t", "/state")
    assert all(tier.segment for tier in (*config.host, *config.nvme))


def test_written_directories_win_over_the_environment() -> None:
    """TIERD_RUNTIME_DIR does not replace a directory that the file sets."""
    config = resolve(read_config('[server]\nruntime_dir = "/mine"'), environ=ENVIRON)
    assert config.server.runtime_dir == "/mine"


def test_sizes_and_durations_are_numbers_afterwards() -> None:
    """Human-readable texts become bytes and seconds."""
    config = read_config('[server]\ncall_timeout = "250 ms"\n[[host]]\ncapacity = "64 MiB"\nsegment = 1048576')
    assert (config.server.call_timeout, config.host[0].capacity, config.host[0].segment) == (0.25, 64 * MIB, MIB)


def test_tiers_are_indexed_as_written() -> None:
    """Several tables of one kind make several tiers, in order; an empty array makes none."""
    config = read_config('nvme = []\n[[host]]\ncapacity = "64 MiB"\n[[host]]\ncapacity = "32 MiB"')
    assert ([tier.capacity for tier in config.host], config.nvme) == ([64 * MIB, 32 * MIB], ())


def test_uids_are_numbers() -> None:
    """Tenants are keyed by the numeric uid."""
    assert read_config('[identity]\ntenants = { "1000" = "search" }').identity.tenants == {1000: "search"}


@given(st.sampled_from(sorted(SECTIONS)), st.data())
def test_unknown_key_names_its_neighbour(section: str, data: st.DataObject) -> None:
    """Any setting with a letter too many is refused, and the message gives the right name."""
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(SECTIONS[section])]))
    header = f"[[{section}]]" if section in ("device", "host", "nvme") else f"[{section}]"
    message = refusal(f"{header}\n{name}x = 1")
    assert f"{section}.{name}x" in message
    assert f"{section}.{name}," in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[servr]", ["servr", "nearest is server"]),
        ("[host]\ncapacity = 1", ["host", "[[host]]"]),
        ("nvme = [3]", ["nvme", "[[nvme]]"]),
        ("x = =", ["TOML", "line 1"]),
        ('[[host]]\ncapacity = "12 GX"', ["host.0.capacity", "'12 GX'", "GiB"]),
        ('[[host]]\ncapacity = "12"', ["host.0.capacity", "no unit"]),
        ("[[host]]\ncapacity = 0", ["host.0.capacity", "0", "4096"]),
        ('[server]\nqueue_limit = "3"', ["server.queue_limit", "'3'", "integer"]),
        ("[server]\nqueue_limit = 0", ["server.queue_limit", "equal to 1"]),
        ('[server]\ncall_timeout = "5 days"', ["server.call_timeout", "days", "min"]),
        ('[server]\nclock = "sundial"', ["server.clock", "sundial", "monotonic"]),
        ("[mover]\nprefetch_on_lookup = 1", ["mover.prefetch_on_lookup", "boolean"]),
        ('[[host]]\nsegment = "5000 B"', ["host.0.segment", "5000 B", "4 KiB"]),
        ('[[host]]\nsegment = "1 GiB"', ["host.0.segment", "1 GiB", "512 MiB", "auto"]),
        ('[[host]]\ncapacity = "100 MiB"\nsegment = "33 MiB"', ["host.0.segment", "33 MiB", "100 MiB", "99 MiB"]),
        ("[[host]]\nlow_watermark = 0.95", ["host.0.low_watermark", "0.95", "lower it"]),
        ("[[host]]\nhigh_watermark = 1.5", ["host.0.high_watermark", "1.5", "1"]),
        ("host = []\nnvme = []", ["host", "[[host]]"]),
        ('host = []\n[[device]]\ncapacity = "64 MiB"', ["host", "nvme", "[[host]]"]),
        ('host = []\nnvme = []\n[[device]]\nkind = "cuda"', ["host", "cuda", "[[host]]"]),
        ('[[device]]\nkind = "cuda"\n[[device]]', ["device.1.kind", "give all one kind"]),
        ('[[device]]\nkind = "cuda"\nordinal = 3\n' * 2, ["device.1.ordinal", "3", "one table"]),
        ('[[device]]\nkind = "gpu"', ["device.0.kind", "gpu", "cuda"]),
        ("[[device]]\nordinal = -1", ["device.0.ordinal", "-1", "0"]),
        ('[[nvme]]\npath = "/a"\n[[nvme]]\npath = "/a"', ["nvme.1.path", "/a", "nvme.0"]),
        ('[[nvme]]\nadmission = "some"', ["nvme.0.admission", "'some'", "learned", "second-touch"]),
        ('[[nvme]]\nwear_budget = "9"', ["nvme.0.wear_budget", "'9'", "no unit"]),
        ("[[nvme]]\nendurance_dwpd = -1.0", ["nvme.0.endurance_dwpd", "-1", "0"]),
        ("[[nvme]]\nendurance_years = 0.0", ["nvme.0.endurance_years", "0.1"]),
        (
            "[[nvme]]\nendurance_dwpd = 1.0\nendurance_tbw = 9.0",
            ["nvme.0.endurance_tbw", "9 TB", "dwpd of 1", "keep only one"],
        ),
        ('[[nvme]]\nwear_budget = "9 TB"\nendurance_tbw = 5.0', ["nvme.0.wear_budget", "9 TB", "5 TB", "lower it"]),
        ('[server]\nruntime_dir = "/' + "x" * 100 + '"', ["server.runtime_dir", "112 bytes", "107", "shorter"]),
        ('[server]\ntcp_listen = "0.0.0.0:7000"', ["server.tcp_listen", "0.0.0.0", "loopback", "127.0.0.1"]),
        ('[server]\ntcp_listen = "127.0.0.1"', ["server.tcp_listen", "host:port"]),
        ('[server]\ntcp_listen = "::1:7000"', ["server.tcp_listen", "::1:7000", "[::1]:9440"]),
        ('[server]\nmetrics_listen = "::1"', ["server.metrics_listen", "::1", "[::1]:9440"]),
        ('[server]\ntcp_listen = "127.0.0.1:7000"', ["server.tcp_credential_file", "127.0.0.1:7000"]),
        ('[server]\nmetrics_listen = "10.0.0.1:9440"', ["server.metrics_listen", "10.0.0.1", "loopback"]),
        ("[server]\npage = true", ["server.page", "true", "metrics_listen", "127.0.0.1:9440"]),
        ('[events]\nbind = "127.0.0.1:5557"', ["events.bind", "127.0.0.1:5557", "tcp://127.0.0.1:5557"]),
        ('[telemetry]\notlp_endpoint = "127.0.0.1:4317"', ["telemetry.otlp_endpoint", "http://127.0.0.1:4317"]),
        ('[events]\nbind = ""', ["events.bind", "tcp://"]),
        ('[events]\nbind = "tcp://::1:5557"', ["events.bind", "::1:5557", "[::1]:9440"]),
        ('[events]\nreplay_bind = "udp://x"', ["events.replay_bind", "udp://x", "ipc://path"]),
        ('[events]\nbind = "ipc:///a"\nreplay_bind = "ipc:///a"', ["events.replay_bind", "ipc:///a", "of its own"]),
        ('[identity]\ncredential_file = "/nonexistent/c"', ["identity.credential_file", "/nonexistent/c", "0600"]),
        ('[identity]\ntenants = { "bob" = "a" }', ["identity.tenants", "bob", "integer"]),
        ('[identity]\ntenants = { "-1" = "a" }', ["identity.tenants", "-1", "id -u"]),
        ('[identity]\ntenants = { "1" = "" }', ["identity.tenants", "1", "name it"]),
    ],
)
def test_refusals_say_thing_fault_value_limit_and_remedy(text: str, words: list[str]) -> None:
    """Each impossible setting is refused with its name, its value, its limit and the remedy."""
    message = refusal(text)
    assert [word for word in words if word not in message] == [], message


def test_a_path_of_107_bytes_is_the_longest() -> None:
    """A socket path that just fits is accepted."""
    longest = "/" + "x" * (107 - len("/session.sock") - 1)
    resolve(read_config(f'[server]\nruntime_dir = "{longest}"'), environ=ENVIRON)
    assert "108 bytes" in refusal(f'[server]\nruntime_dir = "{longest}y"')


def test_credential_open_to_all_is_refused(tmp_path: Path) -> None:
    """A credential that every user can read is refused."""
    secret = tmp_path / "credential"
    secret.write_text("hush\n")
    secret.chmod(0o644)
    text = f'[server]\ntcp_listen = "[::1]:7000"\ntcp_credential_file = "{secret}"'
    assert "0644" in refusal(text)
    secret.chmod(0o600)
    assert resolve(read_config(text), environ=ENVIRON).server.tcp_listen == "[::1]:7000"


def test_file_is_named_in_the_refusal(tmp_path: Path) -> None:
    """A fault in a file, or a missing file, is reported with the file's path."""
    path = tmp_path / "tierd.toml"
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)
    path.write_text("[serverr]\n")
    with pytest.raises(ConfigError, match=f"{path}.*nearest is server"):
        load_config(path)


@given(st.integers(4096, 1 << 44))
def test_auto_segment_fits_any_capacity(capacity_bytes: int) -> None:
    """An automatic segment is aligned, at most 1 GiB, and at least one fits the capacity."""
    segment = auto_segment_bytes(capacity_bytes)
    assert segment % 4096 == 0
    assert 4096 <= segment <= min(capacity_bytes, 1 << 30)


def test_auto_segment_aims_at_32_of_16_mib_or_more() -> None:
    """Usual capacities get the segment sizes that the reference promises."""
    sizes = {mib: auto_segment_bytes(mib * MIB) // MIB for mib in (8, 64, 256, 512, 4096, 1 << 20)}
    assert sizes == {8: 1, 64: 8, 256: 16, 512: 16, 4096: 128, 1 << 20: 1024}


def test_auto_rounds_the_capacity_down_to_whole_segments() -> None:
    """With an automatic segment any capacity is accepted and rounded down to whole segments."""
    tier = resolve(read_config('[[host]]\ncapacity = "1 GB"'), environ=ENVIRON).host[0]
    assert tier.capacity % tier.segment == 0
    assert 0 <= 10**9 - tier.capacity < tier.segment


def test_resolving_twice_changes_nothing() -> None:
    """Resolving a resolved config changes nothing."""
    once = resolve(Config(), environ=ENVIRON)
    assert resolve(once, environ={}) == once


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("localhost:9", ("localhost", 9))],
)
def test_address_parts(address: str, parts: tuple[str, int]) -> None:
    """Names, IPv4 and bracketed IPv6 are split at the last colon."""
    assert split_address(address) == parts


def test_config_cannot_be_changed() -> None:
    """Settings are immutable."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().server.queue_limit = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "daily_bytes"),
    [
        ("", 0.0),
        ('wear_budget = "3 GB"\nendurance_dwpd = 1.0', 3e9),
        ('capacity = "1 TiB"\nendurance_dwpd = 3.0', 3.0 * 2**40),
        ('capacity = "1 TiB"\nendurance_dwpd = 3.0\nendurance_years = 10.0', 1.5 * 2**40),
        ("endurance_tbw = 365.0\nendurance_years = 2.0", 0.5e12),
    ],
)
def test_the_wear_budget_follows_from_endurance_and_years(text: str, daily_bytes: float) -> None:
    """The budget is the configured one, else the rated endurance over the wanted years, else none."""
    (store,) = resolve(read_config(f"[[nvme]]\n{text}"), environ={}, uid=1).nvme
    assert store.daily_write_bytes == pytest.approx(daily_bytes)
