// Products of many tokens: tokens in the lanes of vectors, weights broadcast.
