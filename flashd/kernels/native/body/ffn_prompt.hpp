// The FFN of the many tokens of a prompt over neuron rows.
