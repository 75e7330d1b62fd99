"""Which neurons' rows are in RAM, and where. Pure tables: no I/O, no kernels, no threads."""
