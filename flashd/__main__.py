"""``python -m flashd``."""

from flashd.cli.main import main

main()
