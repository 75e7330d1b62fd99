"""``flashd bench``: figures of this machine beside the raw device's."""
