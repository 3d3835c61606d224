// The program: its steps as a table, and the entry points of abi.h.
// A thread walks the table, resolves each operand for this step's token count and calls the kernel; a barrier ends a step.
// Params: ProgramParams.
enum Space : uint8_t { NONE, BUFFER, WEIGHT, INPUT, LOGITS };

// An operand. BUFFER: arena + at * tokens + offset bytes; WEIGHT, INPUT: weight or input number `at` + offset bytes.
struct Arg { Space space; int64_t at, offset; };

struct Step {
    void (*run)(const Ctx&);
    int group;                          // KV group of this layer
    int64_t kv_offset, kv_block_bytes;  // bytes per block of its layers before; bytes of one block of this layer
    Arg in[10], out[4];
};

static const Step STEPS[] = {
    {k0_quantize_rows, 0, 0, 0, {{BUFFER, 0, 0}}, {{BUFFER, 128, 0}, {BUFFER, 256, 0}, {BUFFER, 384, 0}}},
    {k1_linear_q, 0, 0, 0, {{BUFFER, 128, 0}, {BUFFER, 256, 0}, {BUFFER, 384, 0}, {WEIGHT, 0, 0}, {NONE, 0, 0}, {NONE, 0, 0}}, {{BUFFER, 512, 0}, {NONE, 0, 0}}},
};
constexpr int NUM_STEPS = 2;

// Steps [0, shared), then [begin, end): first the program's own, then its sections.
struct Section { int shared, begin, end; };
static const Section SECTIONS[] = {{0, 0, 2}, };
constexpr int NUM_SECTIONS = 1;

// Bytes that one block takes over all layers of a KV group.
static const int64_t GROUP_BYTES[] = {0};
constexpr int NUM_GROUPS = 1;

struct Handle {
    const void* const* weights;
    const void* const* inputs;  // those that the program declares
    char *arena, *shared;
    char* kv[NUM_GROUPS];
    int64_t num_blocks[NUM_GROUPS];
    int threads;
    Thread* ids;
    char** scratch;
    int32_t* rests;  // [threads][NUM_STEPS]
    const icc_batch* batch;  // of every group
    Section section;
    bool stop;
    Gate start;
    Barrier barrier;
    std::atomic<int32_t>* next;  // [NUM_STEPS][threads]
};

// First the arrays that every program may read, then the program's own.
static const void* input(const Handle& h, int64_t number) {
    switch (number) {
        case 0: return h.batch->token_ids;
        case 1: return h.batch->positions;
        default: return h.inputs[number - 2];
    }
}

static void* resolve(const Handle& h, const Arg& a) {
    switch (a.space) {
        case BUFFER: return h.arena + a.at * h.batch->num_tokens + a.offset;
        case WEIGHT: return (char*)h.weights[a.at] + a.offset;
        case INPUT: return (char*)input(h, a.at) + a.offset;
        case LOGITS: return h.batch->logits;
        default: return nullptr;
    }
}

static void walk(Handle& h, int tid) {
    Ctx c;
    c.tid = tid, c.threads = h.threads, c.scratch = h.scratch[tid], c.shared = h.shared;
    c.barrier = &h.barrier;
    const Section at = h.section;  // a late thread ends this loop while the next call already writes it
    for (int i = 0; i < at.shared + at.end - at.begin; ++i) {
        const int s = i < at.shared ? i : at.begin + i - at.shared;
        const Step& step = STEPS[s];
        for (int o = 0; o < 10; ++o) c.in[o] = resolve(h, step.in[o]);
        for (int o = 0; o < 4; ++o) c.out[o] = resolve(h, step.out[o]);
        c.batch = h.batch + step.group;
        c.kv = h.kv[step.group] + h.num_blocks[step.group] * step.kv_offset;
        c.kv_block_bytes = step.kv_block_bytes;
        c.next = &h.next[s * h.threads];
        c.rest = &h.rests[tid * NUM_STEPS + s];
        step.run(c);
        h.barrier.wait(tid);
    }
}

struct Worker { Handle* handle; int tid; };

static ThreadResult work(void* arg) {
    const Worker me = *(Worker*)arg;
    free(arg);
    for (uint32_t round = 0;; ++round) {  // wraps around, as the gate does
        me.handle->start.wait_past((int32_t)round);
        if (me.handle->stop) return {};
        walk(*me.handle, me.tid);
    }
}

static void release(Handle* h, int started) {
    h->stop = true;
    h->start.advance();
    for (int t = 1; t < started; ++t) join_thread(h->ids[t]);
    for (int t = 0; t < h->threads && h->scratch; ++t) free_lines(h->scratch[t]);
    free(h->scratch), free(h->ids), free_lines(h->shared), free(h->rests), free(h->next);
    h->~Handle();
    free_lines(h);
}

extern "C" int32_t icc_abi_version(void) { return ICC_ABI_VERSION; }

extern "C" void icc_blake3(const uint8_t* data, int64_t size, int64_t piece, int64_t* next, uint8_t (*digests)[32]) {
    hash_pieces(data, size, piece, next, digests);
}

extern "C" void icc_largest(const float* logits, int32_t rows, int64_t width, int32_t* found) {
    const auto ordered = [](float value) {  // an integer that is as large among others as the value: of any order of maxima
        int32_t bits;
        memcpy(&bits, &value, sizeof bits);
        return bits ^ (bits >> 31 & INT32_MAX);
    };
    const int32_t most = ordered(INFINITY), least = ordered(-INFINITY);  // what is no number is beyond these
    for (int32_t r = 0; r < rows; ++r, logits += width) {
        int32_t high = INT32_MIN, low = INT32_MAX;
        for (int64_t i = 0; i < width; ++i) {
            const int32_t value = ordered(logits[i]);
            high = value > high ? value : high;
            low = value < low ? value : low;
        }
        found[r] = -1;
        if (low < least || high == least || high >= most) continue;
        const int32_t bits = high ^ (high >> 31 & INT32_MAX);
        float largest;
        memcpy(&largest, &bits, sizeof bits);
        int32_t i = 0;
        while (logits[i] != largest) ++i;
        found[r] = i;
    }
}

extern "C" void* icc_create(int32_t num_threads, const void* const* weights, void* arena, void* kv, const int64_t* num_blocks) {
    if (num_threads < 1 || num_threads > Barrier::GROUP * Barrier::MOST) return nullptr;
    void* memory = allocate_lines((sizeof(Handle) + 63) / 64 * 64);
    if (!memory) return nullptr;
    Handle* h = new (memory) Handle();
    h->weights = weights, h->arena = (char*)arena;
    for (int g = 0; g < NUM_GROUPS; ++g) {
        h->kv[g] = g ? h->kv[g - 1] + h->num_blocks[g - 1] * GROUP_BYTES[g - 1] : (char*)kv;
        h->num_blocks[g] = num_blocks[g];
    }
    h->threads = num_threads, h->barrier.members = num_threads, h->stop = false, h->batch = nullptr;
    if (num_threads > allowed_cores()) h->start.spins = h->barrier.gate.spins = 0;
    h->ids = (Thread*)calloc((size_t)num_threads, sizeof(Thread));
    h->scratch = (char**)calloc((size_t)num_threads, sizeof(char*));
    h->shared = (char*)allocate_lines(ICC_SHARED_BYTES);
    h->rests = (int32_t*)calloc((size_t)num_threads * NUM_STEPS, sizeof(int32_t));
    h->next = (std::atomic<int32_t>*)calloc((size_t)num_threads * NUM_STEPS, sizeof(std::atomic<int32_t>));
    int started = 1;
    bool ok = h->ids && h->scratch && h->shared && h->rests && h->next;
    for (int t = 0; ok && t < num_threads; ++t) ok = (h->scratch[t] = (char*)allocate_lines(ICC_SCRATCH_BYTES));
    for (; ok && started < num_threads; ++started) {
        Worker* worker = (Worker*)malloc(sizeof(Worker));
        if (!worker) { ok = false; break; }
        *worker = {h, started};
        if (!start_thread(h->ids[started], work, worker)) { free(worker), ok = false; break; }
    }
    if (ok) return h;
    release(h, started);
    return nullptr;
}

extern "C" void icc_inputs(void* handle, const void* const* inputs) { ((Handle*)handle)->inputs = inputs; }

static void move_slots(const Handle& h, const icc_batch* b) {
    for (int m = 0; m < b->num_moves; ++m) {
    }
}

static int32_t run(void* handle, int section, const icc_batch* batch) {
    Handle* h = (Handle*)handle;
    if (!h || !batch || batch->num_tokens < 0 || section < 0 || section >= NUM_SECTIONS) return 1;
    if (batch->num_tokens == 0) return 0;
    h->batch = batch;
    h->section = SECTIONS[section];
    if (section == 0) move_slots(*h, batch);
    for (int i = 0; i < NUM_STEPS * h->threads; ++i) h->next[i].store(0, std::memory_order_relaxed);
    if (h->threads > 1) h->start.advance();
    walk(*h, 0);
    return 0;
}

extern "C" int32_t icc_step(void* handle, const icc_batch* batch) { return run(handle, 0, batch); }

extern "C" int32_t icc_section(void* handle, int32_t section, const icc_batch* batch) {
    return section < 0 ? 1 : run(handle, section + 1, batch);
}

extern "C" void icc_destroy(void* handle) {
    if (handle) release((Handle*)handle, ((Handle*)handle)->threads);
}

extern "C" void icc_scratch(int32_t num_threads, int64_t* of_threads, int64_t* shared) {
    *of_threads = num_threads * ICC_SCRATCH_BYTES;
    *shared = ICC_SHARED_BYTES;
}

extern "C" int64_t icc_shared_touched(int32_t num_threads, int32_t num_seqs, int32_t length) {
    const int64_t splits = 1 + (length + SEGMENT - 1) / SEGMENT;
    int64_t most = 0;
    for (const auto& partial : ICC_PARTIALS) {
        int64_t seqs = partial[0] ? (4 * num_threads - 1) / partial[0] : 0;  // of more, each has a thread of its own
        if (seqs > num_seqs) seqs = num_seqs;
        const int64_t taken = seqs * partial[0] * splits * partial[1];
        if (taken > most) most = taken;
    }
    if (num_threads == 1 || length <= SEGMENT) return 0;
    return most < ICC_SHARED_BYTES ? most : ICC_SHARED_BYTES;
}
