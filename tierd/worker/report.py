"""Requests to the engine and its reports.

Reused + computed = prompt tokens. A wholly held prompt computes its last token once more, because
its logits are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tierd.errors import InvalidArgument
from tierd.worker.far import FarChoice, FarReport
from tierd.worker.tokens.choice import TokenChoice


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    tokens: ids, at least one. temperature: 0 is greedy. seed: of the random draws.
    samples: continuations of the one prompt, which share its pages.
    stop: ids that end a sequence; the id is its last token.
    marks: Report.stored_tokens of earlier turns, where a short block may lie.
    token_policy: which tokens decoding attends to; None: all.
    far: decoding brings parts of the prompt as it reads them, for prompts larger than the near
    tier; None: it reads all pages in place. Not together with a token policy.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1
    stop: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    token_policy: TokenChoice | None = None
    far: FarChoice | None = None

    def checked(self) -> Request:
        """The request itself. Raises InvalidArgument for an impossible one."""
        if not self.tokens:
            raise InvalidArgument("request.tokens: empty; begin with the model's first token")
        for name, low in (("max_new_tokens", 1), ("samples", 1), ("temperature", 0), ("seed", 0)):
            if not getattr(self, name) >= low:
                raise InvalidArgument(f"request.{name}: {getattr(self, name)} is below {low}; choose a larger value")
        if self.token_policy:
            self.token_policy.checked()
        if self.far:
            self.far.checked()
        if self.far and self.token_policy:
            raise InvalidArgument(
                "request.far: given with a token_policy, which chooses tokens itself; give one of them"
            )
        return self


@dataclass(slots=True)
class Report:
    """One sequence's result and costs. Times are in seconds from the start of its turn.

    tokens: generated. stopped: one of Request.stop ended it. reused_tokens: not computed.
    tier_tokens: reused tokens by the name of their tier. computed_tokens: of the prompt.
    acquire_s: finding and fetching the prefix, a part of ttft_s, the time to the first token.
    decode_s: the sequence's steps. recomputed_tokens: computed again after a lost page.
    stored_tokens: reusable by a later request, which passes it as a mark.
    dropped_tokens: by a token policy, from each layer and head. far: what was read of a far prompt.
    advised_compute_tokens: of the computed ones, those that were stored, but slower to load.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    acquire_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    committed_blocks: int = 0
    recomputed_tokens: int = 0
    stored_tokens: int = 0
    dropped_tokens: int = 0
    far: FarReport = field(default_factory=FarReport)
    advised_compute_tokens: int = 0

    def fresh(self) -> Report:
        """The start of a fork's report: the same prompt, nothing committed yet."""
        return replace(self, tokens=[], committed_blocks=0, far=FarReport())
