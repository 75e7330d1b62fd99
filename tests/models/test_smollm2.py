"""The demo model against transformers loading the same GGUF (dequantised, float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import serving

CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters blue light most."},
        {"role": "user", "content": "And at sunset, 10 minutes later?"},
    ],
    [{"role": "user", "content": "Write a haiku about flash memory, naïve café 日本."}],
)
N_NEW = 32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_greedy_text_equals_transformers(
    smollm2_f32: Path, hf_smollm2: Any, hf_smollm2_tokenizer: Any, tmp_path: Path
) -> None:
    model, tokenizer = hf_smollm2, hf_smollm2_tokenizer
    with serving(smollm2_f32, tmp_path, "--kv-dtype", "f32") as daemon, daemon.http() as http:
        for messages in CHATS:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                whole = model.generate(**prompt, max_new_tokens=N_NEW, do_sample=False, pad_token_id=2)[0]
            expected = whole[prompt["input_ids"].shape[1] :].tolist()
            body = {"messages": messages, "temperature": 0, "max_tokens": N_NEW, "return_tokens": True}
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["usage"]["prompt_tokens"] == prompt["input_ids"].shape[1]
            assert answer["choices"][0]["tokens"] == expected
            text = tokenizer.decode(expected, skip_special_tokens=True)
            assert answer["choices"][0]["message"]["content"] == text
