// Activation predictors of up to 16 sequences: two products of a low rank (LLM in a flash, section 3.1).

template <class T>
void predict_hidden_rows(const PredictArgs& a, int64_t first, int64_t last) {
    const int64_t stride_bytes = a.d * static_cast<int64_t>(sizeof(T));
    for_each_row(static_cast<const T*>(a.w1), stride_bytes, a.x, a.d, a.batch, first, last,
                 [&](int64_t r, const float* sums) {
                     float* packed = a.hidden + r / W * W * a.batch + r % W;
                     for (int64_t b = 0; b < a.batch; ++b)
                         packed[b * W] = activate(Activation::relu, a.b1 ? sums[b] + a.b1[r] : sums[b]);
                 });
}

template <class T>
void predict_score_rows(const PredictArgs& a, int64_t first, int64_t last) {
    const int64_t stride_bytes = a.rank * static_cast<int64_t>(sizeof(T));
    for_each_row(static_cast<const T*>(a.w2), stride_bytes, a.hidden, a.rank, a.batch, first, last,
                 [&](int64_t r, const float* sums) {
                     for (int64_t b = 0; b < a.batch; ++b) {
                         const float score = a.b2 ? sums[b] + a.b2[r] : sums[b];
                         if (a.scores) a.scores[b * a.n + r] = score;
                         a.active[b * a.n + r] = !(score <= a.threshold);  // NaN hides no neuron
                     }
                 });
}

void predict_hidden(const PredictArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(predict_hidden_rows, a.type1, a, first, last);
}

void predict_scores(const PredictArgs& a, int64_t first, int64_t last) {
    FLASHD_BY_TYPE(predict_score_rows, a.type2, a, first, last);
}
