// RMSNorm, LayerNorm and rotary position embeddings.
