// y[L, 20] = x[logit_rows]: the rows whose logits are wanted.
// in: x (rows 24 apart); out: y. Rows are shared between threads.
// Params: SelectRowsParams.
static void k0_select_rows(const Ctx& c) {
    const Range rows = share(c, c.logit_rows());
    for (int64_t i = rows.begin; i < rows.end; ++i)
        memcpy(c.output<float>(0) + i * 20,
               c.input<const float>(0) + clamp_row(c.batch->logit_rows[i], c.tokens()) * 24,
               sizeof(float) * 20);
}
