// The micro-kernels of one weight format, ascending in rows.
// Params: MicroTableParams.
static const QuantMicro QUANT_Q4_0[] = {
    {1, 2, q4_0_m1_n2, false, false, 8 },
    {6, 1, q4_0_m6_n1, false, true, 8 },
    {8, 1, q4_0_m8_n1 },
};
