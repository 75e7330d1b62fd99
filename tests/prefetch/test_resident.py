from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import ffn

from flashd.kernels.lane import ComputeLane
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import open_store
from flashd.testing.bundles import make_bundle, tiny_spec


@pytest.mark.parametrize("tokens", [1, 5, 40])
async def test_rows_in_ram_give_the_bits_of_streamed_rows(tmp_path: Path, tokens: int) -> None:
    spec = tiny_spec("llama", d_model=256, d_ffn=4100)  # several slices a layer
    made = make_bundle(tmp_path / "bundle", spec)
    none = [None] * spec.n_layers
    store = await open_store(made.directory, made.manifest, "buffered")
    memory = await InMemoryStore.load(store)
    lane = ComputeLane()
    streamed = StreamingFFN(store, lane, spec.activation, none, none)
    resident = ResidentFFN(memory, lane, spec.activation, none, none)
    x = np.random.default_rng(0).standard_normal((tokens, spec.d_model)).astype(np.float32)
    for layer in range(spec.n_layers):
        assert np.array_equal(await ffn(streamed, layer, x), await ffn(resident, layer, x))
    assert resident.stats.slices == streamed.stats.slices > spec.n_layers
    for part in (streamed, resident, store, memory):
        await part.close()
    lane.close()
