"""tierd's KV connector: `--kv-transfer-config
'{"kv_connector":"TierdConnector","kv_role":"kv_both",...}'`.

It implements vLLM's interface, once for the scheduler and once for each worker; scheduler.py and
worker.py do the work. Short loads from memory run at the beginning of the step that computes with
them. Others are asynchronous. A request whose blocks fail to load is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.plan import Done, Orders
from tierd.integrations.vllm.scheduler import SchedulerSide
from tierd.integrations.vllm.stats import TierdMetrics, TierdStats, sources_of
from tierd.integrations.vllm.worker import Ended, WorkerSide

WHERE = "kv_connector_extra_config"
logger = init_logger(__name__)


class TierdConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises Unsupported, ConfigError when it is made; never afterwards."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.read(transfer.kv_connector_extra_config or {}, where=WHERE)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._ended = Ended()
        if role is KVConnectorRole.SCHEDULER:
            _warn_of_policy(transfer.kv_load_failure_policy)
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, options)
            if self._scheduler.is_off:
                logger.warning_once("vLLM's prefix caching is off: tierd looks up, loads and saves nothing.")
        else:
            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerSide(vllm_config, kv_cache_config, options, rank=rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save only causes a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 -- as 0.33 asks it
        """False: tierd does not follow KV memory that moves (0.33)."""
        return False

    def shutdown(self) -> None:
        """Ends running transfers, with a deadline."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Records the location of KV in this worker."""
        self._of_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Hands loads to threads before the step computes; `start_load_kv` may come after it."""
        assert isinstance(kv_connector_metadata, Orders)
        self._of_worker.begin_early(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carries out the step's short loads, and hands the others to threads if they have not begun."""
        self._of_worker.begin_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: the step's loads have ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Starts saves without waiting: the scheduler retains their blocks."""
        self._of_worker.begin_saves(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended, and failed ones of several groups."""
        self._ended = self._of_worker.take_loads()
        return KVConnectorTransferResults(finished_recving=self._ended.requests, failed_recving=self._ended.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As get_transfer_results, for callers that ask in two parts."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of one group whose load failed."""
        blocks, self._ended.blocks = self._ended.blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> Done:
        """Saves that have ended, and what the step cost."""
        return self._of_worker.take_saves()

    # -- scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the manager whose blocks are retained while they are saved."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """Starts the lookup here, before the scheduler asks."""
        if not self._of_scheduler.is_off:
            self._of_scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens that tierd has beyond vLLM's own hit; None if not known yet."""
        tokens = self._of_scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._of_scheduler.loads_in_step(request)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Splits a hit into tokens from memory and from a store."""
        return sources_of(self._of_scheduler.sources(request, num_external_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Takes the blocks to load into."""
        if num_external_tokens:
            self._of_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's loads and saves."""
        return self._of_scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the workers' ended transfers."""
        self._of_scheduler.reported(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished_all_groups, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Releases its blocks at once: the pool's own count retains those that are being saved."""
        self._of_scheduler.finished(request, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for saves releases blocks."""
        return self._of_scheduler.is_retaining

    def has_pending_push_work(self) -> bool:
        """True while saves run: they end with a step."""
        return self._of_scheduler.is_retaining

    def reset_cache(self) -> bool | None:
        """The engine no longer finds previously stored blocks."""
        self._of_scheduler.forget()
        return True

    def take_events(self) -> Iterable[Any]:
        """None: the daemon publishes events (tierd.integrations.events)."""
        return ()

    # -- metrics

    def get_kv_connector_stats(self) -> TierdStats | None:
        """Counts since the last step."""
        side = self._scheduler or self._worker
        counts = side.take_counts() if side else None
        return TierdStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierdStats:
        """Stats that come from another process."""
        return TierdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TierdMetrics:
        """For vLLM's Prometheus endpoint."""
        return TierdMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- inside

    @property
    def _of_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM asks the scheduler's side of a worker"
        return self._scheduler

    @property
    def _of_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM asks the worker's side of the scheduler"
        return self._worker

    @property
    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders


def _warn_of_policy(policy: str) -> None:
    if policy != "recompute":
        logger.warning_once(
            "kv_load_failure_policy is %r: a block that tierd loses while it is loaded fails its request. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to have it computed instead.',
            policy,
        )
