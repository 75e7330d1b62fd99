"""A decoder-only transformer driven by a ``ModelSpec``: one code path for every family.

Attention, norms and embeddings are resident; the FFN comes from an ``FFNSource``. Everything that is computed
between two places where the event loop is needed is one call on the compute lane: a step over layers whose
FFN waits for its reads on the lane, too, is one call as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from flashd import kernels
from flashd.errors import BundleError
from flashd.kernels.lane import ComputeLane
from flashd.models.layers import Linear, Norm, as_f32, rotation
from flashd.types import F32Array, FFNSource, I64Array, KVCache, LaneFFNSource, ModelSpec, WeightArray


class ForwardCancelled(Exception):
    """Nobody wants this forward pass any more; no KV cache was changed."""


@dataclass(frozen=True)
class Span:
    """The next tokens of one sequence: ids ``[tokens]``, behind what ``kv`` holds."""

    tokens: I64Array
    kv: KVCache


@dataclass
class _Pass:
    """State of one forward pass; ``x`` is ``[all tokens, d_model]``."""

    spans: Sequence[Span]
    cancelled: Callable[[], bool]
    every_position: bool
    x: F32Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    rope: tuple[F32Array, F32Array] | None = None
    layer: int = 0  # the next one
    dropped: bool = False  # nobody waits for the result any more
    logits: F32Array | None = None  # at the end
    ffn: Callable[[], F32Array] | None = None  # gives the output of the layer before
    rows: list[slice] = field(default_factory=list)


@dataclass(frozen=True)
class _Layer:
    attn_norm: Norm
    ffn_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    down_bias: F32Array | None


class Decoder:
    """Numerics of one model.

    Args:
        spec: the model's shape.
        weights: resident tensors by canonical name (``docs/format.md``).
        ffn: where the FFN comes from.
        lane: the compute lane.

    Raises:
        BundleError: a resident tensor is missing or has the wrong shape.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, WeightArray], ffn: FFNSource, lane: ComputeLane
    ) -> None:
        self.spec = spec
        self._ffn = ffn
        self._lane_ffn = ffn if isinstance(ffn, LaneFFNSource) else None
        self._lane = lane
        get = _Getter(weights)
        d, embed = spec.d_model, spec.d_embed
        self._embed = get.matrix("embed.weight", spec.vocab_size, embed)
        self._position = None if spec.rope else get.matrix("position.weight", spec.max_context, d)
        self._inv_freq = get.vector("rope.inv_freq", spec.d_head // 2) if spec.rope else None
        self._project_in = None if d == embed else Linear(get.matrix("project_in.weight", d, embed))
        self._project_out = None if d == embed else Linear(get.matrix("project_out.weight", embed, d))
        self._final_norm = self._norm(get, "final_norm") if spec.final_norm else None
        head = self._embed if spec.tied_head else get.matrix("head.weight", spec.vocab_size, embed)
        self._head = Linear(head)
        self._layers = [self._layer(get, f"layers.{i}") for i in range(spec.n_layers)]
        self._scale = spec.d_head**-0.5

    def _norm(self, get: _Getter, name: str) -> Norm:
        d, rms = self.spec.d_model, self.spec.norm == "rmsnorm"
        bias = None if rms else get.optional(f"{name}.bias", d)
        return Norm(get.vector(f"{name}.weight", d), bias, self.spec.norm_eps, rms)

    def _layer(self, get: _Getter, name: str) -> _Layer:
        spec = self.spec
        d, q_out, kv_out = spec.d_model, spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head

        def linear(part: str, n_out: int, n_in: int) -> Linear:
            weight = get.matrix(f"{name}.attn.{part}.weight", n_out, n_in)
            return Linear(weight, get.optional(f"{name}.attn.{part}.bias", n_out))

        return _Layer(
            attn_norm=self._norm(get, f"{name}.attn_norm"),
            ffn_norm=self._norm(get, f"{name}.ffn_norm"),
            q=linear("q", q_out, d),
            k=linear("k", kv_out, d),
            v=linear("v", kv_out, d),
            o=linear("o", d, q_out),
            down_bias=get.optional(f"{name}.ffn.down.bias", d),
        )

    async def forward(
        self,
        spans: Sequence[Span],
        cancelled: Callable[[], bool] = lambda: False,
        *,
        every_position: bool = False,
    ) -> F32Array:
        """Run the next tokens of some sequences and extend their KV caches.

        Args:
            spans: one per sequence. Several are for decoding (one token each); a prompt's chunk
                comes alone, so that its result can't depend on who else is served.
            cancelled: asked before every layer, in whatever thread.
            every_position: give the logits after every token, not only after the last ones.

        Returns:
            Logits ``[len(spans), vocab_size]`` after each span's last token, or ``[all tokens,
            vocab_size]``.

        Raises:
            ForwardCancelled: ``cancelled()`` was true; KV caches are as before.
            DiskReadError, BundleCorruptError: the FFN could not be read; KV caches are as before.
        """
        loop, state = asyncio.get_running_loop(), _Pass(spans, cancelled, every_position)
        try:
            while True:
                await self._lane.run(self._advance, state, loop)
                if state.logits is not None:
                    break
                while state.layer < self.spec.n_layers and not self._on_lane(state):
                    if cancelled():
                        raise ForwardCancelled
                    attention = partial(self._attention, state.layer, state)
                    state.ffn = await self._ffn.apply(state.layer, attention)
                    state.layer += 1
        except asyncio.CancelledError:
            state.dropped = True  # the lane need not go on to the last layer
            raise
        for span in spans:
            span.kv.commit(len(span.tokens))
        return state.logits

    def _advance(self, state: _Pass, loop: asyncio.AbstractEventLoop) -> None:
        """Go on as far as the event loop isn't needed: to a layer whose FFN needs it, or to the logits."""
        if state.layer == 0:
            self._begin(state)
        while state.layer < self.spec.n_layers:
            if self._lane_ffn is None or not self._on_lane(state) or state.dropped:
                return
            if state.cancelled():
                raise ForwardCancelled
            if state.layer == 0:
                first = self._layers[0]
                norm = first.ffn_norm if self.spec.norm_first else first.attn_norm
                self._lane_ffn.begin_step(partial(norm, state.x), loop)
            attention = partial(self._attention, state.layer, state)
            state.ffn = self._lane_ffn.apply_on_lane(state.layer, attention, loop)
            state.layer += 1
        state.logits = self._finish(state)

    def _on_lane(self, state: _Pass) -> bool:
        return self._lane_ffn is not None and self._lane_ffn.on_lane(state.layer, len(state.x))

    def _begin(self, state: _Pass) -> None:
        spans = state.spans
        tokens = np.concatenate([span.tokens for span in spans])
        positions = np.concatenate(
            [np.arange(span.kv.length, span.kv.length + len(span.tokens)) for span in spans]
        )
        x = as_f32(self._embed[tokens])
        if self._project_in is not None:
            x = self._project_in(x)
        if self._position is not None:
            x = x + as_f32(self._position[positions])
        state.x, state.rope = x, None if self._inv_freq is None else rotation(self._inv_freq, positions)
        ends = np.cumsum([len(span.tokens) for span in spans])
        state.rows = [slice(end - len(span.tokens), end) for end, span in zip(ends, spans, strict=True)]

    def _attention(self, index: int, state: _Pass) -> F32Array:
        """Close the previous layer, attend, and return this layer's FFN input."""
        self._close(index - 1, state)
        layer, spec = self._layers[index], self.spec
        h = layer.attn_norm(state.x) if spec.norm_first else state.x
        tokens = h.shape[0]
        q = layer.q(h).reshape(tokens, spec.n_heads, spec.d_head)
        k = layer.k(h).reshape(tokens, spec.n_kv_heads, spec.d_head)
        v = layer.v(h).reshape(tokens, spec.n_kv_heads, spec.d_head)
        if state.rope is not None:
            kernels.rope(q, *state.rope)
            kernels.rope(k, *state.rope)
        mixed = np.empty_like(q)
        for span, rows in zip(state.spans, state.rows, strict=True):
            with self._lane.memory_work():
                span.kv.append(index, k[rows], v[rows])
            length = span.kv.length + len(span.tokens)
            with self._lane.attention_work():
                kernels.attention(q[rows], *span.kv.view(index), length, self._scale, mixed[rows])
        state.x = state.x + layer.o(mixed.reshape(tokens, -1))
        if spec.norm_first:
            return layer.ffn_norm(state.x)
        state.x = layer.attn_norm(state.x)
        return state.x

    def _close(self, index: int, state: _Pass) -> None:
        """Add the FFN's output of layer ``index`` to the residual stream."""
        if state.ffn is None:
            return
        layer = self._layers[index]
        state.x = state.x + state.ffn()
        if layer.down_bias is not None:
            state.x += layer.down_bias
        if not self.spec.norm_first:
            state.x = layer.ffn_norm(state.x)
        state.ffn = None

    def _finish(self, state: _Pass) -> F32Array:
        self._close(self.spec.n_layers - 1, state)
        x = state.x if state.every_position else state.x[[rows.stop - 1 for rows in state.rows]]
        if self._final_norm is not None:
            x = self._final_norm(x)
        if self._project_out is not None:
            x = self._project_out(x)
        return self._head(x)


class _Getter:
    """Resident tensors, checked against the shape the spec asks for."""

    def __init__(self, weights: Mapping[str, WeightArray]) -> None:
        self._weights = weights

    def matrix(self, name: str, *shape: int) -> WeightArray:
        tensor = self._weights.get(name)
        if tensor is None:
            raise BundleError(f"resident tensor {name} is missing; convert the model again")
        if tensor.shape != shape:
            raise BundleError(
                f"resident tensor {name} is {list(tensor.shape)}, expected {list(shape)}; convert again"
            )
        return tensor

    def vector(self, name: str, size: int) -> F32Array:
        return as_f32(self.matrix(name, size))

    def optional(self, name: str, size: int) -> F32Array | None:
        return self.vector(name, size) if name in self._weights else None
