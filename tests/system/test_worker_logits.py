"""The worker's logits against Hugging Face transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierd.cli.conversation import BYTE_BOS
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageShape
from tierd.worker.report import Request

TEXT = 'def add(left, right):\n    """Return the sum of left and right."""\n    return left + right\n\n\ndef sub(left, right):\n    """Return'
# From transformers 5.23 on torch 2.13 (float32, CPU), after TEXT: the five likeliest bytes, logits.
GOLDEN = {" ": 12.5208, "s": 9.8516, "e": 6.528, "i": 5.3382, "-": 4.5131}

CONFIGS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64},
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
    "multi-query": {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96},
    "own-head-dim": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 32},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "tie_word_embeddings": True},
    "llama3-rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def engine_logits(model: Llama, tokens: list[int], *, chunk_tokens: int = 32) -> Any:
    """Logits after a prompt, through pages and chunks."""
    shape = PageShape(model.spec.geometry("float32"), 16, model.backend)
    engine = Engine(model, LocalPages(shape), options=EngineOptions(chunk_tokens=chunk_tokens))
    sequence = engine.begin(Request(tuple(tokens)))
    engine.end(sequence)
    return sequence.logits


def decode_logits(model: Llama, tokens: list[int], prompt: int) -> Any:
    """Logits after each token from the prompt's last on, with tokens fed one at a time: paged decode."""
    shape = PageShape(model.spec.geometry("float32"), 16, model.backend)
    engine = Engine(model, LocalPages(shape))
    sequence = engine.begin(Request(tuple(tokens[:prompt]), len(tokens) - prompt + 1))
    rows = [sequence.logits]
    engine.pick([sequence])
    for token in tokens[prompt:]:
        sequence.tokens[-1] = token  # forced, independent of the pick
        engine.step([sequence])
        rows.append(sequence.logits)
    engine.end(sequence)
    return np.stack(rows)


def libraries() -> tuple[Any, Any]:
    """torch and transformers, or a skip that names the missing one."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tierd[worker]' transformers")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    return torch, transformers


def reference_logits(model: Any, tokens: list[int]) -> Any:
    """[tokens, vocab] of a transformers model."""
    torch, _ = libraries()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_on_random_models(tmp_path: Path, name: str, library: str) -> None:
    """A sharded model saved by transformers gives its logits here, in chunked prefill and paged decode."""
    torch, transformers = libraries()
    torch.manual_seed(7)
    sizes = {"vocab_size": 97, "intermediate_size": 112, "num_hidden_layers": 3, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, **CONFIGS[name], initializer_range=0.15)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    ours = Llama(open_checkpoint(tmp_path), Backend(library))
    tokens = np.random.default_rng(3).integers(0, 97, 150).tolist()
    want = reference_logits(theirs, tokens)
    np.testing.assert_allclose(engine_logits(ours, tokens), want[-1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(decode_logits(ours, tokens, 130), want[129:], rtol=0, atol=2e-4)


def test_a_bf16_checkpoint_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Weights stored in bfloat16 have the same values on both sides."""
    torch, transformers = libraries()
    torch.manual_seed(11)
    config = transformers.LlamaConfig(vocab_size=50, intermediate_size=64, num_hidden_layers=2, **CONFIGS["grouped"])
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = list(range(40))
    got = engine_logits(Llama(open_checkpoint(tmp_path)), tokens)
    np.testing.assert_allclose(got, reference_logits(theirs, tokens)[-1], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny_llama(shared: Path) -> Path:
    """The folder of the trained model, or a skip."""
    place = shared / "models" / "tiny-llama"
    if not (place / "model.safetensors").exists():
        pytest.skip("../shared/models/tiny-llama (the trained model) is not beside this checkout")
    return place


def test_tiny_llama_equals_transformers(tiny_llama: Path) -> None:
    """On trained weights and real text, 900 tokens in, the logits are those of transformers."""
    _, transformers = libraries()
    ours = Llama(open_checkpoint(tiny_llama))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, dtype="float32").eval()
    tokens = [BYTE_BOS, *(tiny_llama / "eval.txt").read_text(encoding="utf-8")[:900].encode()]
    want = reference_logits(theirs, tokens)
    np.testing.assert_allclose(engine_logits(ours, tokens, chunk_tokens=128), want[-1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(decode_logits(ours, tokens, 880), want[879:], rtol=0, atol=2e-4)


def test_tiny_llama_gives_the_logits_on_record(tiny_llama: Path) -> None:
    """Without torch too, the likeliest next bytes and their logits equal those recorded from transformers."""
    logits = engine_logits(Llama(open_checkpoint(tiny_llama)), [BYTE_BOS, *TEXT.encode()])
    best = np.argsort(logits)[::-1][: len(GOLDEN)]
    assert [chr(b) for b in best] == list(GOLDEN)
    np.testing.assert_allclose(logits[best], list(GOLDEN.values()), rtol=0, atol=2e-4)
