// The micro-kernels of one weight format, ascending in rows.
// Params: MicroTableParams.
static const DenseMicro DENSE_F32[] = {
    {1, 4, m1_n4 },
    {2, 2, m2_n2 },
};
