// Activation predictors of up to 16 sequences.
