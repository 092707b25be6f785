"""`tierctl plan`: bytes to the digit, models of every kind of attention, hits as `simulate` has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.plan.configs import CONFIGS
from tierd.cli.ctl import cli
from tierd.cli.daemon import cli as daemon_cli
from tierd.cli.plan import asked_of
from tierd.config import load_config
from tierd.errors import InvalidArgument
from tierd.plan.kv import form_of, waste_of
from tierd.plan.machines import GPUS, by_layer_s, prefill_s
from tierd.plan.models import KNOWN, model_of, of_config
from tierd.plan.plan import GIB
from tierd.plan.traffic import CURVES, PRESETS, CurveHits

PLAIN = form_of("bfloat16")


def planned(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["plan", *words, "--json"], prog_name="tierctl")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("model", "context", "wanted"),
    [
        ("llama-3-70b", 4096, 2 * 80 * 8 * 128 * 2 * 4096),  # 1.25 GiB; 0.63 at a byte a value
        ("llama-3-70b", 131_072, 40 * GIB),
        ("llama-3-70b", 1_048_576, 320 * GIB),
        ("llama-2-13b", 2048, 1_677_721_600),  # 1.7 GB
        ("deepseek-v3", 1, 61 * (512 + 64) * 2),
        ("gemma-3-27b", 131_072, 2 * 16 * 128 * 2 * (10 * 131_072 + 52 * 1024)),
    ],
)
def test_bytes_of_a_request(model: str, context: int, wanted: int) -> None:
    """2 x layers x kv heads x head dim x bytes x tokens, to the byte; windows count as kept."""
    answer = planned("--model", model, "--context", str(context), "--gpus", "16")
    assert answer["kv_bytes_per_request"] == wanted
    assert answer["kv_bytes_per_token"] == round(PLAIN.token_bytes(KNOWN[model]))


def test_a_byte_a_value_halves_it() -> None:
    """Llama-3-70B at 128 K tokens takes 40 GiB in 16 bits and 20 GiB in 8: the type makes the difference."""
    halves = [planned("--model", "llama-3-70b", "--context", "131072", "--dtype", d) for d in ("bfloat16", "fp8")]
    assert [one["kv_bytes_per_request"] // GIB for one in halves] == [40, 20]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_a_known_model_gives_its_row(name: str) -> None:
    """A config.json gives the layers of the table, and parameters within a tenth."""
    found, known = of_config(CONFIGS[name], name=name), KNOWN[name]
    assert found.layers == known.layers
    assert (found.heads, found.head_dim, found.context) == (known.heads, known.head_dim, known.context)
    if found.parameters and name not in ("gpt-oss-120b", "qwen3-next-80b-a3b"):
        assert found.parameters == pytest.approx(known.parameters, rel=0.1)
        assert found.active == pytest.approx(known.active, rel=0.2)


def test_nested_and_hybrid_configs() -> None:
    """A text model inside a multimodal one is found; layers of a state space model keep a state."""
    inner = CONFIGS["llama-3.1-8b"]
    assert of_config({"text_config": inner}, name="x").layers == KNOWN["llama-3.1-8b"].layers
    mamba = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8, "attn_layer_offset": 4}
    model = of_config({**inner, **mamba}, name="x")
    assert [layer.count for layer in model.layers] == [4, 28]
    assert model.state_bytes == 28 * 2 * 4096 * (4 * 16 + 2 * 4)
    assert model.request_values(10) == 10 * 4 * 2 * 8 * 128


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "no object"),
        ('{"hidden_size": 3}', "num_attention_heads is missing"),
        ("[" * 100_000, "not JSON"),
        (" " * (2 << 20), "above 1048576 bytes"),
        (None, "neither a file nor known"),
    ],
)
def test_bad_models_are_refused(tmp_path: Path, text: str | None, fault: str) -> None:
    """Each bad file gives one error with its fault and the remedy."""
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=fault):
        model_of(str(path))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_wrong_numbers_are_named(name: str) -> None:
    """A value that is no whole number, or an absurd one, is refused by its key."""
    config, unread = {"head_dim": 128, **CONFIGS[name]}, {"model_type"}
    if name == "deepseek-v3":
        unread |= {"head_dim", "num_key_value_heads"}
    for key in config.keys() - unread:
        for value in (-1, 1.5, True, "x", [1], {"a": 1}, float("nan"), 10**400):
            with pytest.raises(ValueError, match=f"^{key} is .*no whole number from 1 to"):
                of_config({**config, key: value}, name="x")


def test_layers_that_are_not_counted_are_refused() -> None:
    """Layers of other kinds than the file's usual keys tell are an error, never a wrong figure."""
    inner = CONFIGS["llama-3.1-8b"]
    for change, fault in (
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern changes"),
        ({"layer_types": ["full_attention"]}, "no list of 32 names"),
        ({"layer_types": [None] * 32}, "no list of 32 names"),
        ({"num_hidden_layers": 1 << 20}, "above 4096"),
        ({"num_attention_heads": 8192}, "above hidden_size"),
    ):
        with pytest.raises(ValueError, match=fault):
            of_config({**inner, **change}, name="x")


def test_keys_that_files_leave_out() -> None:
    """Gemma 3 has a full layer in six, Falcon-7B one head of keys for all, where the files do not say so."""
    gemma = {key: value for key, value in CONFIGS["gemma-3-27b"].items() if key != "sliding_window_pattern"}
    assert of_config(gemma, name="x").layers == KNOWN["gemma-3-27b"].layers
    falcon = {"num_attention_heads": 71, "hidden_size": 4544, "num_hidden_layers": 32, "multi_query": True}
    assert of_config({**falcon, "num_kv_heads": 71}, name="x").token_values == 32 * 2 * 64
    assert of_config({**falcon, "new_decoder_architecture": True, "num_kv_heads": 8}, name="x").token_values == (
        32 * 2 * 8 * 64
    )


def test_contiguous_allocation_wastes_what_requests_do_not_reach() -> None:
    """Requests of a third of the limit waste two thirds of contiguous room; blocks waste half of one."""
    waste = waste_of(KNOWN["llama-2-13b"], context=2048, mean=683)
    assert 0.6 < waste.contiguous < 0.8
    assert waste.paged == pytest.approx(8 / 691)


@pytest.mark.parametrize("curve", CURVES)
def test_hits_of_a_curve_grow_with_memory_up_to_its_end(curve: str) -> None:
    """More memory never brings fewer hits, and endless memory the curve's last share."""
    hits = CurveHits(PRESETS[curve], curve, 1e5)
    shares = [hits.of(10.0**power) for power in range(3, 14)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(CURVES[curve][-1][1], abs=1e-6)
    assert sum(hits.split(GIB, 1 << 50)) == pytest.approx(shares[-1], abs=1e-3)


def test_loading_by_layer_hides_behind_computing() -> None:
    """The slower of the two decides, and one layer of the other."""
    assert by_layer_s(1.0, 10.0, 10) == pytest.approx(10.1)
    assert by_layer_s(10.0, 1.0, 10) == pytest.approx(10.1)
    model, gpu = KNOWN["llama-3-8b"], GPUS["h100"]
    assert prefill_s(model, gpu, 0, 100) < prefill_s(model, gpu, 100_000, 100)


def test_hits_of_a_trace_are_those_of_simulate(tmp_path: Path) -> None:
    """Host and NVMe hits of a trace equal `tierctl simulate` for the same two tiers."""
    lines = [
        {"timestamp": 1000 * i, "input_length": 2048, "hash_ids": [4 * (i % 2 and i % 30) + j for j in range(4)]}
        for i in range(120)
    ]
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("--host", "4GiB", "--nvme", "8GiB")
    made = planned("--model", "llama-3-8b", "--trace", str(path), *sizes)
    words = ["simulate", str(path), *sizes, "--block-bytes", "64MiB", "--jobs", "1", "--json"]
    row = json.loads(CliRunner().invoke(cli, words, prog_name="tierctl").stdout)["rows"][0]
    assert 0 < row["host_hit"] < 1
    assert [tier["hits"] for tier in made["tiers"]] == [row["host_hit"], row["nvme_hit"]]
    assert made["costs"][2]["hits"] > 0, "a tier below 16 GiB brings hits to the costs too"


def test_written_configuration_is_accepted(tmp_path: Path) -> None:
    """`--write` makes a file with the planned sizes that `tierd config check` accepts, and replaces none."""
    path = tmp_path / "tierd.toml"
    words = ("--model", "llama-3-8b", "--host", "64GiB", "--nvme", "1TiB", "--write", str(path))
    planned(*words)
    config = load_config(path, environ={"TIERD_STATE_DIR": str(tmp_path), "TIERD_RUNTIME_DIR": str(tmp_path)})
    assert (config.host[0].capacity, config.nvme[0].capacity) == (64 * GIB, 1024 * GIB)
    assert CliRunner().invoke(daemon_cli, ["config", "check", str(path)]).exit_code == 0
    again = CliRunner().invoke(cli, ["plan", *words], prog_name="tierctl")
    assert (again.exit_code, "exists" in again.stderr) == (2, True)


def test_tables_name_their_assumptions() -> None:
    """The table has the four forms of the costs, and the prices that they rest on."""
    done = CliRunner().invoke(cli, ["plan", "--model", "llama-3.1-70b", "--gpu-price", "3"], prog_name="tierctl")
    assert done.exit_code == 0
    for text in ("bfloat16", "INT4, prefix reuse, NVMe", "$3.00 an hour", "a GiB", "40.0 GiB"):
        assert text in done.stdout


def test_reuse_costs_less_where_hits_are_many() -> None:
    """For agents, coded values, reuse in memory and NVMe each lower the cost of a million tokens."""
    dollars = [row["dollars"] for row in planned("--model", "llama-3-70b", "--traffic", "agent")["costs"]]
    assert dollars[2] < 0.5 * dollars[1] < 0.5 * dollars[0]


def test_plot(tmp_path: Path) -> None:
    """The picture is written."""
    path = tmp_path / "plan.svg"
    planned("--model", "llama-3-8b", "--plot", str(path))
    assert "<svg" in path.read_text()


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli, ["plan", *words], prog_name="tierctl")
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("--gpus", "1", "--model", "llama-3.1-405b"),
            r"72 GB, the weights .* take 812; give 12 or more, or --weight-bits$",
        ),
        (("--dtype", "rot-9-9"), r"^tierctl: --dtype: 'rot-9-9' .* fp8, rot-8-8, rot-8-4, rot-4-4$"),
        (("--host", "1"), r"^tierctl: --host: 1 B is below the minimum of 4 KiB"),
        (("--nvme", "4095"), r"^tierctl: --nvme: 4095 B is below the minimum of 4 KiB"),
        (("--trace", "/dev/null"), r"^tierctl: --trace: /dev/null has no request"),
        (("--write", "/nonexistent/x.toml"), r"^tierctl: --write: the directory /nonexistent does not exist"),
        *(
            ((f"--{name}", value), r"no number|not in the range")
            for name in ("prompt", "output", "rate", "parameters", "gpu-price", "memory-price", "disk-price")
            for value in ("nan", "inf", "-1", "1e300")
        ),
        *(((f"--{name}", "1" + "0" * 400), "not in the range") for name in ("context", "concurrency", "gpus")),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], fault: str) -> None:
    """Each wrong value gives an error that names the option and its limit, before anything is computed."""
    assert re.search(fault, refused("--model", "llama-3-8b", *words))


def test_parameters_must_be_known(tmp_path: Path) -> None:
    """Without parameters no time follows, however many GPUs are given; given ones keep the active share."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt-oss-120b"]))
    assert refused("--model", str(path), "--gpus", "8").endswith("give --parameters")
    asked = {"traffic": "chat", "gpu": "h100", "dtype": "fp8", "concurrency": 1, "parameters": 233.6}
    others = dict.fromkeys(("prompt", "output", "rate", "gpus", "weight_bits", "gpu_price", "context", "host", "nvme"))
    model = asked_of(KNOWN["gpt-oss-120b"], None, {**others, **asked, "memory_price": 1, "disk_price": 1}).model
    assert (model.parameters, model.active) == pytest.approx((233.6e9, 10.2e9))


def test_a_context_beyond_the_models_is_said() -> None:
    """More tokens than the model takes are counted, and an assumption says so."""
    long, short = (planned("--model", "llama-3-8b", "--context", n)["assumptions"] for n in ("8193", "8192"))
    assert "takes 8,192 tokens; 8,193 need" in long[0] and len(long) == len(short) + 1


def test_a_written_size_is_exact(tmp_path: Path) -> None:
    """A size that no unit divides is written in bytes, and a tier of 0 is told from the planned ones."""
    path = tmp_path / "tierd.toml"
    planned("--model", "llama-3-8b", "--host", "0", "--nvme", "100000002048", "--write", str(path))
    assert 'capacity = "97656252 KiB"' in path.read_text() and "# Not planned" in path.read_text()


def test_weights_as_published() -> None:
    """gpt-oss-120b, whose weights have 4.25 bits, fits one GPU of 80 GB; with 16 bits it needs eight."""
    for words, count in (("--gpus", "1"), 1), (("--weight-bits", "16"), 8):
        answer = planned("--model", "gpt-oss-120b", *words)
        assert answer["room_bytes"] == pytest.approx(count * 72e9 - 116.8e9 * (2 if count > 1 else 4.25 / 8))


@pytest.mark.parametrize(
    ("rate", "said"), [("3.23", r"most [\d,]+ drive writes a day; .* lasts [\d.]+ days"), ("0.0001", "years")]
)
def test_life_of_a_drive_is_readable(rate: str, said: str) -> None:
    """Writes that wear a drive out in days are said in days, and no figure has an exponent."""
    words = ["plan", "--model", "llama-3-8b", "--host", "0", "--nvme", "512GiB", "--rate", rate]
    done = CliRunner().invoke(cli, words, prog_name="tierctl", env={"COLUMNS": "200"})
    assert re.search(said, done.stdout), done.stdout


def test_requests_beyond_the_context_are_said() -> None:
    """Traffic of longer requests than the model takes wastes nothing, and an assumption names the remedy."""
    made = planned("--model", "llama-3-8b")
    assert made["waste"]["contiguous"] == 0
    assert "12,740 tokens is longer than 8,192; give --prompt" in made["assumptions"][0]
    assert not any("longer" in line for line in planned("--model", "llama-3-8b", "--prompt", "2000")["assumptions"])
