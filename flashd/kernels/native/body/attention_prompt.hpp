// Causal attention of the many queries of a prompt.
