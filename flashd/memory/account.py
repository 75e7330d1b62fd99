"""What memory is promised to, and what that leaves for weights. Pure.

::

    limit     = the least of what was asked for and what the machine has    (all that this process may take)
    fixed     = the process itself + a prompt's scratch + KV caches
    weights   = limit - fixed: resident weights, predictors, stream buffers; what is left buys layers and rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashd.memory.budget import Demand

# A sequence whose length nobody has said has its KV cache set aside by so many tokens; as much is set aside
# even while nothing runs.
KV_BLOCK_TOKENS = 512
# So long after its end a request's KV cache is still counted: the next one probably wants as much, and a
# window that comes and goes between two requests helps nobody.
KV_HOLD_S = 60.0
_MB = 1e6


@dataclass(frozen=True)
class Beside:
    """Memory beside the weights.

    Attributes:
        base_bytes: the process: interpreter, libraries, tokenizer.
        prompt_bytes: scratch of a prompt's chunk.
        kv_token_bytes: keys and values of a token.
        max_context: of the model, in tokens.
        kv_tokens: KV cache that is set aside even while nothing runs.
    """

    base_bytes: int
    prompt_bytes: int
    kv_token_bytes: int
    max_context: int
    kv_tokens: int = KV_BLOCK_TOKENS

    @property
    def least_kv_bytes(self) -> int:
        """KV cache that is set aside even while nothing runs."""
        return min(self.kv_tokens, self.max_context) * self.kv_token_bytes

    @property
    def fixed_bytes(self) -> int:
        """All of it while nothing runs."""
        return self.base_bytes + self.prompt_bytes + self.least_kv_bytes


@dataclass(frozen=True)
class Claim:
    """A sequence's KV cache.

    Attributes:
        granted_bytes: set aside for it.
        most_bytes: what it may come to need.
    """

    granted_bytes: int
    most_bytes: int


def can_all_end(claims: Sequence[Claim], room_bytes: int) -> bool:
    """Whether there is an order in which all sequences get what they may need, one after the other, each with
    what those before it have given back (the banker's algorithm): nobody then waits for ever."""
    free = room_bytes - sum(claim.granted_bytes for claim in claims)
    if free < 0:
        return False
    for claim in sorted(claims, key=lambda claim: claim.most_bytes - claim.granted_bytes):
        if claim.most_bytes - claim.granted_bytes > free:
            return False
        free += claim.granted_bytes
    return True


@dataclass
class MemoryAccount:
    """One process's memory.

    Attributes:
        demand: of the model.
        beside: what else there is.
        asked_bytes: what the process may take at most; None: what there is.
        ceiling_bytes: what the machine has for it at present; None: not known.
        promised_bytes: KV caches of the running sequences with all tokens that they may come to hold.
        counted_bytes: of these, what is set aside at present.
        excess_bytes: what the process was seen to take beyond all that is accounted for.
    """

    demand: Demand
    beside: Beside
    asked_bytes: int | None = None
    ceiling_bytes: int | None = None
    promised_bytes: int = 0
    counted_bytes: int = 0
    excess_bytes: int = 0
    _peaks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def limit_bytes(self) -> int:
        """What the process may take in all."""
        known = [limit for limit in (self.asked_bytes, self.ceiling_bytes) if limit is not None]
        return min(known, default=1 << 62)

    @property
    def least_bytes(self) -> int:
        """The smallest limit with which the model is started."""
        return self.beside.fixed_bytes + self.demand.least_bytes

    def kv_bytes(self, now_s: float) -> int:
        """KV caches as they are counted: at least a block, and what there was within the last minute."""
        self._peaks = [(at_s, kept) for at_s, kept in self._peaks if now_s - at_s < KV_HOLD_S]
        recent = max((kept for _, kept in self._peaks), default=0)
        return max(self.beside.least_kv_bytes, self.counted_bytes, recent)

    def count_kv(self, promised_bytes: int, counted_bytes: int, now_s: float) -> None:
        """Say what the running sequences' KV caches are."""
        if counted_bytes < self.counted_bytes:
            self._peaks = [(at, kept) for at, kept in self._peaks if kept > self.counted_bytes]
            self._peaks.append((now_s, self.counted_bytes))
        self.promised_bytes, self.counted_bytes = promised_bytes, counted_bytes

    def beside_bytes(self, now_s: float) -> int:
        """All but weights."""
        return self.beside.base_bytes + self.excess_bytes + self.beside.prompt_bytes + self.kv_bytes(now_s)

    def weights_bytes(self, now_s: float, limit_bytes: int | None = None) -> int:
        """The budget of weights: resident ones, predictors, stream buffers, layers and rows."""
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return max(self.demand.least_bytes, limit - self.beside_bytes(now_s))

    def most_kv_bytes(self, *, asked: bool = False) -> int:
        """The largest KV cache, all sequences together, that leaves what a step needs at least.

        Args:
            asked: by what was asked for alone: what will never be more.
        """
        limit = self.limit_bytes if not asked else 1 << 62 if self.asked_bytes is None else self.asked_bytes
        other = self.beside.base_bytes + self.excess_bytes + self.beside.prompt_bytes
        return max(0, limit - other - self.demand.least_bytes)

    def shortage(self, kv_bytes: int) -> str:
        """In figures, why a sequence with such a KV cache has no room even alone."""
        beside = self.beside
        return (
            f"its KV cache takes {kv_bytes / _MB:.1f} MB, and {self.limit_bytes / _MB:.1f} MB hold at "
            f"most {self.most_kv_bytes() / _MB:.1f} MB beside weights and buffers "
            f"({self.demand.least_bytes / _MB:.1f} MB), a prompt's scratch "
            f"({beside.prompt_bytes / _MB:.1f} MB) and the process ({beside.base_bytes / _MB:.1f} MB)"
        )
