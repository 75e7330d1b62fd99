from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashd.errors import BundleError
from flashd.layout.manifest import Manifest, from_json, to_json
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.types import TokenizerSpec


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    tokenizer = TokenizerSpec(1, (2, 7), True, "{{ 'ä' }}", "<s>", "</s>")
    return make_bundle(tmp_path, tiny_spec("llama"), tokenizer=tokenizer).manifest


def changed(manifest: Manifest, *path: str | int, value: Any) -> bytes:
    body = json.loads(to_json(manifest))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(body).encode()


def test_survives_a_round_trip(manifest: Manifest) -> None:
    assert from_json(to_json(manifest).encode(), "m") == manifest


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), "other", "not a flashd bundle"),
        (("format_version",), 2, "upgrade flashd"),
        (("model", "d_model"), 64, "contradicts"),
        (("model", "n_layers"), -1, "n_layers"),
        (("model", "n_kv_heads"), 3, "KV heads"),
        (("model", "norm_eps"), 0.0, "norm_eps"),
        (("model", "activation"), "swish", "activation"),
        (("model", "n_heads"), "4", "n_heads"),
        (("ffn", "stride_bytes"), 1000, "stride"),
        (("layer_offset_bytes", 1), 512, "layer_offset_bytes"),
        (("files", 0, "name"), "../x", "leaves the bundle"),
        (("files", 0, "name"), "/etc/passwd", "leaves the bundle"),
        (("files", 0, "name"), "a/../../x", "leaves the bundle"),
        (("files", 0, "name"), "abc\n", "leaves the bundle"),
        (("ffn", "stride_bytes"), 1 << 23, "stride"),
        (("model", "d_head"), 7, "even head size"),
        (("model", "norm_eps"), 1e400, "norm_eps"),
        (("dtype",), "int8", "dtype"),
    ],
)
def test_a_wrong_value_is_named(
    manifest: Manifest, path: tuple[str | int, ...], value: Any, said: str
) -> None:
    with pytest.raises(BundleError, match=said) as caught:
        from_json(changed(manifest, *path, value=value), "dir/manifest.json")
    assert str(caught.value).startswith("dir/manifest.json")
    assert "\n" not in str(caught.value)


def test_a_huge_number_of_layers_is_refused_at_once(manifest: Manifest) -> None:
    body = json.loads(to_json(manifest))
    body["model"]["n_layers"] = body["ffn"]["n_layers"] = (1 << 31) - 1
    with pytest.raises(BundleError, match="layer_offset_bytes"):
        from_json(json.dumps(body).encode(), "m")


def test_a_file_listed_twice_is_refused(manifest: Manifest) -> None:
    body = json.loads(to_json(manifest))
    body["files"].append(body["files"][0])
    with pytest.raises(BundleError, match="listed twice"):
        from_json(json.dumps(body).encode(), "m")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_no_json_object(text: bytes) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        from_json(text, "manifest.json")


def test_a_file_that_is_not_listed(manifest: Manifest) -> None:
    with pytest.raises(BundleError, match=r"nothing\.bin"):
        manifest.file("nothing.bin")
