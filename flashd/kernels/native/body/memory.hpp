// Reading memory at full speed, to know how fast that is.
