"""flashd: a local daemon that generates text with models larger than the machine's free RAM."""

__version__ = "0.1.0"
