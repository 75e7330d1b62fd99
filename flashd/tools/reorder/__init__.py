"""``flashd reorder``: neurons that are read together become neighbours in the file."""
