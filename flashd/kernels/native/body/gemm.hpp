// out = w x + bias for the many tokens of a prompt.
