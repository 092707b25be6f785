"""A vLLM engine in its own process, which the tests of the integrations drive over a pipe.

Purpose: several engines side by side, each of which a test may end. Non-purpose: serving. Every
wait has a deadline. The process is a fork of this one, which has imported vLLM (some seconds) and
has not used it or torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S, CALL_S, END_S = 600.0, 300.0, 60.0
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""Variables that must be set before vLLM is imported; conftest.py sets them."""
OF_LLM: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "seed": 0,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256_cbor",
    "max_num_seqs": 4,
    "disable_log_stats": False,
}


@dataclass(frozen=True)
class Answer:
    """To one prompt. logprobs: of the answer's tokens. cached: tokens of the prompt not computed.
    finish: reason of its end. seconds: to the first token, or of the batch if vLLM has no such
    metric."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str
    seconds: float


class EngineEnded(RuntimeError):
    """The engine's process has ended; the message has the end of its log."""


class Engine:
    """`with Engine(model, connector={...}) as engine: engine.generate([[1, 2, 3]])`.

    connector: of kv_transfer_config; kv_role is kv_both. env: more variables. of_llm: of vllm.LLM.
    """

    def __init__(
        self, model: Path, *, connector: dict[str, Any] | None = None, env: dict[str, str] | None = None, **of_llm: Any
    ) -> None:
        self._setup = {"model": str(model), "connector": connector, "of_llm": OF_LLM | of_llm}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- ends with the engine
        self._process, self._pipe = in_fork(_serve, env or {}, log=self._log.fileno())

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    @property
    def log(self) -> str:
        """The engine's output so far."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Greedy, as one batch. sampling: more of SamplingParams; `salts`, `loras`: one for each prompt."""
        self.begin(prompts, max_tokens=max_tokens, **sampling)
        return self.end()

    def begin(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **sampling: Any) -> None:
        """Begins a generate; `end` returns the answers."""
        self._send("generate", prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens, **sampling)

    def end(self) -> list[Answer]:
        """The answers to `begin`."""
        return [Answer(**answer) for answer in self._receive(CALL_S)]

    def settle(self) -> None:
        """Steps the engine until no work is pending, so that computed blocks are saved."""
        self.ask("settle")

    def reset(self, *, connector: bool = False) -> bool:
        """Settles and drops vLLM's own prefix cache; connector: resets the connector's cache too."""
        return bool(self.ask("reset", connector=connector))

    def metrics(self) -> dict[str, float]:
        """The engine's Prometheus metrics: name with labels -> value."""
        return dict(self.ask("metrics"))

    def ask(self, call: str, **given: Any) -> Any:
        """Calls the engine's side. Raises EngineEnded, or RuntimeError for an error there or a timeout."""
        self._send(call, **given)
        return self._receive(CALL_S)

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._process.kill()
        self._process.join(END_S)

    def __enter__(self) -> Self:
        try:
            self._send("start", **self._setup)
            self._receive(START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.has_ended:
            try:
                self.ask("stop")
                self._process.join(END_S)
            except (EngineEnded, RuntimeError):
                pass
        if not self.has_ended:
            self.kill()
        self._pipe.close()
        self._log.close()

    def _send(self, call: str, **given: Any) -> None:
        try:
            self._pipe.send((call, given))
        except OSError:
            raise EngineEnded(f"engine has ended; its log:\n{self.log[-6000:]}") from None

    def _receive(self, timeout_s: float) -> Any:
        try:
            value, error = self._pipe.recv() if self._pipe.poll(timeout_s) else (None, "no answer in time")
        except (EOFError, OSError):
            raise EngineEnded(f"engine has ended; its log:\n{self.log[-6000:]}") from None
        if error:
            raise RuntimeError(f"{error}\n{self.log[-3000:]}")
        return value


@contextmanager
def engines() -> Iterator[Callable[..., Engine]]:
    """start(model, connector=..., **of_llm): an engine that runs until this context ends. The same
    arguments give the same running engine, unless a fresh one is asked for."""
    running: dict[str, Engine] = {}
    with ExitStack() as stack:

        def start(model: Path, *, fresh: bool = False, **given: Any) -> Engine:
            key = repr((model, sorted(given.items(), key=lambda item: item[0])))
            if fresh or key not in running or running[key].has_ended:
                running[key] = stack.enter_context(Engine(model, **given))
            return running[key]

        yield start


def in_fork(
    function: Callable[[Connection], None], env: dict[str, str], *, log: int
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Runs the function in a fork, with a pipe; the fork dies with this process. log: its output."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_forked, args=(function, theirs, env, log))
    process.start()
    theirs.close()
    return process, ours


def _forked(function: Callable[[Connection], None], pipe: Connection, env: dict[str, str], log: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 -- for the process's life
    os.environ.update(env)
    warnings.simplefilter("ignore")  # pytest turns warnings into errors, for our own code only
    status = 0
    try:
        function(pipe)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)  # this process must not run exit handlers of its parent (pytest, its plugins)


def _serve(pipe: Connection) -> None:
    from tests.engines.vllm.engine_side import serve

    serve(pipe)
