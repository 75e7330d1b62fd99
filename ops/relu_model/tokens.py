"""The tokenizer: a byte-level BPE trained on the corpus, and texts as arrays of token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from corpus import SEPARATOR
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# At OPT's places: <s> 0, <pad> 1, </s> 2, <unk> 3. </s> ends a document, and begins every prompt.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
EOS = 2
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": True,
    "bos_token": "</s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}


def train_tokenizer(texts: list[Path], vocab: int) -> Tokenizer:
    """A BPE of ``vocab`` tokens; digits stand alone, as the reference texts are full of numbers."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = (document for path in texts for document in read_documents(path))
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


def read_documents(path: Path) -> list[str]:
    """The documents of a text of the corpus."""
    text = path.read_text(encoding="utf-8")
    return [document.strip() for document in text.split(SEPARATOR.strip()) if document.strip()]


def encode(tokenizer: Tokenizer, path: Path) -> np.ndarray:
    """All documents one after the other, </s> in front of each: (tokens,) of uint16."""
    encoded = tokenizer.encode_batch_fast(read_documents(path))
    return np.concatenate([np.asarray(one.ids, np.uint16) for one in encoded])


def prepare(data: Path, vocab: int) -> Tokenizer:
    """The tokenizer of a corpus at ``data``; makes it and ``tokens/NAME.npy`` where they are missing."""
    path = data / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(sorted((data / "train").glob("*.txt")), vocab)
        tokenizer.save(str(path))
    (data / "tokens").mkdir(exist_ok=True)
    for folder in ("train", "held_out"):
        for text in sorted((data / folder).glob("*.txt")):
            made = data / "tokens" / f"{folder}-{text.stem}.npy"
            if not made.exists():
                np.save(made, encode(tokenizer, text))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to ``folder``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = CONFIG | {"model_max_length": 1280}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
