"""A checkpoint that isn't there: tensors made up row by row when the converter reads them."""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

import numpy as np

from flashd.models.families import CheckpointPlan, TensorRule
from flashd.tools.convert.sources.base import TensorInfo, TensorSource
from flashd.tools.synth.code import Code
from flashd.types import F32Array, WeightArray

# Elements of the noise. Odd, so that rows of no width repeat at its period.
_NOISE = (1 << 20) - 3
# Standard deviations. Of embeddings as of the code's part: each is half of what a norm sees.
_EMBED = 0.5
_POSITION = 0.1
# Of FFN weights that must be far less than the code is.
_FFN = 2.0**-10


class SyntheticSource(TensorSource):
    """Noise, and in the reserved dimensions the code. A row depends on its tensor and number alone.

    Args:
        name: of the shape; no path.
        plan: the shape's tensors.
        code: what the reserved dimensions hold.
        identity: tells this source from others.
    """

    def __init__(self, name: str, plan: CheckpointPlan, code: Code, identity: str) -> None:
        self.format = "synthetic"
        self.files = ()
        self.identity = identity
        # Below a file nothing can exist: no tokenizer or setting is found there by mistake.
        self.where = Path(os.devnull) / f"synthetic-{name}"
        self._spec = plan.spec
        self._code = code
        self._rules = {rule.sources[0]: rule for rule in plan.rules if rule.values is None}
        self._ffn = {
            source: (layer, part)
            for layer, names in enumerate(plan.ffn)
            for part, source in (("up", names.up), ("gate", names.gate), ("down", names.down))
            if source is not None
        }
        self.tensors = {name: self._info(rule.shape, rule.kind) for name, rule in self._rules.items()}
        d, n = plan.spec.d_model, plan.spec.d_ffn
        for source, (_, part) in self._ffn.items():
            self.tensors[source] = self._info((d, n) if part == "down" else (n, d), "matrix")
        rng = np.random.default_rng(crc32(identity.encode()))
        # Uniform, of variance 1: made far faster than normal numbers, and nobody can tell in a sum.
        self._noise = rng.random(_NOISE, np.float32) * np.float32(12**0.5) - np.float32(3**0.5)
        self._scaled: dict[float, WeightArray] = {}
        self._amplitude = _EMBED * (plan.spec.d_model / code.n_reserved) ** 0.5

    def _info(self, shape: tuple[int, ...], kind: str) -> TensorInfo:
        dtype = "f16" if kind == "matrix" else "f32"
        return TensorInfo(shape, dtype, dtype, self.where)  # type: ignore[arg-type]  # one of DType

    def read_rows(self, name: str, start: int, stop: int) -> WeightArray:
        """See ``TensorSource.read_rows``."""
        if name in self._ffn:
            return self._ffn_rows(name, start, stop)
        rule = self._rules[name]
        if rule.kind == "vector":
            return self._vector(rule)[start:stop]
        return self._matrix(name, rule, start, stop)

    def close(self) -> None:
        """See ``TensorSource.close``."""

    def _ffn_rows(self, name: str, start: int, stop: int) -> WeightArray:
        layer, part = self._ffn[name]
        if self._spec.gated and part == "up":
            return self._noise_rows(name, start, stop, self._spec.d_model**-0.5)
        rows, reserved = self._noise_rows(name, start, stop, _FFN), self._code.n_reserved
        if part == "down":
            rows[: max(0, reserved - start)] = 0
        else:
            neurons = self._code.layer(layer)
            rows[:, : reserved - 1] = neurons.directions[start:stop]
            rows[:, reserved - 1] = -neurons.fire[start:stop]
        return rows

    def _matrix(self, name: str, rule: TensorRule, start: int, stop: int) -> WeightArray:
        """Embeddings keep out of the reserved dimensions, and what attention says, too."""
        spec, reserved = self._spec, self._code.n_reserved
        if rule.name == "position.weight":
            rows = self._noise_rows(name, start, stop, _POSITION)
            code = self._code.positions[start - rule.skip_rows : stop - rule.skip_rows]
            rows[:, : reserved - 1] = code * self._amplitude
            rows[:, reserved - 1] = self._amplitude
        elif rule.name in ("embed.weight", "head.weight"):
            rows = self._noise_rows(name, start, stop, _EMBED)
            rows[:, :reserved] = 0
        elif rule.name.endswith(".o.weight"):
            # So little that it doesn't outgrow the code in many layers.
            rows = self._noise_rows(name, start, stop, 0.25 / (spec.d_model * spec.n_layers) ** 0.5)
            rows[: max(0, reserved - start)] = 0
        else:
            rows = self._noise_rows(name, start, stop, spec.d_model**-0.5)
        return rows

    def _vector(self, rule: TensorRule) -> F32Array:
        """Biases are 0 and norms 1, but random signs before the head: with tied embeddings a token's
        likeliest successor would be itself."""
        if rule.name == "final_norm.weight":
            signs = np.random.default_rng(crc32(self.identity.encode())).integers(2, size=rule.shape)
            return np.asarray(2 * signs - 1, np.float32)
        return np.full(rule.shape, rule.name.endswith("norm.weight"), np.float32)

    def _noise_rows(self, name: str, start: int, stop: int, scale: float) -> WeightArray:
        """Rows of a tensor out of one endless repetition of the noise, begun somewhere."""
        if scale not in self._scaled:
            self._scaled[scale] = (self._noise * np.float32(scale)).astype("<f2")
        noise = self._scaled[scale]
        columns = self.tensors[name].shape[1]
        out = np.empty((stop - start, columns), "<f2")
        flat, done = out.reshape(-1), 0
        at = (crc32(name.encode()) + start * columns) % _NOISE
        while done < flat.size:
            count = min(flat.size - done, _NOISE - at)
            flat[done : done + count] = noise[at : at + count]
            done, at = done + count, 0
        return out
