import numpy as np
import pytest

from flashd.models.layers import Linear, Norm


def test_linear_gives_the_same_value_for_few_and_many_tokens() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((300, 70)).astype(np.float16)
    bias = rng.standard_normal(300).astype(np.float32)
    x = rng.standard_normal((40, 70)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias
    linear = Linear(w, bias)
    assert np.abs(linear(x) - exact).max() < 1e-4
    assert np.abs(linear(x[:3]) - exact[:3]).max() < 1e-4


@pytest.mark.parametrize("rms", [True, False])
def test_norm_of_a_row_does_not_depend_on_its_neighbours(rms: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 577)).astype(np.float32)
    norm = Norm(rng.standard_normal(577).astype(np.float32), None, 1e-5, rms)
    together = norm(x)
    for i in range(9):
        assert np.array_equal(norm(x[i : i + 1])[0], together[i])
