"""The conversion itself: open, check, write resident, write FFN rows, publish."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import flashd
from flashd.errors import ConversionError
from flashd.layout.geometry import bundle_bytes, ffn_geometry, layer_offsets
from flashd.layout.manifest import (
    FORMAT_VERSION,
    RESIDENT,
    TOKENIZER,
    FileEntry,
    Manifest,
    from_json,
    to_json,
)
from flashd.tools.convert.background import BackgroundWriter
from flashd.tools.convert.checkpoint import Checkpoint, bundle_dtype, open_checkpoint
from flashd.tools.convert.destination import (
    ALREADY,
    FINGERPRINT,
    Destination,
    check_place,
    made_already,
    stride_alignment,
)
from flashd.tools.convert.ffn import FFNWriter, RowBuilder
from flashd.tools.convert.ffn_file import SUM_BYTES, BundleFileWriter
from flashd.tools.convert.files import HashedFile, hash_file, sync_path, write_errors
from flashd.tools.convert.options import ConvertOptions, Progress
from flashd.tools.convert.resident import ResidentLayout, ResidentWriter, resident_layout, resident_path
from flashd.tools.convert.side_files import printable
from flashd.tools.convert.tokenizer import Tokenizer, build_tokenizer
from flashd.types import DTYPES, DType, FFNGeometry

# Work that a kill may cost; making less durable at a time would only add waiting for the disk.
_COMMIT_BYTES = 64 << 20
_COMMIT_S = 1.0
# Directory entries, manifest, zarr metadata and shard indexes: room beyond the weights.
_SLACK_BYTES = 1 << 20
# Of the manifest's text for people that comes out of the source as it is.
_MAX_NOTE_CHARS = 200

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Extras:
    """What a bundle gets beside what its checkpoint says.

    Attributes:
        provenance: more of it.
        extra_bytes: room that ``finish`` needs.
        finish: writes further files into the directory of the bundle, whose manifest is complete and not
            yet there; durably.
        whole: whether a bundle that the same command made is still as it was made; then it is not made
            again.
    """

    provenance: dict[str, str] = field(default_factory=dict)
    extra_bytes: int = 0
    finish: Callable[[Path, Manifest], None] | None = None
    whole: Callable[[Path, Manifest], bool] | None = None


@dataclass(frozen=True)
class _Job:
    """Everything that is decided before the first byte is written."""

    checkpoint: Checkpoint
    options: ConvertOptions
    dtype: DType
    geometry: FFNGeometry
    layout: ResidentLayout
    tokenizer: Tokenizer
    fingerprint: str
    extras: Extras

    @property
    def total_bytes(self) -> int:
        """Size of the bundle, as near as it is known beforehand."""
        sums = self.geometry.n_layers * self.geometry.n_neurons * SUM_BYTES
        return self.layout.total_bytes + bundle_bytes(self.geometry) + sums


def convert(
    source: Path,
    dest: Path,
    options: ConvertOptions | None = None,
    progress: OnProgress | None = None,
    note: Callable[[str], None] | None = None,
) -> Manifest:
    """Convert a checkpoint into a bundle directory (format 1), streaming.

    A killed or interrupted conversion resumes when it is called again with the same arguments.
    ``dest`` appears whole or not at all.

    Args:
        source: a Hugging Face model directory, or a GGUF file.
        dest: the bundle to make. Its parents are made as needed.
        options: see ``ConvertOptions``.
        progress: called in this thread some times a second.
        note: called with one line about each thing that a person may not expect.

    Returns:
        The manifest of the bundle.

    Raises:
        ConversionError: the source cannot be converted, or ``dest`` not be written.
        OutOfSpaceError: the disk is full, or would be.
        UnsafePickleError: a ``.bin`` file asks for more than tensors.
        TokenizerError: there is a tokenizer that cannot be used.
    """
    options = options or ConvertOptions()
    _check_options(options)
    with _system_errors(source):
        check_place(dest, options.overwrite)
        checkpoint = open_checkpoint(source)
        try:
            return convert_checkpoint(checkpoint, dest, options, progress, note)
        finally:
            checkpoint.source.close()


def convert_checkpoint(
    checkpoint: Checkpoint,
    dest: Path,
    options: ConvertOptions,
    progress: OnProgress | None = None,
    note: Callable[[str], None] | None = None,
    extras: Extras | None = None,
) -> Manifest:
    """``convert`` of a checkpoint that is open already, and stays so."""
    _check_options(options)
    extras = extras or Extras()
    with _system_errors(checkpoint.where):
        whole = None if options.overwrite else extras.whole
        if whole is None:
            check_place(dest, options.overwrite)
        job = _plan_job(checkpoint, options, dest, extras)
        made = None if whole is None else made_already(dest, job.fingerprint)
        if whole is not None and made is not None and whole(dest, made):
            (note or _ignore)(f"{dest}: {ALREADY}")
            return made
        with Destination(dest, job.fingerprint, options.overwrite, note or _ignore) as out:
            manifest = out.finished or _Run(job, out, progress or _ignore).write()
            out.publish(manifest)
    return manifest


def _ignore(_: object) -> None:
    """Nobody listens."""


@contextmanager
def _system_errors(source: Path) -> Iterator[None]:
    """Translate what the system says where no nearer place could: a path that may not be looked
    at, or memory that isn't there."""
    try:
        yield
    except OSError as exc:
        where = exc.filename or source
        raise ConversionError(
            f"{where}: {exc.strerror or exc}; check the path, permissions and the disk"
        ) from exc
    except MemoryError as exc:
        raise ConversionError(
            f"{source}: not enough memory to convert this model ({exc or 'none left'}); free some, or "
            "convert on a larger machine: the same command goes on from what is safely on disk"
        ) from exc


def _check_options(options: ConvertOptions) -> None:
    _check_choice("dtype", options.dtype, ("auto", *DTYPES))
    _check_choice("store", options.store, ("file", "zarr"))


def _check_choice(what: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise ConversionError(f"unknown {what} {got!r}; known: {', '.join(known)}")


def _plan_job(checkpoint: Checkpoint, options: ConvertOptions, dest: Path, extras: Extras) -> _Job:
    dtype = bundle_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    geometry = ffn_geometry(checkpoint.plan.spec, dtype, stride_alignment(dest))
    tokenizer = build_tokenizer(checkpoint, options.tokenizer)
    layout = resident_layout(checkpoint.plan, dtype)
    facts = {
        "flashd": flashd.__version__,
        "format": FORMAT_VERSION,
        "dtype": dtype,
        "store": options.store,
        "stride_bytes": geometry.stride_bytes,
        "tokenizer": hashlib.sha256(tokenizer.json.encode()).hexdigest() if tokenizer.json else None,
        "tokenizer_spec": asdict(tokenizer.spec) if tokenizer.spec else None,
        "identity": checkpoint.source.identity,
        "files": [_stat(path) for path in (*checkpoint.source.files, *checkpoint.side_files)],
    }
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return _Job(checkpoint, options, dtype, geometry, layout, tokenizer, fingerprint, extras)


def _stat(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


class _Run:
    """One run of a job into its partial directory."""

    def __init__(self, job: _Job, out: Destination, progress: OnProgress) -> None:
        self._job = job
        self._out = out
        self._progress = progress
        self._total_bytes = job.total_bytes
        self._done_bytes = 0
        self._phase = "resident"
        self._last_commit_s = monotonic()

    def write(self) -> Manifest:
        """Write all files but the manifest, which is returned."""
        job, out = self._job, self._out
        beside = _SLACK_BYTES + len(job.tokenizer.json or "") + job.extras.extra_bytes
        out.reserve(job.total_bytes + beside)
        with write_errors(out.root), BackgroundWriter(self._advance) as background:
            entries = [self._write_resident(background)]
            entries += self._write_ffn(background)
            self._phase = "finish"
            entries += self._write_tokenizer()
            self._advance(self._total_bytes - self._done_bytes)
        # What could not be read back must not be published.
        manifest = from_json(to_json(self._manifest(entries)).encode(), str(out.root))
        if job.extras.finish is not None:
            with write_errors(out.root):
                job.extras.finish(out.root, manifest)
        return manifest

    def _write_resident(self, background: BackgroundWriter) -> FileEntry:
        job, durable = self._job, self._out.durable
        first = durable.resident_tensors
        self._phase = "resume" if first else "resident"
        file = HashedFile(
            resident_path(self._out.root),
            durable.sizes.get(RESIDENT, 0),
            lambda block: self._advance(len(block)),
        )
        try:
            self._phase = "resident"
            if not first:
                file.write(job.layout.header)

            def on_tensor(done: int, last: bool) -> None:
                if last or self._commit_is_due(file.size_bytes - self._out.durable.sizes.get(RESIDENT, 0)):
                    file.sync()
                    self._commit({RESIDENT: file.size_bytes}, resident_tensors=done)

            writer = ResidentWriter(file, background, on_tensor)
            checkpoint = job.checkpoint
            writer.write(checkpoint.plan, checkpoint.source, checkpoint.where, job.dtype, first)
            background.drain()
            return file.entry(self._out.root)
        except BaseException:
            background.stop()
            raise
        finally:
            file.close()

    def _write_ffn(self, background: BackgroundWriter) -> list[FileEntry]:
        job, first = self._job, self._out.durable.layers
        self._phase = "resume" if first else "ffn"
        writer = self._open_writer(first)
        try:
            self._phase = "ffn"
            if first < job.geometry.n_layers:
                builder = RowBuilder(job.checkpoint.source, job.geometry)
                for layer in range(first, job.geometry.n_layers):
                    builder.write_layer(layer, job.checkpoint.plan.ffn[layer], writer, background)
                    background.submit(0, self._end_layer, writer, layer)
            background.drain()
            return writer.entries()
        except BaseException:
            background.stop()
            raise
        finally:
            writer.close()

    def _open_writer(self, first: int) -> FFNWriter:
        root, geometry = self._out.root, self._job.geometry
        if self._job.options.store == "file":
            return BundleFileWriter(root, geometry, first, self._advance)
        from flashd.tools.convert.ffn_zarr import ZarrWriter

        self._advance(first * geometry.layer_bytes)
        return ZarrWriter(root, geometry, first, self._out.durable.zarr_files)

    def _end_layer(self, writer: FFNWriter, layer: int) -> None:
        """In the background, behind the layer's last block."""
        writer.end_layer(layer)
        done = layer + 1
        pending = (done - self._out.durable.layers) * self._job.geometry.layer_bytes
        if done == self._job.geometry.n_layers or self._commit_is_due(pending):
            writer.sync()
            self._commit(writer.sizes(), layers=done, zarr_files=writer.zarr_files())

    def _write_tokenizer(self) -> list[FileEntry]:
        if self._job.tokenizer.json is None:
            return []
        path = self._out.root / TOKENIZER
        path.write_text(self._job.tokenizer.json, encoding="utf-8")
        sync_path(path)
        return [hash_file(path, self._out.root)]

    def _commit_is_due(self, pending_bytes: int) -> bool:
        return pending_bytes >= _COMMIT_BYTES or monotonic() - self._last_commit_s >= _COMMIT_S

    def _commit(self, sizes: dict[str, int], **changes: Any) -> None:
        old = self._out.durable
        self._out.commit(replace(old, sizes=old.sizes | sizes, **changes))
        self._last_commit_s = monotonic()

    def _advance(self, count_bytes: int) -> None:
        self._done_bytes += count_bytes
        self._progress(Progress(self._phase, min(self._done_bytes, self._total_bytes), self._total_bytes))

    def _manifest(self, files: list[FileEntry]) -> Manifest:
        job, checkpoint = self._job, self._job.checkpoint
        stored = sorted({info.stored for info in checkpoint.source.tensors.values()})
        return Manifest(
            format="flashd-bundle",
            format_version=1,
            model=checkpoint.plan.spec,
            dtype=job.dtype,
            store=job.options.store,
            ffn=job.geometry,
            layer_offset_bytes=tuple(layer_offsets(job.geometry)),
            files=tuple(files),
            tokenizer=job.tokenizer.spec,
            provenance={
                "flashd": flashd.__version__,
                "source": printable(checkpoint.where.resolve().name),
                "source_format": checkpoint.source.format,
                "source_dtypes": printable(",".join(stored))[:_MAX_NOTE_CHARS],
                **job.extras.provenance,
                FINGERPRINT: job.fingerprint,
            },
        )
