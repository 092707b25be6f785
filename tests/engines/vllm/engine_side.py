"""The engine's side of `engine.py`: vllm.LLM behind calls over a pipe."""

from __future__ import annotations

import json
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.engines.vllm import at_ranks

SETTLE_S = 120.0


def serve(pipe: Connection) -> None:
    """Answers each call with (value, error), until `stop` or the end of the pipe."""
    side, call = Side(), ""
    while call != "stop":
        try:
            call, given = pipe.recv()
        except EOFError:
            break
        try:
            reply = (getattr(side, call)(**given), None)
        except Exception as error:
            traceback.print_exc()
            reply = (None, f"{type(error).__name__}: {error}")
        pipe.send(reply)


class Side:
    """Holds one LLM."""

    llm: Any = None

    def start(self, model: str, connector: dict[str, Any] | None, of_llm: dict[str, Any]) -> bool:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**{"kv_role": "kv_both"} | connector) if connector else None
        self.llm = LLM(model, kv_transfer_config=transfer, **of_llm)
        return True

    def stop(self) -> bool:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        return True

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salts: list[str] | None = None,
        loras: list[list[Any] | None] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        if salts is not None:
            asked = [{**prompt, "cache_salt": salt} for prompt, salt in zip(asked, salts, strict=True)]
        adapters = [LoRARequest(*lora) if lora else None for lora in loras] if loras else None
        fixed = {"temperature": 0, "detokenize": False, "ignore_eos": True, "logprobs": 1}
        params = SamplingParams(**{"max_tokens": max_tokens} | fixed | sampling)
        began = time.perf_counter()
        results = self.llm.generate(asked, params, use_tqdm=False, lora_request=adapters)
        took = time.perf_counter() - began
        return [_answer(result, took) for result in results]

    def settle(self) -> bool:
        """Steps until the scheduler has no requests."""
        core = self.llm.llm_engine.engine_core.engine_core
        until = time.monotonic() + SETTLE_S
        while core.scheduler.has_requests():
            self.llm.llm_engine.step()
            if time.monotonic() > until:
                raise TimeoutError(f"engine: not at rest after {SETTLE_S:g} s")
        return True

    def reset(self, connector: bool) -> bool:
        self.settle()
        return bool(self.llm.llm_engine.reset_prefix_cache(False, connector))

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        return {
            f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }

    def evaluate(self, code: str) -> Any:
        """Evaluates a Python expression over `llm`, for the question of a single test."""
        return eval(code, {"llm": self.llm})

    def on_ranks(self, what: str, given: list[Any]) -> list[Any]:
        """Calls a function of at_ranks.py in each worker, and returns their answers."""
        return list(self.llm.collective_rpc(getattr(at_ranks, what), args=tuple(given)))


def _answer(result: Any, took: float) -> dict[str, Any]:
    said = result.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(said.logprobs or [], said.token_ids, strict=False)]
    first = getattr(result.metrics, "first_token_latency", 0.0) or took
    return {
        "tokens": list(said.token_ids),
        "logprobs": logprobs,
        "cached": result.num_cached_tokens or 0,
        "finish": str(said.finish_reason),
        "seconds": first,
    }
