import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from flashd.errors import RequestError, TokenizerError
from flashd.runtime.tokenizer import TextStream, Tokenizer
from flashd.types import TokenizerSpec

TEXT = "Grüße 日本語 👩‍👩‍👧‍👦 naïve — the end. שלום"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level tokens, one byte each: every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = HFTokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return Tokenizer(path, TokenizerSpec(chat_template="{{ messages[0].content }}|{{ bos_token }}"))


def pieces(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, stop)
    out = []
    for token in tokenizer.encode(text):
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.flush()]


def test_pieces_join_to_the_text_and_never_hold_half_a_character(tokenizer: Tokenizer) -> None:
    out = pieces(tokenizer, TEXT)
    assert "".join(out) == TEXT
    assert all("\ufffd" not in piece for piece in out)
    assert len([piece for piece in out if piece]) == len(TEXT)


def test_an_incomplete_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("ok日")[:-1]
    assert "".join([*(stream.push(i) for i in ids), stream.flush()]) == "ok"


@pytest.mark.parametrize("stop", ["the end", "naïve —", "日本語", ". ש"])
def test_a_stop_string_over_many_tokens_never_leaks(tokenizer: Tokenizer, stop: str) -> None:
    out = pieces(tokenizer, TEXT, (stop,))
    assert "".join(out) == TEXT[: TEXT.index(stop)]


def test_the_earliest_of_several_stops_ends_the_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, "one two three", ("three", "two"))) == "one "


def test_half_a_stop_string_at_the_end_is_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, "one STO", ("STOP",))) == "one STO"


def test_random_bytes_stream_as_they_decode_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("ab日é👍 \n") for _ in range(30))
        stops = tuple(rng.choice(["ab", "日a", "zz", "é "]) for _ in range(2))
        expected = min((text[: text.index(s)] for s in stops if s in text), key=len, default=text)
        assert "".join(pieces(tokenizer, text, stops)) == expected


def test_a_chat_template_may_refuse_and_cannot_reach_python(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer._inner.to_str())))
    for template in (
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ):
        hostile = Tokenizer(path, TokenizerSpec(chat_template=template))
        with pytest.raises(RequestError, match="chat template refuses"):
            hostile.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * (10 ** 10) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_blow_up_memory(tokenizer: Tokenizer, tmp_path: Path, template: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer._inner.to_str())
    hostile = Tokenizer(path, TokenizerSpec(chat_template=template))
    with pytest.raises(RequestError, match="chat template refuses"):
        hostile.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_cannot_be_parsed_is_a_named_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer._inner.to_str())
    with pytest.raises(TokenizerError, match="template is invalid"):
        Tokenizer(path, TokenizerSpec(chat_template="{{" + "(" * 5000 + "}}"))


def test_a_panic_of_the_library_is_a_named_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    body = json.loads(tokenizer._inner.to_str())
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 50}
    body["decoder"] = {"type": "Sequence", "decoders": [body["decoder"], strip]}
    path.write_text(json.dumps(body))
    broken = Tokenizer(path, TokenizerSpec())
    with pytest.raises(TokenizerError, match="cannot decode"):
        broken.decode(broken.encode("aaa"))


def test_without_a_template_a_chat_is_refused_with_its_code(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer._inner.to_str())
    plain = Tokenizer(path, TokenizerSpec(bos_id=5, add_bos=True))
    with pytest.raises(RequestError) as caught:
        plain.encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.code == "no_chat_template"
    assert plain.encode("a")[0] == 5
    with pytest.raises(TokenizerError, match="template is invalid"):
        Tokenizer(path, TokenizerSpec(chat_template="{% if %}"))


def test_a_broken_tokenizer_file_is_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(path, TokenizerSpec())
