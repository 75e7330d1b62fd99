"""The OPT network as training sees it: the checkpoint's parameter names, its loss and FFN activity.

``transformers`` computes the same function from the same parameters; here a step also returns how many
neurons fire and how strongly, which training steers, and takes positions that begin anywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's own text uses

VOCAB = 3584
HIDDEN = 256
LAYERS = 6
HEADS = 4
FFN = 1024
POSITIONS = 1280
OFFSET = 2  # OPT's position embedding begins with two rows that nothing uses

CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_dim": FFN,
    "max_position_embeddings": POSITIONS,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "use_cache": True,
    "dtype": "float16",
}


class Attention(nn.Module):
    """Causal self-attention with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, HIDDEN) to the same."""
        batch, tokens, _ = x.shape
        shape = (batch, tokens, HEADS, HIDDEN // HEADS)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(batch, tokens, HIDDEN))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.self_attn_layer_norm = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, FFN)
        self.fc2 = nn.Linear(FFN, HIDDEN)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden state, and the FFN's activations after ReLU (batch, tokens, FFN)."""
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        fired = F.relu(self.fc1(self.final_layer_norm(x)))
        return x + self.fc2(fired), fired


class Decoder(nn.Module):
    """Embeddings, layers and the last norm, under OPT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.embed_positions = nn.Embedding(POSITIONS + OFFSET, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(HIDDEN)


class Network(nn.Module):
    """The whole model; its head is the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"decoder": Decoder()})
        decoder = self.decoder
        nn.init.normal_(decoder.embed_tokens.weight, std=0.02)
        # Waves, so that neighbouring positions begin alike: few tokens train each of them.
        at = torch.arange(POSITIONS + OFFSET)[:, None]
        rates = torch.exp(torch.arange(0, HIDDEN, 2) * (-math.log(10_000.0) / HIDDEN))
        waves = torch.cat([torch.sin(at * rates), torch.cos(at * rates)], dim=1)
        decoder.embed_positions.weight.data.copy_(0.02 * waves)
        for layer in decoder.layers:
            for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
                nn.init.normal_(linear.weight, std=0.5 / math.sqrt(linear.in_features))
                nn.init.zeros_(linear.bias)
            # Each layer begins as the identity.
            nn.init.zeros_(layer.self_attn.out_proj.weight)
            nn.init.zeros_(layer.fc2.weight)

    @property
    def decoder(self) -> Decoder:
        """The decoder, with its type."""
        decoder = self.model["decoder"]
        assert isinstance(decoder, Decoder)
        return decoder

    def forward(self, ids: Tensor, targets: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean loss in nats per token, and of each layer the share of neurons that fire and their mean.

        ``ids`` and ``targets`` are (batch, tokens); ``start`` (batch,) is each sequence's first position.
        The shares carry no gradient, the means do.
        """
        decoder = self.decoder
        positions = start[:, None] + torch.arange(ids.shape[1])[None] + OFFSET
        x = decoder.embed_tokens(ids) + decoder.embed_positions(positions)
        shares, means = [], []
        for layer in decoder.layers:
            x, fired = layer(x)
            means.append(fired.mean())
            shares.append((fired.detach() > 0).float().mean())
        logits = F.linear(decoder.final_layer_norm(x), decoder.embed_tokens.weight)
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))
        return loss, torch.stack(shares), torch.stack(means)
