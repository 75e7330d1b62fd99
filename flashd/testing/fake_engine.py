"""A read engine over memory that misbehaves on purpose.

Only the device is fake: queues, priorities, retries, continuing and cancelling are the native code of
the real engines.
"""

from __future__ import annotations

import os

from flashd.disk import _native
from flashd.disk.native_engine import NativeEngine, scratch_bytes
from flashd.types import U8Array


class FakeEngine(NativeEngine):
    """Reads ``content`` as a file with O_DIRECT would be read, with faults.

    Args:
        content: ``[nbytes]`` uint8, C-contiguous: the file.
        alignment_bytes: reads that are not aligned to it fail with EINVAL.
        depth: reads in flight.
        seed: of everything random.
        short_share: share of reads that deliver less than asked for.
        eio_share: share of reads that fail with EIO, retries included.
        einval_first: so many reads fail with EINVAL before the first one works (a mount where
            opening with O_DIRECT works and reading doesn't).
        latency_us: each read takes a random part of it.
        reorder: reads end in any order.
    """

    _core: _native.Fake

    def __init__(
        self,
        content: U8Array,
        *,
        alignment_bytes: int = 512,
        depth: int = 32,
        seed: int = 0,
        short_share: float = 0.0,
        eio_share: float = 0.0,
        einval_first: int = 0,
        latency_us: int = 0,
        reorder: bool = True,
    ) -> None:
        core = _native.Fake(
            alignment_bytes,
            content,
            scratch_bytes(alignment_bytes),
            depth,
            seed,
            short_share,
            eio_share,
            einval_first,
            latency_us,
            reorder,
        )
        # The core never looks at its file, but there has to be one.
        super().__init__("fake", core, [os.devnull], alignment_bytes, depth, "asked for", flags=0)
        self.paths = ("fake",)
        self._content_bytes = len(content)

    def file_bytes(self, file: int) -> int:
        """See ``NativeEngine.file_bytes``."""
        return self._content_bytes

    @property
    def max_in_flight(self) -> int:
        """The most reads that were in flight at once."""
        return self._core.max_in_flight()
