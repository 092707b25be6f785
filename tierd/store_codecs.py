"""Codecs of stores: which blocks a store keeps encoded, and their encoding.

The configuration names a codec per store. A lossy one is used for namespaces whose clients accept
an error, and only up to their limit. Blocks that engines never encode stay as they are here too
(`codecs.coding.stays_exact`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from tierd.codecs import block as encoded_block
from tierd.codecs.block import HEADER, IDENTITY, Codec, Context, Decoded, Wanted
from tierd.codecs.calibration import Calibration, load
from tierd.codecs.coding import stays_exact
from tierd.codecs.named import BY_NUMBER
from tierd.codecs.values import Bytes, KVShape
from tierd.core.arrays.sets import kinds
from tierd.core.formats.block import Namespace, NamespaceSpec
from tierd.core.formats.model import StructArray
from tierd.core.plan import Ids, Lengths
from tierd.errors import CorruptRecord, InvalidArgument, Unsupported

CALIBRATIONS = "calibrations"
"""Directory in the state directory. <model>.safetensors, with "--" for "/", is for namespaces of that
model. Any other file there serves blocks that were encoded with it."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """data: the encoded block. error: of a value at most, with the error that it had before."""

    data: Bytes
    codec: int
    version: int
    error: float


@dataclass(slots=True)
class EncodingCounts:
    """Of one namespace since the start. error: the greatest bound. Seconds are of one thread."""

    blocks: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    error: float = 0.0
    encode_s: float = 0.0
    decoded_blocks: int = 0
    decoded_bytes: int = 0
    decode_s: float = 0.0
    not_fitting: int = 0
    """Blocks whose encoding was too long or too coarse, so that they were stored as they are."""


@dataclass
class StoreCodecs:
    """The daemon's codecs; `core.forms.Forms` for its core.

    codecs: by tier position; may be replaced. namespace_of: by id of any rank. calibrations: by the
    file's stem.
    """

    codecs: Mapping[int, Codec]
    namespace_of: Callable[[int], Namespace]
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    counts: dict[int, EncodingCounts] = field(default_factory=dict)
    """By id of rank 0."""

    def __post_init__(self) -> None:
        self._limits: dict[int, float] = {}
        self._lock = threading.Lock()
        self._said: set[tuple[int, int]] = set()
        self._by_hash = {calibration.hash: calibration for calibration in self.calibrations.values()}

    def accept(self, namespace: Namespace, error_limit: float) -> None:
        """A client of the namespace accepts blocks with this error. The greatest limit holds."""
        for each in namespace.ids:
            self._limits[each] = max(error_limit, self._limits.get(each, 0.0))

    def error_limits(self, namespaces: Ids) -> NDArray[np.float32]:
        """As `Forms.error_limits`."""
        return np.array([self._limits.get(each, 0.0) for each in namespaces.tolist()], np.float32)

    def lengths(self, tier: int, blocks: StructArray) -> Lengths:
        """As `Forms.lengths`."""
        lengths: Lengths = blocks["length"].copy()
        codec = self.codecs.get(tier)
        for number in kinds(blocks["namespace"]) if codec else ():
            rows = blocks["namespace"] == number
            shape = self._shape(codec, number) if codec else None
            if codec is None or shape is None:
                continue
            room = HEADER.itemsize + codec.expected_bytes(shape)
            may = ~stays_exact(blocks["position"], blocks["tokens"], shape.tokens)
            lengths[rows & may & (lengths == shape.block_bytes) & (lengths > room)] = room
        return lengths

    def encode(self, tier: int, meta: np.void, plain: Any, *, room: int, out: Bytes | None = None) -> Encoded | None:
        """A block, encoded for the tier. plain: its bytes, which nobody changes meanwhile. out: memory for
        the result, HEADER.itemsize longer than the block.

        None: it does not fit room bytes, or its error would be beyond the namespace's limit.
        """
        number, begun, codec = int(meta["namespace"]), time.thread_time(), self.codecs.get(tier)
        shape = self._shape(codec, number) if codec else None
        counts = self._counts_of(number)
        data = None
        if codec is not None and shape is not None:
            calibration = self._calibration_of(self.namespace_of(number).spec.model)
            context = Context(int(meta["position"]) * shape.tokens, calibration)
            data = encoded_block.encode(codec, plain, shape, context, out)
            head = data[: HEADER.itemsize].view(HEADER)[0]
            error = float(meta["error"]) + float(head["error"])
            is_lossy = not codec.is_exact and error > self._limits.get(number, 0.0)
            if len(data) > room or head["codec"] == IDENTITY or is_lossy:
                data = None
        with self._lock:
            counts.encode_s += time.thread_time() - begun
            if data is None or codec is None:
                counts.not_fitting += 1
                return None
            counts.blocks += 1
            counts.plain_bytes += len(plain)
            counts.stored_bytes += len(data)
            counts.error = max(counts.error, error)
        return Encoded(data, codec.number, codec.version, error)

    def decode(self, meta: np.void, data: Any, out: Bytes | None = None) -> Decoded:
        """An encoded block's bytes. out: memory for them, of their length. Raises CorruptRecord, also for
        a block of another shape, and Unsupported."""
        begun, geometry = time.thread_time(), self.namespace_of(int(meta["namespace"])).spec.geometry
        shape = KVShape(geometry, int(meta["tokens"]))
        if out is not None and len(out) != shape.block_bytes:
            raise CorruptRecord(
                f"encoded block: {shape.block_bytes} bytes when decoded, {len(out)} expected; put it again"
            )
        found = encoded_block.decode(data, BY_NUMBER, self._by_hash, wanted=Wanted(shape), out=out)
        with self._lock:
            counts = self._counts_of(int(meta["namespace"]))
            counts.decode_s += time.thread_time() - begun
            counts.decoded_blocks += 1
            counts.decoded_bytes += len(found.block)
        return found

    def _calibration_of(self, model: str) -> Calibration | None:
        return self.calibrations.get(model.replace("/", "--"))

    def _counts_of(self, number: int) -> EncodingCounts:
        return self.counts.setdefault(self.namespace_of(number).id, EncodingCounts())

    def _shape(self, codec: Codec, number: int) -> KVShape | None:
        """The shape of a full block of the namespace, if the codec may encode it."""
        spec = self.namespace_of(number).spec
        if spec.codec or not (codec.is_exact or self._limits.get(number, 0.0) > 0):
            return None
        try:
            shape = _shape_of(spec)
            codec.check(shape)
            if codec.is_calibrated:
                encoded_block.check_calibration(self._calibration_of(spec.model), shape, codec.name)
        except (InvalidArgument, Unsupported) as error:
            self._say_once(codec, self.namespace_of(number), str(error))
            return None
        return shape

    def _say_once(self, codec: Codec, namespace: Namespace, why: str) -> None:
        """Logs that a namespace's blocks are not encoded."""
        if (codec.number, namespace.id) not in self._said:
            self._said.add((codec.number, namespace.id))
            log.warning("blocks stay as they are", codec=codec.name, namespace=namespace.id, reason=why)


def _shape_of(spec: NamespaceSpec) -> KVShape:
    """Of a full block. Raises InvalidArgument."""
    shape = KVShape(spec.geometry, spec.tokens_per_block)
    if shape.block_bytes != spec.block_bytes:
        raise InvalidArgument(
            f"codec: block_bytes is {spec.block_bytes}, but a block of {shape.text} has {shape.block_bytes}; declare the "
            "geometry of the blocks"
        )
    return shape


def read_calibrations(state_dir: Path) -> dict[str, Calibration]:
    """The calibrations in a state directory, by the files' stems. Unreadable ones are logged."""
    found = {}
    for path in sorted((state_dir / CALIBRATIONS).glob("*.safetensors")):
        try:
            found[path.stem] = load(path)
        except (OSError, CorruptRecord) as error:
            log.warning("calibration not read, so its blocks miss", path=str(path), error=str(error))
    return found
