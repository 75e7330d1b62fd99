"""What of a model's weights comes and goes while it is served: rows of the window, and layers without a
mask.

Rows change between two layers, on the compute lane, when no read is in flight; layers between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from flashd.disk.slabs import SlabBuffer
from flashd.errors import FlashdError
from flashd.kernels.lane import ComputeLane
from flashd.memory.budget import Allocation
from flashd.prefetch.hybrid import HybridFFN
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.store.base import WeightStore
from flashd.store.in_memory import InMemoryStore

log = logging.getLogger("flashd.memory")


class ElasticRows:
    """The window's rows and their pages.

    Args:
        sparse: who uses them.
        lane: where they are used.
        memory: their pages.
        stride_bytes: of a row.
        fixed_k: the window's length where somebody has chosen it; 0: as long as fits.
    """

    def __init__(
        self, sparse: SparseFFN, lane: ComputeLane, memory: SlabBuffer, stride_bytes: int, fixed_k: int
    ) -> None:
        self._sparse = sparse
        self._lane = lane
        self._memory = memory
        self._stride_bytes = stride_bytes
        self._fixed_k = fixed_k
        self._wanted: Allocation | None = None
        self._done: Allocation | None = None
        sparse.between_layers = self.apply

    @property
    def nbytes(self) -> int:
        """Pages in use."""
        return self._memory.size_bytes

    def ask(self, allocation: Allocation) -> None:
        """Rows shall be like this; the next layer that begins sees to it, or ``apply``."""
        self._wanted = allocation

    def apply(self) -> None:
        """Do what was asked for, if it is not done; on the lane, while no layer is being computed."""
        wanted = self._wanted
        if wanted is None or wanted is self._done:
            return
        # Told to be done even if it fails: the next change tries again, not each layer.
        self._done = wanted
        self._sparse.quiesce()
        window, nbytes = self._sparse.window, wanted.n_rows * self._stride_bytes
        with self._lane.memory_work():
            window.policy.k = self._fixed_k or max(1, wanted.k)
            try:
                if nbytes > self._memory.size_bytes:
                    self._memory.resize(nbytes)
                window.resize(wanted.n_rows, window.balanced(wanted.capacity))
                if nbytes < self._memory.size_bytes:
                    self._memory.resize(nbytes)
            except (FlashdError, ValueError) as exc:
                log.warning("the window keeps its memory: %s", exc)
            self._sparse.count_rows()


class ElasticLayers:
    """Layers without a mask that are in RAM as long as there is room.

    Args:
        source: who uses them.
        store: where they are read from.
        make: an FFN over a loaded layer.

    Attributes:
        kept: layers in RAM.
    """

    def __init__(
        self,
        source: HybridFFN,
        store: WeightStore,
        make: Callable[[InMemoryStore], ResidentFFN],
        kept: Sequence[int],
    ) -> None:
        self.kept = set(kept)
        self._source = source
        self._store = store
        self._make = make
        self._wanted = frozenset(kept)
        self._loaded: dict[int, ResidentFFN] = {}
        self._loading: asyncio.Task[None] | None = None

    @property
    def loading(self) -> bool:
        """Whether there will be something to ``apply`` later."""
        return self._loading is not None

    def ask(self, layers: Sequence[int]) -> None:
        """These shall be in RAM; those that go do so at the next ``apply``, others when they are loaded."""
        self._wanted = frozenset(layers)
        self._loaded = {i: part for i, part in self._loaded.items() if i in self._wanted}
        if self._wanted - self.kept and self._loading is None:
            self._loading = asyncio.create_task(self._load())

    def apply(self) -> None:
        """Let go of layers that shall go, and use those that have come; between two steps."""
        for layer in self.kept - self._wanted:
            self._source.stream_layer(layer)
            self.kept.discard(layer)
        while self._loaded:
            layer, part = self._loaded.popitem()
            self._source.keep_layer(layer, part)
            self.kept.add(layer)

    async def _load(self) -> None:
        """Read what is wanted and not there, a layer at a time, until nothing is."""
        try:
            while missing := sorted(self._wanted - self.kept - self._loaded.keys()):
                store = await InMemoryStore.load(self._store, missing[:1])
                if missing[0] in self._wanted:
                    self._loaded[missing[0]] = self._make(store)
        except (FlashdError, MemoryError) as exc:
            log.warning("a layer cannot be kept in memory: %s", exc)
        finally:
            self._loading = None

    async def close(self) -> None:
        """Stop loading."""
        if self._loading is not None:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
