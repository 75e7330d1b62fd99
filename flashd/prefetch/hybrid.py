"""One FFN source made of several: each layer has the way to its weights that suits it.

Which layers have a mask is known from the calibration; those without are in RAM whole, as many as the
budget holds, and the rest is streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from flashd.config import MAX_BATCH
from flashd.predictor.base import Predictor
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.stats import StreamStats
from flashd.types import F32Array


class HybridFFN:
    """An ``FFNSource`` that passes each layer on to one of its parts.

    Args:
        predictor: says which layers have a mask.
        sparse: those that have one; None where none has.
        resident: layers without one that are in RAM.
        stream: all others; None where there are none.

    ``stream_layer`` and ``keep_layer`` change a layer's way between two steps.

    Attributes:
        sparse, stream: as given.
        stats: time that computing waited for flash, of all parts together.
    """

    def __init__(
        self,
        predictor: Predictor,
        sparse: SparseFFN | None,
        resident: dict[int, ResidentFFN],
        stream: StreamingFFN | None,
        stats: StreamStats,
    ) -> None:
        self.sparse = sparse
        self.stream = stream
        self.stats = stats
        self._parts: list[ResidentFFN | StreamingFFN | SparseFFN] = []
        for layer in range(predictor.n_layers):
            part = sparse if predictor.masked(layer) else resident.get(layer, stream)
            if part is None:
                raise ValueError(f"there is no way to the weights of layer {layer}")
            self._parts.append(part)

    def stream_layer(self, layer: int) -> None:
        """A layer is not in RAM any more: stream it."""
        if self.stream is None:
            raise ValueError(f"there is no way to the weights of layer {layer}")
        self._parts[layer] = self.stream
        self.stream.layers = tuple(sorted({*self.stream.layers, layer}))

    def keep_layer(self, layer: int, part: ResidentFFN) -> None:
        """A layer is in RAM now."""
        self._parts[layer] = part
        if self.stream is not None:
            self.stream.layers = tuple(other for other in self.stream.layers if other != layer)

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``."""
        part = self._parts[layer]
        if self.sparse is not None and part is not self.sparse:
            x = partial(self._watched, layer, x, asyncio.get_running_loop())
        return await part.apply(layer, x)

    def on_lane(self, layer: int, n_tokens: int) -> bool:
        """See ``LaneFFNSource.on_lane``: decoding, of what is not streamed."""
        part = self._parts[layer]
        if n_tokens > MAX_BATCH or isinstance(part, StreamingFFN):
            return False
        return part is not self.sparse or not self.sparse.starved(layer)

    def begin_step(self, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop) -> None:
        """See ``LaneFFNSource.begin_step``."""
        if self.sparse is not None:
            self.sparse.begin_step(x, loop)

    def apply_on_lane(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop
    ) -> Callable[[], F32Array]:
        """See ``LaneFFNSource.apply_on_lane``."""
        part = self._parts[layer]
        if isinstance(part, StreamingFFN):
            raise ValueError(f"layer {layer} is streamed, which needs the event loop")
        if self.sparse is not None and part is not self.sparse:
            x = partial(self._watched, layer, x, loop)
        return part.apply_on_lane(layer, x, loop)

    def _watched(self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop) -> F32Array:
        """The input of a layer without a mask, which the next layer's neurons are guessed from."""
        made = x()
        if self.sparse is not None and len(made) <= MAX_BATCH:
            self.sparse.look_ahead(layer, made, loop)
        return made

    async def close(self) -> None:
        """Wait for reads in flight, then drop the buffers."""
        if self.sparse is not None:
            await self.sparse.close()
        if self.stream is not None:
            await self.stream.close()


class MaskedPrompt:
    """A prompt's chunk through a dense source: every row is read, and each token uses its own.

    Args:
        source: reads or has the rows.
        predictor: makes the masks.
    """

    def __init__(self, source: StreamingFFN | ResidentFFN, predictor: Predictor) -> None:
        self._source = source
        self._predictor = predictor

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``; for layers with a mask."""
        return await self._source.apply(layer, x, partial(self._predictor.predict_prompt, layer))
