"""A read engine over memory, that misbehaves on purpose or takes exactly the time it is told to.

Only the device is fake: queues, priorities, retries, continuing and cancelling are the native code of
the real engines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from flashd.disk import _native
from flashd.disk.native_engine import NativeEngine, scratch_bytes
from flashd.types import U8Array


@dataclass(frozen=True)
class FakeDevice:
    """A device that keeps time. Reads in flight wait for their latency side by side; then their bytes
    pass one read after another. So ``n`` reads of ``s`` bytes, at most ``depth`` of them in flight, take
    about the larger of ``n * s / bytes_per_s`` and ``n / depth * (latency + s / bytes_per_s)``.

    Its thread sleeps in between: beyond copying what was read it takes no CPU, and where it wakes up late,
    only that read ends late and not those behind it.

    Attributes:
        latency_us: from a read's turn to its first byte.
        bytes_per_s: of all reads together.
    """

    latency_us: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"a device of {self.latency_us} us and {self.bytes_per_s} bytes/s, expected >= 0 and > 0"
            )


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
        device: how long reads take, instead of ``latency_us`` and ``reorder``.
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
        device: FakeDevice | None = None,
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
            round(device.latency_us * 1000) if device else 0,
            device.bytes_per_s if device else 0.0,
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
