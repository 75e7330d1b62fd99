"""Which neurons' rows are in RAM, and where; how much memory there is, and what it is promised to."""
