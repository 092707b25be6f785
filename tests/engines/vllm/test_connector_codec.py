"""vLLM with TierdConnector and the option `codec`: restored prompts answer as the codec allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.codecs import USABLE
from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted
from tests.engines.vllm.engine import Answer, Engine
from tests.engines.vllm.test_connector_parts import HEAD, HEADS, NAMES, TOKENS, caches, config, kv_config
from tests.engines.vllm.tiered import VERIFIED, prompt
from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError
from tierd.integrations.pieces import copy_in
from tierd.integrations.vllm.memory import KVMemory
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.spaces import spaces_of
from tierd.integrations.vllm.values import _write, geometry_of, order_on_cpu, order_on_gpu
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(900)]
EXACT = [codec.name for codec in USABLE if codec.is_exact]
BF16 = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.bfloat16)
TEXTS, PREFIX, POSITIONS = 20, 512, 100
"""Texts, tokens of each that are restored, and positions after them."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED, faults=True) as daemon:
        yield daemon


def engine_with(daemon: Daemon, engine: Callable[..., Engine], model: Path, codec: str, warm: list[int]) -> Engine:
    llm = engine(model, connector=connector(daemon, codec=codec), dtype="bfloat16", max_model_len=1024, fresh=True)
    await_hits(llm, warm)
    return llm


@pytest.mark.parametrize("codec", EXACT)
def test_an_exact_codec_changes_nothing(
    codec: str, daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """Restored prompts answer bit-equal to computed ones, and fewer bytes are stored."""
    llm = engine_with(daemon, engine, make_model(), codec, prompt(100, 70))
    for number in range(4):
        asked = [prompt(number, 300)]
        computed = llm.generate(asked, max_tokens=24)[0]
        assert llm.reset()
        restored = llm.generate(asked, max_tokens=24)[0]
        assert restored.cached == 299 // BLOCK_TOKENS * BLOCK_TOKENS
        assert_same(computed, restored)


def test_eight_bits_keep_the_first_choice(daemon: Daemon, engine: Callable[..., Engine], shared: Path) -> None:
    """After prefixes restored from rot-8-8, 99.5 % of 2,000 first choices on real text are those after
    computed ones. Half of the bytes are stored."""
    model, text = shared / "models" / "tiny-llama", (shared / "models" / "tiny-llama" / "eval.txt").read_bytes()
    llm = engine_with(daemon, engine, model, "rot-8-8", [256, *text[-100:]])
    asked = [
        [256, *text[at : at + PREFIX + position]]
        for at in range(0, TEXTS * 10_000, 10_000)
        for position in range(1, POSITIONS + 1)
    ]
    before = llm.metrics()
    computed = llm.generate(asked, max_tokens=1)
    assert llm.reset()
    after = llm.metrics()
    restored = llm.generate(asked, max_tokens=1)
    blocks = counted(llm.metrics(), "loaded_blocks")
    same = np.mean([a.tokens == b.tokens for a, b in zip(computed, restored, strict=True)])
    print(f"rot-8-8: same first choice {same:.4%}, log-probabilities off by {_off(computed, restored):.4f} at most")
    assert blocks >= TEXTS * PREFIX // BLOCK_TOKENS
    assert same >= 0.995
    stored = counted(after, "saved_bytes") - counted(before, "saved_bytes")
    blocks_of_text, token_bytes = (1 + PREFIX + POSITIONS) // BLOCK_TOKENS, 6 * 2 * 2 * 64 * 2
    assert 0.51 < stored / (TEXTS * blocks_of_text * BLOCK_TOKENS * token_bytes) < 0.55


def _off(one: list[Answer], other: list[Answer]) -> float:
    pairs = zip(one, other, strict=True)
    return max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs if a.tokens == b.tokens)


def test_engines_of_other_codecs_compute(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """An engine finds nothing of an engine with another codec, and a restart with the same one finds all."""
    asked = [prompt(50, 200)]
    one = engine_with(daemon, engine, make_model(), "int8", prompt(100, 70))
    computed = one.generate(asked, max_tokens=8)[0]
    one.settle()
    other = engine_with(daemon, engine, make_model(), "rot-8-8", prompt(101, 70))
    alone = other.generate(asked, max_tokens=8)[0]
    assert computed.cached == alone.cached == 0
    assert_same(computed, alone, within=CLOSE)
    again = engine_with(daemon, engine, make_model(), "int8", prompt(102, 70))
    assert again.generate(asked, max_tokens=8)[0].cached == 192


def test_an_engine_with_an_unfit_codec_does_not_start(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """A codec for another type of KV is an error at the start, which names the option."""
    with pytest.raises(Exception, match="dtype 'float32'"):
        engine(make_model(), connector=connector(daemon, codec="int8"), fresh=True)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (BF16, {"codec": "zip"}, "unknown"),
        (MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16), {}, "no layers"),
        (FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=80, dtype=torch.bfloat16), {}, "head_dim 80"),
        (BF16, {"codec": "", "calibration": "x"}, "without `codec`"),
    ],
)
def test_refusals(spec: object, options: dict[str, str], said: str) -> None:
    """Unknown codecs and unfit shapes are refused when the scheduler begins."""
    with pytest.raises(ConfigError, match=said):
        spaces_of(config(), kv_config(spec), ConnectorOptions(**({"codec": "rot-4-4"} | options)))


def test_the_codec_is_in_the_namespace() -> None:
    """Namespaces of all codecs differ; without a codec the geometry has the layers alone."""
    spaces = [
        spaces_of(config(), kv_config(BF16), ConnectorOptions(codec=codec))[0].spec for codec in ("", "int8", "rot-4-4")
    ]
    assert [spec.codec for spec in spaces] == ["", "int8", "rot-4-4"]
    assert spaces[0].geometry == KVGeometry(layers=3) and spaces[1].geometry == KVGeometry(3, HEADS, HEAD, "bfloat16")
    assert spaces[1].block_bytes == 64 + spaces[0].block_bytes


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_the_order_of_values_on_gpus(layout: KVCacheLayout) -> None:
    """In every layout of vLLM the order picks each head's keys and values of each token."""
    kv = kv_config(BF16)
    tensors = {name: tensor.bfloat16() for name, tensor in caches(layout).items()}
    page = np.zeros(len(NAMES) * 2 * TOKENS * HEADS * HEAD * 2, np.uint8)
    copy_in(KVMemory(tensors, kv).pieces(0, 5), page)
    tensor = tensors[NAMES[1]]
    order = order_on_gpu(geometry_of(kv.kv_cache_groups[0]), TOKENS, is_by_head=tensor.stride(1) > tensor.stride(2))
    found = page.view(np.uint16).reshape(len(NAMES), -1)[1][order].reshape(2, TOKENS, HEADS, HEAD)
    wanted = tensor[5].unflatten(-1, (2, HEAD)).permute(2, 1, 0, 3)
    assert (found == wanted.contiguous().view(torch.int16).numpy().view(np.uint16)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_order_of_values_on_cpus(dtype: torch.dtype, parts: int) -> None:
    """The order finds each key and value where vLLM's kernel has written it."""
    tokens, kernel_tokens = 64, 64 // parts
    given = torch.randn(2, tokens, HEADS, HEAD).to(dtype)
    memory = torch.zeros(parts, HEADS, 2 * kernel_tokens, HEAD, dtype=dtype)
    for part in range(parts):
        for head in range(HEADS):
            span = slice(part * kernel_tokens, (part + 1) * kernel_tokens)
            _write(given[:, span, head : head + 1], memory[part : part + 1, head : head + 1])
    order = order_on_cpu(
        KVGeometry(1, HEADS, HEAD, str(dtype).removeprefix("torch.")), tokens, kernel_tokens=kernel_tokens
    )
    flat = memory.permute(1, 0, 2, 3).contiguous().reshape(-1)
    assert torch.equal(flat[torch.from_numpy(order)].reshape(given.shape), given)


def test_geometry() -> None:
    """Dense attention of one shape has a geometry; other blocks are opaque."""
    group = SimpleNamespace(kv_cache_spec=BF16, layer_names=NAMES)
    assert geometry_of(group) == KVGeometry(3, HEADS, HEAD, "bfloat16")
