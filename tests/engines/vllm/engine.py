"""A vLLM engine in a process of its own, asked over a pipe: what tests of the integrations drive.

Purpose: several engines beside each other, each with a life that a test may end. Non-purpose: serving. Every wait has a deadline. The process is a
fork of this one, which has imported vLLM (some seconds) and has done nothing with it or with torch.
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
"""What must be set before vLLM is imported (conftest.py does)."""
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
    """To one prompt. logprobs: of the tokens said; cached: tokens of the prompt that were not computed; finish: why it ended; seconds: until the first
    token, where one prompt was given alone; of the batch otherwise."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str
    seconds: float


class EngineEnded(RuntimeError):
    """The engine's process has gone, or said nothing in time; the end of its log is in the message."""


class Engine:
    """`with Engine(model, connector={...}) as engine: engine.generate([[1, 2, 3]])`.

    connector: of kv_transfer_config (kv_role is kv_both); env: added to the environment; whatever else: of vllm.LLM.
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
        """What the engine has printed."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Greedy, all prompts as one batch. sampling: more of SamplingParams; `salts` and `loras` are lists, one of each prompt."""
        self.begin(prompts, max_tokens=max_tokens, **sampling)
        return self.end()

    def begin(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **sampling: Any) -> None:
        """As generate, not waited for: `end` gives the answers."""
        self._send("generate", prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens, **sampling)

    def end(self) -> list[Answer]:
        """The answers to `begin`."""
        return [Answer(**answer) for answer in self._receive(CALL_S)]

    def settle(self) -> None:
        """Lets the engine step until nothing is under way: what was computed has been saved."""
        self.ask("settle")

    def reset(self, *, connector: bool = False) -> bool:
        """Settles and forgets vLLM's own prefix cache; connector: asks the connector to forget too."""
        return bool(self.ask("reset", connector=connector))

    def metrics(self) -> dict[str, float]:
        """Of the engine's Prometheus registry: name with labels -> value."""
        return dict(self.ask("metrics"))

    def ask(self, call: str, **given: Any) -> Any:
        """Any call of the engine's side. Raises EngineEnded, RuntimeError for what was raised there."""
        self._send(call, **given)
        return self._receive(CALL_S)

    def kill(self) -> None:
        """SIGKILL."""
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
    """start(model, connector=..., **of_llm): an engine that is kept until this ends. One that was started with the same arguments, and has not ended, is
    given again, unless a fresh one is asked for."""
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
    """The function in a fork of this process with its end of a pipe; it ends when this process does. log: takes all that it prints."""
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
    warnings.simplefilter("ignore")  # pytest's errors are for our own code
    status = 0
    try:
        function(pipe)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)  # what this process has from its parent (pytest, its plugins) is not ours to end


def _serve(pipe: Connection) -> None:
    from tests.engines.vllm.engine_side import serve

    serve(pipe)
