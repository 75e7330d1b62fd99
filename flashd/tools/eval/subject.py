"""The model under evaluation, and its ways of choosing neurons."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from flashd.config import DaemonConfig
from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.calibration import Calibration
from flashd.layout.manifest import TOKENIZER, Manifest
from flashd.models.decoder import Decoder, Span
from flashd.models.layers import as_f32
from flashd.prefetch.dense import DenseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.runtime.accounting import PREFILL_CHUNK_TOKENS
from flashd.runtime.ffn import BuiltFFN, build_ffn
from flashd.runtime.tokenizer import Tokenizer
from flashd.store.metered import MeteredStore
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.store.predictors import read_calibration
from flashd.tools.eval.masks import ComparedSource, ComparingFFN, OracleFFN
from flashd.types import F32Array, FFNSource, I64Array, WeightArray


@dataclass
class Subject:
    """An open model; one mode at a time.

    Attributes:
        manifest: of the bundle.
        tokenizer: if the bundle has one.
        calibration: if it has been calibrated.
        comparing: counts, while the mode is ``dense``, how the predictor does.
        decoder: of the mode that is chosen.
    """

    manifest: Manifest
    tokenizer: Tokenizer | None
    calibration: Calibration | None
    comparing: ComparingFFN
    decoder: Decoder
    _weights: dict[str, WeightArray]
    _store: MeteredStore
    _lane: ComputeLane
    _ffn: BuiltFFN
    _stream: StreamingFFN | None
    _kv_dtype: str

    @property
    def modes(self) -> list[str]:
        """What can be evaluated, dense first."""
        free = ["no-threshold"] if any(self.manifest.thresholds) else []
        sparse = ["oracle", "predictor"] if self.calibration is not None else []
        return ["dense", *free, *sparse]

    async def choose(self, mode: str) -> None:
        """Make ``decoder`` that of one of ``modes``."""
        await self.close()
        if mode == "predictor":
            self.decoder = self._decoder(self._ffn.source)
            return
        spec, geometry = self.manifest.model, self.manifest.ffn
        math: DenseFFN = self.comparing
        if mode != "dense":
            math = (OracleFFN if mode == "oracle" else DenseFFN)(geometry, spec.activation)
        up, gate = (_biases(self._weights, spec.n_layers, part) for part in ("up", "gate"))
        self._stream = StreamingFFN(
            self._store,
            self._lane,
            spec.activation,
            up,
            gate,
            thresholds=() if mode == "no-threshold" else self.manifest.thresholds,
            dense=math,
        )
        compared = ComparedSource(self._stream, self.comparing)
        self.decoder = self._decoder(compared if mode == "dense" else self._stream)

    def _decoder(self, source: FFNSource) -> Decoder:
        return Decoder(self.manifest.model, self._weights, source, self._lane)

    def new_kv(self, capacity: int) -> ContiguousKV:
        """An empty KV cache."""
        return ContiguousKV(self.manifest.model, capacity, self._kv_dtype)

    async def feed(self, kv: ContiguousKV, ids: I64Array) -> AsyncIterator[F32Array]:
        """Run tokens in the chunks that the engine takes; logits ``[tokens, vocab]`` of each chunk."""
        for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
            span = Span(ids[start : start + PREFILL_CHUNK_TOKENS], kv)
            yield await self.decoder.forward([span], every_position=True)

    async def close(self) -> None:
        """Drop what the mode needs for itself."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None


@asynccontextmanager
async def opened(config: DaemonConfig) -> AsyncIterator[Subject]:
    """Open a bundle as the daemon does.

    Raises:
        BundleError, DiskReadError, TokenizerError: it cannot be used.
        ConfigError: the memory is too small.
    """
    directory = config.model_dir
    manifest = open_manifest(directory)
    weights = load_resident(directory, manifest)
    tokenizer = None
    if manifest.tokenizer is not None and any(file.name == TOKENIZER for file in manifest.files):
        tokenizer = Tokenizer(directory / TOKENIZER, manifest.tokenizer)
    calibration = read_calibration(directory, manifest)
    store = await open_store(directory, manifest, config.backend, verify=config.verify)
    lane = ComputeLane()
    try:
        ffn = await build_ffn(config, manifest, weights, store, lane)
        predictor = None if calibration is None else ffn.predictor
        comparing = ComparingFFN(manifest.ffn, manifest.model.activation, predictor)
        decoder = Decoder(manifest.model, weights, ffn.source, lane)
        subject = Subject(
            manifest, tokenizer, calibration, comparing, decoder, weights, store, lane, ffn, None,
            config.kv_dtype,
        )  # fmt: skip
        try:
            yield subject
        finally:
            await subject.close()
            await ffn.close()
    finally:
        await store.close()
        lane.close()


def _biases(weights: Mapping[str, WeightArray], n_layers: int, part: str) -> list[F32Array | None]:
    names = [f"layers.{i}.ffn.{part}.bias" for i in range(n_layers)]
    return [as_f32(weights[name]) if name in weights else None for name in names]
