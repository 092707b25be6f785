from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_KIND_DEVICE: _ClassVar[TierKind]
    TIER_KIND_HOST: _ClassVar[TierKind]
    TIER_KIND_NVME: _ClassVar[TierKind]
    TIER_KIND_ARCHIVE: _ClassVar[TierKind]

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_MISS: _ClassVar[BlockStatus]
    BLOCK_STATUS_READY: _ClassVar[BlockStatus]
    BLOCK_STATUS_RESERVED: _ClassVar[BlockStatus]
    BLOCK_STATUS_EXISTS: _ClassVar[BlockStatus]
    BLOCK_STATUS_NO_ROOM: _ClassVar[BlockStatus]
    BLOCK_STATUS_REJECTED: _ClassVar[BlockStatus]
    BLOCK_STATUS_DEFERRED: _ClassVar[BlockStatus]
    BLOCK_STATUS_FAILED: _ClassVar[BlockStatus]
    BLOCK_STATUS_CORRUPT: _ClassVar[BlockStatus]
    BLOCK_STATUS_PENDING: _ClassVar[BlockStatus]

class Need(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NEED_PREFIX: _ClassVar[Need]
    NEED_LAST_TOKENS: _ClassVar[Need]
    NEED_LAST_STATE: _ClassVar[Need]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_DURABLE: _ClassVar[Durability]

class Intent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INTENT_DEFAULT: _ClassVar[Intent]
    INTENT_NONE: _ClassVar[Intent]
    INTENT_LOAD: _ClassVar[Intent]
TIER_KIND_DEVICE: TierKind
TIER_KIND_HOST: TierKind
TIER_KIND_NVME: TierKind
TIER_KIND_ARCHIVE: TierKind
BLOCK_STATUS_MISS: BlockStatus
BLOCK_STATUS_READY: BlockStatus
BLOCK_STATUS_RESERVED: BlockStatus
BLOCK_STATUS_EXISTS: BlockStatus
BLOCK_STATUS_NO_ROOM: BlockStatus
BLOCK_STATUS_REJECTED: BlockStatus
BLOCK_STATUS_DEFERRED: BlockStatus
BLOCK_STATUS_FAILED: BlockStatus
BLOCK_STATUS_CORRUPT: BlockStatus
BLOCK_STATUS_PENDING: BlockStatus
NEED_PREFIX: Need
NEED_LAST_TOKENS: Need
NEED_LAST_STATE: Need
DURABILITY_MEMORY: Durability
DURABILITY_DURABLE: Durability
INTENT_DEFAULT: Intent
INTENT_NONE: Intent
INTENT_LOAD: Intent

class Geometry(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "layout")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: str
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("model", "tokens_per_block", "block_bytes", "weights_digest", "adapter", "group", "salt", "rank_count", "geometry", "error_limit", "codec")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ERROR_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens_per_block: int
    block_bytes: int
    weights_digest: str
    adapter: str
    group: str
    salt: str
    rank_count: int
    geometry: Geometry
    error_limit: float
    codec: str
    def __init__(self, model: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., block_bytes: _Optional[int] = ..., weights_digest: _Optional[str] = ..., adapter: _Optional[str] = ..., group: _Optional[str] = ..., salt: _Optional[str] = ..., rank_count: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., error_limit: _Optional[float] = ..., codec: _Optional[str] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("namespace", "digest", "epoch", "codecs", "batch_blocks", "share_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    BATCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    digest: bytes
    epoch: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    batch_blocks: int
    share_bytes: int
    def __init__(self, namespace: _Optional[int] = ..., digest: _Optional[bytes] = ..., epoch: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ..., batch_blocks: _Optional[int] = ..., share_bytes: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("namespace", "ranks", "hashes", "tokens_per_block", "tokens", "need", "need_tokens", "digest", "error_limit", "request")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    NEED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    tokens_per_block: int
    tokens: int
    need: Need
    need_tokens: int
    digest: bytes
    error_limit: float
    request: bytes
    def __init__(self, namespace: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., tokens_per_block: _Optional[int] = ..., tokens: _Optional[int] = ..., need: _Optional[_Union[Need, str]] = ..., need_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., error_limit: _Optional[float] = ..., request: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("groups", "intent", "computed")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    intent: Intent
    computed: _containers.RepeatedCompositeFieldContainer[Computed]
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., intent: _Optional[_Union[Intent, str]] = ..., computed: _Optional[_Iterable[_Union[Computed, _Mapping]]] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("request", "tokens", "load_s", "compute_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    tokens: int
    load_s: float
    compute_s: float
    def __init__(self, request: _Optional[bytes] = ..., tokens: _Optional[int] = ..., load_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("tokens", "tier_of", "tier_tokens", "paces", "prefetch")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_OF_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    tier_of: _containers.RepeatedScalarFieldContainer[bytes]
    tier_tokens: _containers.RepeatedScalarFieldContainer[int]
    paces: _containers.RepeatedCompositeFieldContainer[Pace]
    prefetch: int
    def __init__(self, tokens: _Optional[int] = ..., tier_of: _Optional[_Iterable[bytes]] = ..., tier_tokens: _Optional[_Iterable[int]] = ..., paces: _Optional[_Iterable[_Union[Pace, _Mapping]]] = ..., prefetch: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("bytes_per_s", "latency_s", "wait_s")
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: float
    latency_s: float
    wait_s: float
    def __init__(self, bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("groups", "tier", "nth", "copies", "doubted", "by_layer")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    BY_LAYER_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    tier: TierKind
    nth: int
    copies: bool
    doubted: bytes
    by_layer: bool
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., tier: _Optional[_Union[TierKind, str]] = ..., nth: _Optional[int] = ..., copies: bool = ..., doubted: _Optional[bytes] = ..., by_layer: bool = ...) -> None: ...

class GroupHandles(_message.Message):
    __slots__ = ("first", "count", "handles")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    handles: bytes
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., handles: _Optional[bytes] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease", "tokens", "groups", "tier_tokens", "whole")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupHandles]
    tier_tokens: _containers.RepeatedScalarFieldContainer[int]
    whole: bool
    def __init__(self, lease: _Optional[int] = ..., tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupHandles, _Mapping]]] = ..., tier_tokens: _Optional[_Iterable[int]] = ..., whole: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("leases", "prefetches")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    prefetches: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ..., prefetches: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutGroup(_message.Message):
    __slots__ = ("namespace", "rank", "parent", "position", "blocks", "engine_hashes", "engine_per_block", "engine_parent", "token_ids", "priorities", "retention_s", "digest")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_HASHES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    rank: int
    parent: bytes
    position: int
    blocks: bytes
    engine_hashes: bytes
    engine_per_block: int
    engine_parent: bytes
    token_ids: bytes
    priorities: _containers.RepeatedScalarFieldContainer[int]
    retention_s: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    def __init__(self, namespace: _Optional[int] = ..., rank: _Optional[int] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ..., blocks: _Optional[bytes] = ..., engine_hashes: _Optional[bytes] = ..., engine_per_block: _Optional[int] = ..., engine_parent: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., priorities: _Optional[_Iterable[int]] = ..., retention_s: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("groups", "tier", "durability", "nth", "ahead")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[PutGroup]
    tier: TierKind
    durability: Durability
    nth: int
    ahead: int
    def __init__(self, groups: _Optional[_Iterable[_Union[PutGroup, _Mapping]]] = ..., tier: _Optional[_Union[TierKind, str]] = ..., durability: _Optional[_Union[Durability, str]] = ..., nth: _Optional[int] = ..., ahead: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation", "handles", "ahead")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    handles: _containers.RepeatedScalarFieldContainer[bytes]
    ahead: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation: _Optional[int] = ..., handles: _Optional[_Iterable[bytes]] = ..., ahead: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitGroup(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation", "blocks", "durability", "lease", "keep_open", "unwritten", "sums")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_OPEN_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    blocks: CommitGroup
    durability: Durability
    lease: bool
    keep_open: bool
    unwritten: bool
    sums: bytes
    def __init__(self, reservation: _Optional[int] = ..., blocks: _Optional[_Union[CommitGroup, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., lease: bool = ..., keep_open: bool = ..., unwritten: bool = ..., sums: _Optional[bytes] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: bytes
    def __init__(self, sums: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("handles", "lease")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    lease: int
    def __init__(self, handles: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    def __init__(self, reservation: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("groups", "tier", "nth", "ttl_ms")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    tier: TierKind
    nth: int
    ttl_ms: int
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., tier: _Optional[_Union[TierKind, str]] = ..., nth: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("started", "prefetch")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    started: int
    prefetch: int
    def __init__(self, started: _Optional[int] = ..., prefetch: _Optional[int] = ...) -> None: ...

class PutChunk(_message.Message):
    __slots__ = ("group", "durability", "index", "offset", "data", "checksum", "codec", "plain_length")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PLAIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    group: PutGroup
    durability: Durability
    index: int
    offset: int
    data: bytes
    checksum: int
    codec: str
    plain_length: int
    def __init__(self, group: _Optional[_Union[PutGroup, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., codec: _Optional[str] = ..., plain_length: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("group", "first", "codec")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    group: Group
    first: int
    codec: str
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ..., first: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

class GetChunk(_message.Message):
    __slots__ = ("tokens", "index", "offset", "data", "checksum", "length", "status", "plain_length")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    index: int
    offset: int
    data: bytes
    checksum: int
    length: int
    status: int
    plain_length: int
    def __init__(self, tokens: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., length: _Optional[int] = ..., status: _Optional[int] = ..., plain_length: _Optional[int] = ...) -> None: ...

class ReportAttentionRequest(_message.Message):
    __slots__ = ("lease", "group", "mass")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    group: int
    mass: bytes
    def __init__(self, lease: _Optional[int] = ..., group: _Optional[int] = ..., mass: _Optional[bytes] = ...) -> None: ...

class ReportAttentionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ask(_message.Message):
    __slots__ = ("method", "message", "timeout_us", "request", "more", "traceparent")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    method: str
    message: bytes
    timeout_us: int
    request: str
    more: bool
    traceparent: str
    def __init__(self, method: _Optional[str] = ..., message: _Optional[bytes] = ..., timeout_us: _Optional[int] = ..., request: _Optional[str] = ..., more: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("message", "status", "error", "details", "retry_ms")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    status: str
    error: str
    details: str
    retry_ms: int
    def __init__(self, message: _Optional[bytes] = ..., status: _Optional[str] = ..., error: _Optional[str] = ..., details: _Optional[str] = ..., retry_ms: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "kind", "tier", "namespace", "hashes", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_STORED: _ClassVar[Event.Kind]
        KIND_REMOVED: _ClassVar[Event.Kind]
        KIND_LOST: _ClassVar[Event.Kind]
        KIND_ENDED: _ClassVar[Event.Kind]
    KIND_STORED: Event.Kind
    KIND_REMOVED: Event.Kind
    KIND_LOST: Event.Kind
    KIND_ENDED: Event.Kind
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: Event.Kind
    tier: int
    namespace: int
    hashes: bytes
    reason: str
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[Event.Kind, str]] = ..., tier: _Optional[int] = ..., namespace: _Optional[int] = ..., hashes: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...
