"""vLLM on the CPU with tierd: one prompt, twice, and the tokens of it that were not computed.

It uses the configurations beside this file. Run `PYTHONPATH=. python deploy/examples/vllm/on_cpu.py
{connector,tier} MODEL_DIR` beside a `tierd serve`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
ON_CPU = {"spec_name": "CpuTiering", "spec_module_path": "tests.engines.vllm.cpu_tiering", "cpu_bytes_to_use": 16 << 20}
"""Replaces TieringOffloadingSpec, whose copies need a GPU."""


def engine(face: str, model: Path) -> Any:
    """vLLM with the configuration of that name."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    words = json.loads(Path(__file__).with_name(f"{face}.json").read_text(encoding="utf-8"))
    if face == "tier":
        words["kv_connector_extra_config"] |= ON_CPU
    return LLM(
        str(model),
        kv_transfer_config=KVTransferConfig(**words),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        prefix_caching_hash_algo="sha256_cbor",
    )


def main(face: str, model: Path) -> None:
    """Makes the model if there is none, and asks it twice."""
    from vllm import SamplingParams

    from tests.engines.vllm.models import write_model

    if not model.exists():
        write_model("llama", model)
    llm = engine(face, model)
    prompt = {"prompt_token_ids": [3 + i * 7 % 500 for i in range(400)]}
    for turn in ("first", "second"):
        said = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, detokenize=False), use_tqdm=False)[0]
        print(
            f"{turn}: {said.num_cached_tokens or 0} of 400 tokens were not computed; said {list(said.outputs[0].token_ids)}"
        )
        core = llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():  # until tierd has all computed blocks
            llm.llm_engine.step()
        llm.reset_prefix_cache(reset_connector=face == "tier")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
