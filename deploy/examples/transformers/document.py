"""A question about a long document: the first process reads it, the next ones restore it.

It shows the calls of tierd around `generate()`. Run `python
deploy/examples/transformers/document.py FILE [MODEL]` beside a `tierd serve`. MODEL: a directory or
a name that transformers loads; without one, random weights that read bytes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tierd.integrations.transformers import TierdCache, TierdStore

QUESTION = "\n\nWhat is this about?\n"


def random_model() -> Any:
    """6 layers; the same weights in every process."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=256, max_position_embeddings=4096, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def first_token_s(model: Any, ids: torch.Tensor, cache: TierdCache | None) -> float:
    """Seconds until the answer begins."""
    began = time.monotonic()
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False)
    return time.monotonic() - began


def main(document: Path, name: str = "") -> None:
    """Reads or restores the document; then reads it anew, to compare."""
    text = document.read_text(encoding="utf-8", errors="replace")
    if name:
        model = AutoModelForCausalLM.from_pretrained(name).eval()
        ids = AutoTokenizer.from_pretrained(name)(text + QUESTION, return_tensors="pt").input_ids
    else:
        model = random_model()
        ids = torch.tensor([[*text.encode()[:2000], *QUESTION.encode()]])
    first_token_s(model, ids[:, :8], None)  # warm
    with TierdStore(model) as store:
        began = time.monotonic()
        cache = TierdCache.restore(store, ids)
        restored_s = time.monotonic() - began
        print(f"{cache.restored} of {ids.shape[1]} tokens restored in {restored_s:.3f} s")
        answered_s = restored_s + first_token_s(model, ids, cache)
        print(f"{cache.save(ids)} tokens are with tierd for the next process")
    anew_s = first_token_s(model, ids, None)
    print(f"first token after {answered_s:.3f} s; without tierd {anew_s:.3f} s; saved {anew_s - answered_s:.3f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
