"""The model under evaluation, and its ways of choosing neurons."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.calibration import Calibration
from flashd.layout.manifest import TOKENIZER, Manifest
from flashd.models.decoder import Decoder, Span
from flashd.models.layers import as_f32
from flashd.predictor.base import Predictor
from flashd.predictor.open import make_predictor
from flashd.prefetch.dense import DenseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.runtime.engine import PREFILL_CHUNK_TOKENS
from flashd.runtime.tokenizer import Tokenizer
from flashd.store.base import WeightStore
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.store.predictors import load_gates, open_predictors
from flashd.tools.eval.masks import ComparingFFN, MaskedSource, OracleFFN
from flashd.types import BoolArray, F32Array, I64Array, WeightArray


@dataclass
class Subject:
    """An open model whose FFN is streamed; one mode at a time.

    Attributes:
        manifest: of the bundle.
        tokenizer: if the bundle has one.
        calibration: if it has been calibrated.
        predictor: of the calibration.
        comparing: counts, while the mode is ``dense``, how the predictor does.
        decoder: of the mode that is chosen.
    """

    manifest: Manifest
    tokenizer: Tokenizer | None
    calibration: Calibration | None
    predictor: Predictor | None
    comparing: ComparingFFN
    decoder: Decoder
    _weights: Mapping[str, WeightArray]
    _store: WeightStore
    _lane: ComputeLane
    _stream: StreamingFFN
    _kv_dtype: str

    @property
    def modes(self) -> list[str]:
        """What can be evaluated, dense first."""
        found = ["dense"]
        if any(self.manifest.thresholds):
            found.append("no-threshold")
        return [*found, "oracle", "predictor"] if self.predictor is not None else found

    async def choose(self, mode: str) -> None:
        """Make ``decoder`` that of one of ``modes``."""
        await self._stream.close()
        spec, geometry = self.manifest.model, self.manifest.ffn
        math = {"dense": self.comparing, "oracle": OracleFFN(geometry, spec.activation)}
        thresholds = () if mode == "no-threshold" else self.manifest.thresholds
        self._stream = _stream(
            self._store, self._lane, self.manifest, self._weights, math.get(mode), thresholds
        )
        looks = {"dense": self.comparing.look, "predictor": self._predicted}
        source = MaskedSource(self._stream, looks.get(mode, _all))
        self.decoder = Decoder(spec, self._weights, source, self._lane)

    def _predicted(self, layer: int, x: F32Array) -> BoolArray | None:
        assert self.predictor is not None
        return self.predictor.predict_prompt(layer, x) if self.predictor.masked(layer) else None

    def new_kv(self, capacity: int) -> ContiguousKV:
        """An empty KV cache."""
        return ContiguousKV(self.manifest.model, capacity, self._kv_dtype)

    async def feed(self, kv: ContiguousKV, ids: I64Array) -> AsyncIterator[F32Array]:
        """Run tokens in the chunks that the engine takes; logits ``[tokens, vocab]`` of each chunk."""
        for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
            span = Span(ids[start : start + PREFILL_CHUNK_TOKENS], kv)
            yield await self.decoder.forward([span], every_position=True)


def _all(layer: int, x: F32Array) -> None:
    """Masks nothing."""


@asynccontextmanager
async def opened(directory: Path, kv_dtype: str = "f32") -> AsyncIterator[Subject]:
    """Open a bundle for evaluation: resident weights and predictors in RAM, the FFN streamed.

    Raises:
        BundleError, DiskReadError, TokenizerError: it cannot be used.
    """
    manifest = open_manifest(directory)
    weights = load_resident(directory, manifest)
    tokenizer = None
    if manifest.tokenizer is not None and any(file.name == TOKENIZER for file in manifest.files):
        tokenizer = Tokenizer(directory / TOKENIZER, manifest.tokenizer)
    predictors = open_predictors(directory, manifest)
    store = await open_store(directory, manifest, verify="auto")
    lane = ComputeLane()
    spec, geometry = manifest.model, manifest.ffn
    try:
        predictor = None
        if predictors is not None:
            calibration, tensors = predictors
            masked = [layer.masked for layer in calibration.layers]
            gates = await load_gates(store, masked) if calibration.predictor == "gate" else ()
            predictor = make_predictor(
                calibration, tensors, geometry, spec.activation, gates=gates,
                gate_bias=_biases(weights, spec.n_layers, "gate"), thresholds=manifest.thresholds,
            )  # fmt: skip
        comparing = ComparingFFN(geometry, spec.activation, predictor)
        stream = _stream(store, lane, manifest, weights, None, manifest.thresholds)
        decoder = Decoder(spec, weights, stream, lane)
        subject = Subject(
            manifest, tokenizer, predictors[0] if predictors else None, predictor, comparing, decoder,
            weights, store, lane, stream, kv_dtype,
        )  # fmt: skip
        try:
            yield subject
        finally:
            await subject._stream.close()
    finally:
        await store.close()
        lane.close()


def _stream(
    store: WeightStore,
    lane: ComputeLane,
    manifest: Manifest,
    weights: Mapping[str, WeightArray],
    math: DenseFFN | None,
    thresholds: tuple[float, ...],
) -> StreamingFFN:
    spec = manifest.model
    up, gate = (_biases(weights, spec.n_layers, part) for part in ("up", "gate"))
    return StreamingFFN(store, lane, spec.activation, up, gate, thresholds=thresholds, dense=math)


def _biases(weights: Mapping[str, WeightArray], n_layers: int, part: str) -> list[F32Array | None]:
    names = [f"layers.{i}.ffn.{part}.bias" for i in range(n_layers)]
    return [as_f32(weights[name]) if name in weights else None for name in names]
