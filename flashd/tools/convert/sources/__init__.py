"""Checkpoint formats: tensors by name, read by rows, without loading a file or running its code."""
