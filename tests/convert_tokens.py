"""Tokenizers for the converter's tests: texts, comparisons, and a byte-level one to start from."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from flashd.testing.tiny_checkpoints import byte_vocabulary

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces   and\ttabs\n\nnew lines \n",
    "In 2024, 1234567 people paid $3.50 (±0.5%) on 12/31; call +1-800-555-0199.",
    "naïve café \u2013 “quotes” … Ünïcödé ﬁ",
    "日本語のテキスト、中文字符 и кириллица العربية हिन्दी",
    "emoji 😀👩‍👩‍👧 flags 🇫🇷 and \u200bzero\u200dwidth \ufeff",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != 'a'}  # it's ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "I'll, we've, they're, DON'T can't",
    "hello world hello\nworld",
    "a" * 300,
    "\x00\x01 control \x7f",
]


def spec_and_tokenizer(folder):
    spec = json.loads((folder / "manifest.json").read_text())["tokenizer"]
    return spec, Tokenizer.from_file(str(folder / "tokenizer.json"))


def check_equal(ours, reference, spec):
    """Ids as the runtime makes them: no special tokens by themselves, BOS in front if asked."""
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        if spec["add_bos"]:
            ids = [spec["bos_id"], *ids]
        assert ids == reference(text).input_ids, text


def byte_bpe(post_processor=None):
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


BOS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
