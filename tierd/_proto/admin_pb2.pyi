from tierd._proto import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "instance", "pid", "uptime_s", "state", "sessions", "leases", "reservations", "blocks", "counters", "notices", "cpu_s", "queues")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class QueuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: str
    pid: int
    uptime_s: float
    state: str
    sessions: int
    leases: int
    reservations: int
    blocks: int
    counters: _containers.ScalarMap[str, int]
    notices: _containers.RepeatedScalarFieldContainer[str]
    cpu_s: float
    queues: _containers.ScalarMap[str, int]
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., blocks: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., notices: _Optional[_Iterable[str]] = ..., cpu_s: _Optional[float] = ..., queues: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierInfo(_message.Message):
    __slots__ = ("name", "kind", "capacity_bytes", "used_bytes", "assigned_bytes", "pages_reserved", "pages_ready", "pages_retiring", "pages_pinned", "evictions", "bytes_read", "bytes_written", "place", "mode", "serving", "classes", "trouble", "pages_quarantined", "unready_bytes", "unready_reason", "codec", "level")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    PAGES_READY_FIELD_NUMBER: _ClassVar[int]
    PAGES_RETIRING_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    UNREADY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREADY_REASON_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: _cache_pb2.TierKind
    capacity_bytes: int
    used_bytes: int
    assigned_bytes: int
    pages_reserved: int
    pages_ready: int
    pages_retiring: int
    pages_pinned: int
    evictions: int
    bytes_read: int
    bytes_written: int
    place: str
    mode: str
    serving: bool
    classes: _containers.RepeatedCompositeFieldContainer[ClassInfo]
    trouble: str
    pages_quarantined: int
    unready_bytes: int
    unready_reason: str
    codec: str
    level: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[_cache_pb2.TierKind, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., assigned_bytes: _Optional[int] = ..., pages_reserved: _Optional[int] = ..., pages_ready: _Optional[int] = ..., pages_retiring: _Optional[int] = ..., pages_pinned: _Optional[int] = ..., evictions: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., place: _Optional[str] = ..., mode: _Optional[str] = ..., serving: bool = ..., classes: _Optional[_Iterable[_Union[ClassInfo, _Mapping]]] = ..., trouble: _Optional[str] = ..., pages_quarantined: _Optional[int] = ..., unready_bytes: _Optional[int] = ..., unready_reason: _Optional[str] = ..., codec: _Optional[str] = ..., level: _Optional[int] = ...) -> None: ...

class ClassInfo(_message.Message):
    __slots__ = ("class_bytes", "domain", "segments", "pages", "pages_free")
    CLASS_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    class_bytes: int
    domain: int
    segments: int
    pages: int
    pages_free: int
    def __init__(self, class_bytes: _Optional[int] = ..., domain: _Optional[int] = ..., segments: _Optional[int] = ..., pages: _Optional[int] = ..., pages_free: _Optional[int] = ...) -> None: ...

class TiersReply(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierInfo]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierInfo, _Mapping]]] = ...) -> None: ...

class BlocksRequest(_message.Message):
    __slots__ = ("tier", "namespace", "has_namespace", "pinned", "hash_prefix", "sort", "limit", "offset")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HAS_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HASH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    tier: str
    namespace: int
    has_namespace: bool
    pinned: bool
    hash_prefix: str
    sort: str
    limit: int
    offset: int
    def __init__(self, tier: _Optional[str] = ..., namespace: _Optional[int] = ..., has_namespace: bool = ..., pinned: bool = ..., hash_prefix: _Optional[str] = ..., sort: _Optional[str] = ..., limit: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("hash", "parent", "namespace", "position", "tokens", "bytes", "pins", "hits", "idle_s", "tiers", "declined", "priority", "retention_s")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: bytes
    namespace: int
    position: int
    tokens: int
    bytes: int
    pins: int
    hits: int
    idle_s: float
    tiers: _containers.RepeatedScalarFieldContainer[str]
    declined: str
    priority: int
    retention_s: float
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., namespace: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., pins: _Optional[int] = ..., hits: _Optional[int] = ..., idle_s: _Optional[float] = ..., tiers: _Optional[_Iterable[str]] = ..., declined: _Optional[str] = ..., priority: _Optional[int] = ..., retention_s: _Optional[float] = ...) -> None: ...

class BlocksReply(_message.Message):
    __slots__ = ("blocks", "total")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    total: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: str
    def __init__(self, hash: _Optional[str] = ...) -> None: ...

class PageInfo(_message.Message):
    __slots__ = ("tier", "state", "segment", "slot", "offset", "generation", "pins")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    segment: int
    slot: int
    offset: int
    generation: int
    pins: int
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ..., segment: _Optional[int] = ..., slot: _Optional[int] = ..., offset: _Optional[int] = ..., generation: _Optional[int] = ..., pins: _Optional[int] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("block", "pages", "children", "digest", "slices")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    block: BlockInfo
    pages: _containers.RepeatedCompositeFieldContainer[PageInfo]
    children: _containers.RepeatedScalarFieldContainer[bytes]
    digest: bytes
    slices: int
    def __init__(self, block: _Optional[_Union[BlockInfo, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[PageInfo, _Mapping]]] = ..., children: _Optional[_Iterable[bytes]] = ..., digest: _Optional[bytes] = ..., slices: _Optional[int] = ...) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("id", "pid", "uid", "tenant", "name", "sdk", "state", "age_s", "leases", "reservations", "pinned_bytes", "reserved_bytes", "engine", "namespaces")
    class EngineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SDK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    id: int
    pid: int
    uid: int
    tenant: str
    name: str
    sdk: str
    state: str
    age_s: float
    leases: int
    reservations: int
    pinned_bytes: int
    reserved_bytes: int
    engine: _containers.ScalarMap[str, str]
    namespaces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., tenant: _Optional[str] = ..., name: _Optional[str] = ..., sdk: _Optional[str] = ..., state: _Optional[str] = ..., age_s: _Optional[float] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., engine: _Optional[_Mapping[str, str]] = ..., namespaces: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("id", "tenant", "epoch", "model", "text", "blocks", "current", "encoding")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    id: int
    tenant: str
    epoch: int
    model: str
    text: str
    blocks: int
    current: bool
    encoding: Encoding
    def __init__(self, id: _Optional[int] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., blocks: _Optional[int] = ..., current: bool = ..., encoding: _Optional[_Union[Encoding, _Mapping]] = ...) -> None: ...

class Encoding(_message.Message):
    __slots__ = ("blocks", "plain_bytes", "stored_bytes", "error", "encode_s", "decoded_blocks", "decoded_bytes", "decode_s", "not_fitting")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NOT_FITTING_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    plain_bytes: int
    stored_bytes: int
    error: float
    encode_s: float
    decoded_blocks: int
    decoded_bytes: int
    decode_s: float
    not_fitting: int
    def __init__(self, blocks: _Optional[int] = ..., plain_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., error: _Optional[float] = ..., encode_s: _Optional[float] = ..., decoded_blocks: _Optional[int] = ..., decoded_bytes: _Optional[int] = ..., decode_s: _Optional[float] = ..., not_fitting: _Optional[int] = ...) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("hashes", "tier")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    def __init__(self, hashes: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks", "bytes", "pinned")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    pinned: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("hashes", "tier")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    def __init__(self, hashes: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("release", "deadline_s", "undo")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    release: bool
    deadline_s: float
    undo: bool
    def __init__(self, release: bool = ..., deadline_s: _Optional[float] = ..., undo: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("leases_left",)
    LEASES_LEFT_FIELD_NUMBER: _ClassVar[int]
    leases_left: int
    def __init__(self, leases_left: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("blocks", "bytes", "left")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    left: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class BumpEpochRequest(_message.Message):
    __slots__ = ("model", "namespace")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: int
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[int] = ...) -> None: ...

class BumpEpochReply(_message.Message):
    __slots__ = ("namespaces", "blocks")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    blocks: int
    def __init__(self, namespaces: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class QuiesceRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class QuiesceReply(_message.Message):
    __slots__ = ("transfers",)
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    transfers: int
    def __init__(self, transfers: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("tier", "deadline_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    deadline_s: float
    def __init__(self, tier: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("trouble",)
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    trouble: str
    def __init__(self, trouble: _Optional[str] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("tier", "bandwidth", "audit")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    bandwidth: int
    audit: bool
    def __init__(self, tier: _Optional[str] = ..., bandwidth: _Optional[int] = ..., audit: bool = ...) -> None: ...

class ScrubTier(_message.Message):
    __slots__ = ("tier", "pages", "bytes", "pages_held", "bad", "unread", "pages_quarantined")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    pages: int
    bytes: int
    pages_held: int
    bad: int
    unread: int
    pages_quarantined: int
    def __init__(self, tier: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., pages_held: _Optional[int] = ..., bad: _Optional[int] = ..., unread: _Optional[int] = ..., pages_quarantined: _Optional[int] = ...) -> None: ...

class ScrubPass(_message.Message):
    __slots__ = ("tiers", "finished", "elapsed_s", "ended_ago_s", "audited", "audit_fault")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FAULT_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[ScrubTier]
    finished: bool
    elapsed_s: float
    ended_ago_s: float
    audited: bool
    audit_fault: str
    def __init__(self, tiers: _Optional[_Iterable[_Union[ScrubTier, _Mapping]]] = ..., finished: bool = ..., elapsed_s: _Optional[float] = ..., ended_ago_s: _Optional[float] = ..., audited: bool = ..., audit_fault: _Optional[str] = ...) -> None: ...

class ScrubStatusRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: str
    def __init__(self, tier: _Optional[str] = ...) -> None: ...

class QuarantinedPage(_message.Message):
    __slots__ = ("tier", "segment", "slot", "offset", "fault", "age_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    segment: int
    slot: int
    offset: int
    fault: str
    age_s: float
    def __init__(self, tier: _Optional[str] = ..., segment: _Optional[int] = ..., slot: _Optional[int] = ..., offset: _Optional[int] = ..., fault: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class ScrubStatusReply(_message.Message):
    __slots__ = ("period_s", "bandwidth", "current", "last", "quarantine")
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    bandwidth: int
    current: ScrubPass
    last: ScrubPass
    quarantine: _containers.RepeatedCompositeFieldContainer[QuarantinedPage]
    def __init__(self, period_s: _Optional[float] = ..., bandwidth: _Optional[int] = ..., current: _Optional[_Union[ScrubPass, _Mapping]] = ..., last: _Optional[_Union[ScrubPass, _Mapping]] = ..., quarantine: _Optional[_Iterable[_Union[QuarantinedPage, _Mapping]]] = ...) -> None: ...

class RecordStartRequest(_message.Message):
    __slots__ = ("name", "max_bytes", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_bytes: int
    seconds: float
    def __init__(self, name: _Optional[str] = ..., max_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class RecordStopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("state", "name", "path", "reason", "requests", "blocks", "distinct", "lost", "bytes", "max_bytes", "elapsed_s", "seconds")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: str
    name: str
    path: str
    reason: str
    requests: int
    blocks: int
    distinct: int
    lost: int
    bytes: int
    max_bytes: int
    elapsed_s: float
    seconds: float
    def __init__(self, state: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., reason: _Optional[str] = ..., requests: _Optional[int] = ..., blocks: _Optional[int] = ..., distinct: _Optional[int] = ..., lost: _Optional[int] = ..., bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class WearRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DriveInfo(_message.Message):
    __slots__ = ("device", "model", "capacity_bytes", "rotational", "has_health", "percentage_used", "written_bytes", "power_on_hours", "warning", "trouble")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROTATIONAL_FIELD_NUMBER: _ClassVar[int]
    HAS_HEALTH_FIELD_NUMBER: _ClassVar[int]
    PERCENTAGE_USED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_ON_HOURS_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    device: str
    model: str
    capacity_bytes: int
    rotational: bool
    has_health: bool
    percentage_used: int
    written_bytes: int
    power_on_hours: int
    warning: int
    trouble: str
    def __init__(self, device: _Optional[str] = ..., model: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., rotational: bool = ..., has_health: bool = ..., percentage_used: _Optional[int] = ..., written_bytes: _Optional[int] = ..., power_on_hours: _Optional[int] = ..., warning: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class StoreWear(_message.Message):
    __slots__ = ("tier", "path", "capacity_bytes", "admission", "written_today_bytes", "written_since_start_bytes", "written_bytes", "write_bytes_per_s", "has_budget", "budget_bytes_per_day", "budget_burst_bytes", "budget_left_bytes", "declined", "drives", "has_life", "life_days", "life_basis")
    class DeclinedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_SINCE_START_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HAS_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BURST_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    HAS_LIFE_FIELD_NUMBER: _ClassVar[int]
    LIFE_DAYS_FIELD_NUMBER: _ClassVar[int]
    LIFE_BASIS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    path: str
    capacity_bytes: int
    admission: str
    written_today_bytes: int
    written_since_start_bytes: int
    written_bytes: int
    write_bytes_per_s: float
    has_budget: bool
    budget_bytes_per_day: float
    budget_burst_bytes: float
    budget_left_bytes: float
    declined: _containers.ScalarMap[str, int]
    drives: _containers.RepeatedCompositeFieldContainer[DriveInfo]
    has_life: bool
    life_days: float
    life_basis: str
    def __init__(self, tier: _Optional[str] = ..., path: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., admission: _Optional[str] = ..., written_today_bytes: _Optional[int] = ..., written_since_start_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., write_bytes_per_s: _Optional[float] = ..., has_budget: bool = ..., budget_bytes_per_day: _Optional[float] = ..., budget_burst_bytes: _Optional[float] = ..., budget_left_bytes: _Optional[float] = ..., declined: _Optional[_Mapping[str, int]] = ..., drives: _Optional[_Iterable[_Union[DriveInfo, _Mapping]]] = ..., has_life: bool = ..., life_days: _Optional[float] = ..., life_basis: _Optional[str] = ...) -> None: ...

class WearReply(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreWear]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreWear, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("block", "request", "hashes", "namespace", "last", "misses")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    block: str
    request: str
    hashes: bytes
    namespace: int
    last: int
    misses: bool
    def __init__(self, block: _Optional[str] = ..., request: _Optional[str] = ..., hashes: _Optional[bytes] = ..., namespace: _Optional[int] = ..., last: _Optional[int] = ..., misses: bool = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("cause", "text", "hash", "ago_s", "tier", "facts", "namespace")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    text: str
    hash: bytes
    ago_s: float
    tier: str
    facts: _containers.ScalarMap[str, str]
    namespace: int
    def __init__(self, cause: _Optional[str] = ..., text: _Optional[str] = ..., hash: _Optional[bytes] = ..., ago_s: _Optional[float] = ..., tier: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., namespace: _Optional[int] = ...) -> None: ...

class RequestDecision(_message.Message):
    __slots__ = ("ago_s", "request", "session", "kind", "namespace", "model", "tokens_asked", "tokens_missed", "tier_tokens", "waited_s", "cause", "times")
    class TierTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ASKED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MISSED_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    ago_s: float
    request: str
    session: int
    kind: str
    namespace: int
    model: str
    tokens_asked: int
    tokens_missed: int
    tier_tokens: _containers.ScalarMap[str, int]
    waited_s: float
    cause: Cause
    times: int
    def __init__(self, ago_s: _Optional[float] = ..., request: _Optional[str] = ..., session: _Optional[int] = ..., kind: _Optional[str] = ..., namespace: _Optional[int] = ..., model: _Optional[str] = ..., tokens_asked: _Optional[int] = ..., tokens_missed: _Optional[int] = ..., tier_tokens: _Optional[_Mapping[str, int]] = ..., waited_s: _Optional[float] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., times: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("requests", "blocks", "decisions", "bytes", "since_s")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestDecision]
    blocks: _containers.RepeatedCompositeFieldContainer[Cause]
    decisions: int
    bytes: int
    since_s: float
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestDecision, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Cause, _Mapping]]] = ..., decisions: _Optional[int] = ..., bytes: _Optional[int] = ..., since_s: _Optional[float] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("namespace", "has_namespace", "root", "depth", "limit", "sort", "model")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HAS_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    has_namespace: bool
    root: str
    depth: int
    limit: int
    sort: str
    model: str
    def __init__(self, namespace: _Optional[int] = ..., has_namespace: bool = ..., root: _Optional[str] = ..., depth: _Optional[int] = ..., limit: _Optional[int] = ..., sort: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("hash", "parent", "namespace", "position", "blocks", "tokens", "hits", "idle_s", "tier_blocks", "blocks_below", "tokens_below", "hits_below", "children", "leaves")
    class TierBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BELOW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BELOW_FIELD_NUMBER: _ClassVar[int]
    HITS_BELOW_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: int
    namespace: int
    position: int
    blocks: int
    tokens: int
    hits: int
    idle_s: float
    tier_blocks: _containers.ScalarMap[str, int]
    blocks_below: int
    tokens_below: int
    hits_below: int
    children: int
    leaves: int
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[int] = ..., namespace: _Optional[int] = ..., position: _Optional[int] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., hits: _Optional[int] = ..., idle_s: _Optional[float] = ..., tier_blocks: _Optional[_Mapping[str, int]] = ..., blocks_below: _Optional[int] = ..., tokens_below: _Optional[int] = ..., hits_below: _Optional[int] = ..., children: _Optional[int] = ..., leaves: _Optional[int] = ...) -> None: ...

class DepthReuse(_message.Message):
    __slots__ = ("from_tokens", "to_tokens", "blocks", "hits")
    FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    from_tokens: int
    to_tokens: int
    blocks: int
    hits: int
    def __init__(self, from_tokens: _Optional[int] = ..., to_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ...) -> None: ...

class TreeReply(_message.Message):
    __slots__ = ("nodes", "blocks", "tokens", "is_cut", "depths", "tokens_shared", "runs", "took_s", "blocks_cut_off")
    NODES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SHARED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[TreeNode]
    blocks: int
    tokens: int
    is_cut: bool
    depths: _containers.RepeatedCompositeFieldContainer[DepthReuse]
    tokens_shared: int
    runs: int
    took_s: float
    blocks_cut_off: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., is_cut: bool = ..., depths: _Optional[_Iterable[_Union[DepthReuse, _Mapping]]] = ..., tokens_shared: _Optional[int] = ..., runs: _Optional[int] = ..., took_s: _Optional[float] = ..., blocks_cut_off: _Optional[int] = ...) -> None: ...

class CeilingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CeilingPoint(_message.Message):
    __slots__ = ("factor", "bytes", "hit_ratio")
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    factor: float
    bytes: int
    hit_ratio: float
    def __init__(self, factor: _Optional[float] = ..., bytes: _Optional[int] = ..., hit_ratio: _Optional[float] = ...) -> None: ...

class CeilingWindow(_message.Message):
    __slots__ = ("seconds", "covered_s", "tokens", "hit_ratio", "points")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COVERED_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    covered_s: float
    tokens: int
    hit_ratio: float
    points: _containers.RepeatedCompositeFieldContainer[CeilingPoint]
    def __init__(self, seconds: _Optional[float] = ..., covered_s: _Optional[float] = ..., tokens: _Optional[int] = ..., hit_ratio: _Optional[float] = ..., points: _Optional[_Iterable[_Union[CeilingPoint, _Mapping]]] = ...) -> None: ...

class CeilingReply(_message.Message):
    __slots__ = ("windows", "bytes", "trouble", "rate", "lost")
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    windows: _containers.RepeatedCompositeFieldContainer[CeilingWindow]
    bytes: int
    trouble: str
    rate: float
    lost: int
    def __init__(self, windows: _Optional[_Iterable[_Union[CeilingWindow, _Mapping]]] = ..., bytes: _Optional[int] = ..., trouble: _Optional[str] = ..., rate: _Optional[float] = ..., lost: _Optional[int] = ...) -> None: ...

class SettingValue(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("settings", "check")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[SettingValue]
    check: bool
    def __init__(self, settings: _Optional[_Iterable[_Union[SettingValue, _Mapping]]] = ..., check: bool = ...) -> None: ...

class SettingChange(_message.Message):
    __slots__ = ("name", "before", "after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: str
    after: str
    def __init__(self, name: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class LiveSetting(_message.Message):
    __slots__ = ("name", "value", "default_value", "allowed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    default_value: str
    allowed: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., default_value: _Optional[str] = ..., allowed: _Optional[str] = ...) -> None: ...

class SetReply(_message.Message):
    __slots__ = ("changes", "settings", "notes")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SettingChange]
    settings: _containers.RepeatedCompositeFieldContainer[LiveSetting]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changes: _Optional[_Iterable[_Union[SettingChange, _Mapping]]] = ..., settings: _Optional[_Iterable[_Union[LiveSetting, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...
