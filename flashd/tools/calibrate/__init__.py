"""``flashd calibrate``: which neurons fire, and predictors of that. Only ``train`` needs torch."""
