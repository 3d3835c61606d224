/* A libcuda.so.1 without a GPU, for the real cuda-bindings to call: device memory is host memory and kernels do nothing,
   but what a driver refuses is refused: no context in the thread, a launch that does not agree with the cubin (threads,
   parameters, shared memory, pointers outside of allocations), memory or synchronisation in a capture, copies outside
   of allocations. ICC_STUB_LOG names a file that gets one line per launch; at the end, what was never freed. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
       CAPTURE_UNSUPPORTED = 900 };
enum { MAX_PARAMS = 64, MAX_ALLOCATIONS = 4096, DEFAULT_SHARED = 48 << 10, OPTIN_SHARED = 227 << 10 };

typedef struct { uintptr_t start; size_t size; int pinned; void *raw; } Allocation;
typedef struct { char name[128]; int count, sizes[MAX_PARAMS]; unsigned threads, max_shared; } Kernel;


static Allocation allocations[MAX_ALLOCATIONS];
static int num_allocations, live_contexts, live_streams, live_events, live_modules, live_graphs, executables;
static __thread int current;
static int capturing;
static FILE *out;

static void report(void) {
  if (!out) return;
  fprintf(out, "live %d\n", num_allocations + live_contexts + live_streams + live_events + live_modules + live_graphs + executables);
  fclose(out);
}

#define NEEDS_CONTEXT if (!current) return INVALID_CONTEXT
#define NOT_IN_CAPTURE NEEDS_CONTEXT; if (capturing) return CAPTURE_UNSUPPORTED

int cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (!out && getenv("ICC_STUB_LOG")) { out = fopen(getenv("ICC_STUB_LOG"), "w"); atexit(report); }
  return OK;
}
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuGetErrorString(int code, const char **text) { *text = code == INVALID_VALUE ? "invalid argument" : "stub error"; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : OK; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub H200"); return OK; }
int cuDeviceGetAttribute(int *value, int kind, int device) {
  if (kind == 75) *value = 9;       /* COMPUTE_CAPABILITY_MAJOR */
  else if (kind == 76) *value = 0;  /* COMPUTE_CAPABILITY_MINOR */
  else return INVALID_VALUE;
  return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; live_contexts++; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { live_contexts--; return OK; }
int cuCtxSetCurrent(void *context) { current = context != NULL; return OK; }

/* memory */
static int allocate(uintptr_t *address, size_t size, int pinned) {
  NOT_IN_CAPTURE;
  if (!size || num_allocations == MAX_ALLOCATIONS) return INVALID_VALUE;
  void *raw = malloc(size + 512);
  if (!raw) return NO_MEMORY;
  *address = ((uintptr_t)raw + 255) / 256 * 256;
  memset((void *)*address, 0, size < (64 << 20) ? size : 64 << 20);
  allocations[num_allocations++] = (Allocation){*address, size, pinned, raw};
  return OK;
}
static int release(uintptr_t address, int pinned) {
  for (int i = 0; i < num_allocations; i++)
    if (allocations[i].start == address && allocations[i].pinned == pinned) {
      free(allocations[i].raw);
      allocations[i] = allocations[--num_allocations];
      return OK;
    }
  return INVALID_VALUE;
}
static int inside(uintptr_t address, size_t size, int pinned) {
  for (int i = 0; i < num_allocations; i++) {
    Allocation *a = &allocations[i];
    if (a->pinned == pinned && address >= a->start && address + size <= a->start + a->size) return 1;
  }
  return 0;
}
int cuMemAlloc_v2(uintptr_t *address, size_t size) { return allocate(address, size, 0); }
int cuMemAllocHost_v2(void **address, size_t size) { return allocate((uintptr_t *)address, size, 1); }
int cuMemFree_v2(uintptr_t address) { NOT_IN_CAPTURE; return release(address, 0); }
int cuMemFreeHost(void *address) { NOT_IN_CAPTURE; return release((uintptr_t)address, 1); }
int cuMemGetInfo_v2(size_t *available, size_t *total) { NEEDS_CONTEXT; *available = (getenv("ICC_STUB_GIB") ? strtoul(getenv("ICC_STUB_GIB"), 0, 10) : 1ul) << 30; *total = *available; return OK; }
static int copy(uintptr_t device, void *host, size_t size, int to_device) {
  NOT_IN_CAPTURE;
  if (!inside(device, size, 0) || !inside((uintptr_t)host, size, 1)) return INVALID_VALUE;
  if (to_device) memcpy((void *)device, host, size);
  else memcpy(host, (void *)device, size);
  return OK;
}
int cuMemcpyHtoDAsync_v2(uintptr_t to, void *from, size_t size, void *stream) { return copy(to, from, size, 1); }
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) { return copy(from, to, size, 0); }
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void *stream) {
  NOT_IN_CAPTURE;
  if (!inside(to, size, 0) || !inside(from, size, 0)) return INVALID_VALUE;
  memcpy((void *)to, (void *)from, size);
  return OK;
}
int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *stream) {
  NOT_IN_CAPTURE;
  if (!inside(to, size, 0)) return INVALID_VALUE;
  memset((void *)to, value, size);
  return OK;
}

/* streams and events */
int cuStreamCreate(void **stream, unsigned flags) { NOT_IN_CAPTURE; live_streams++; *stream = &live_streams; return flags > 1 ? INVALID_VALUE : OK; }
int cuStreamDestroy_v2(void *stream) { NEEDS_CONTEXT; live_streams--; return OK; }
int cuStreamSynchronize(void *stream) { NOT_IN_CAPTURE; return OK; }
int cuEventCreate(void **event, unsigned flags) { NOT_IN_CAPTURE; live_events++; *event = malloc(1); return flags > 7 ? INVALID_VALUE : OK; }
int cuEventDestroy_v2(void *event) { NEEDS_CONTEXT; live_events--; free(event); return OK; }
int cuEventRecord(void *event, void *stream) { NEEDS_CONTEXT; return OK; }
int cuEventSynchronize(void *event) { NOT_IN_CAPTURE; return OK; }
int cuEventElapsedTime(float *ms, void *start, void *end) { NOT_IN_CAPTURE; *ms = 0.5f; return OK; }
int cuEventElapsedTime_v2(float *ms, void *start, void *end) { return cuEventElapsedTime(ms, start, end); }

/* modules: the ELF sections .nv.info.<kernel> tell parameters and threads */
static int read_kernel(const unsigned char *elf, Kernel *kernel) {
  uint64_t table = *(uint64_t *)(elf + 0x28);
  int entry = *(uint16_t *)(elf + 0x3a), count = *(uint16_t *)(elf + 0x3c), names = *(uint16_t *)(elf + 0x3e);
  const unsigned char *headers = elf + table;
  const char *text = (const char *)elf + *(uint64_t *)(headers + names * entry + 0x18);
  memset(kernel, 0, sizeof *kernel);
  for (int i = 0; i < count; i++) {
    const unsigned char *header = headers + i * entry;
    const char *name = text + *(uint32_t *)header;
    if (strncmp(name, ".nv.info.", 9)) continue;
    snprintf(kernel->name, sizeof kernel->name, "%s", name + 9);
    const unsigned char *at = elf + *(uint64_t *)(header + 0x18), *end = at + *(uint64_t *)(header + 0x20);
    while (at < end) {
      int format = at[0], code = at[1], size = *(uint16_t *)(at + 2);
      at += 4;
      if (format != 4) continue;
      if (code == 0x17) {
        int ordinal = *(uint16_t *)(at + 4);
        if (ordinal >= MAX_PARAMS) return INVALID_VALUE;
        kernel->sizes[ordinal] = *(uint32_t *)(at + 8) >> 18;
        if (ordinal >= kernel->count) kernel->count = ordinal + 1;
      } else if (code == 0x10) kernel->threads = *(uint32_t *)at * *(uint32_t *)(at + 4) * *(uint32_t *)(at + 8);
      at += size;
    }
    return OK;
  }
  return NOT_FOUND;
}
int cuModuleLoadData(void **module, const unsigned char *image) {
  NOT_IN_CAPTURE;
  Kernel *kernel = malloc(sizeof *kernel);
  if (memcmp(image, "\177ELF", 4) || read_kernel(image, kernel)) return 200;
  kernel->max_shared = DEFAULT_SHARED;
  live_modules++;
  *module = kernel;
  return OK;
}
int cuModuleUnload(void *module) { NEEDS_CONTEXT; live_modules--; free(module); return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  NEEDS_CONTEXT;
  *function = module;
  return strcmp(((Kernel *)module)->name, name) ? NOT_FOUND : OK;
}
int cuFuncSetAttribute(Kernel *kernel, int kind, int value) {
  NEEDS_CONTEXT;
  if (kind != 8 || value < 0 || value > OPTIN_SHARED) return INVALID_VALUE; /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
  kernel->max_shared = value;
  return OK;
}
int cuFuncSetCacheConfig(Kernel *kernel, int config) { NEEDS_CONTEXT; return config == 1 ? OK : INVALID_VALUE; }
static int launch(Kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void **params, void **extra, int dependent) {
  NEEDS_CONTEXT;
  if (!params || extra || !x || !y || !z || y > 65535 || z > 65535) return INVALID_VALUE;
  if (bx * by * bz != kernel->threads || shared > kernel->max_shared) return INVALID_VALUE;
  if (out) fprintf(out, "launch %s %u %u %u %u %u %d %d", kernel->name, x, y, z, bx, shared, capturing, dependent);
  for (int i = 0; i < kernel->count; i++) {
    uint64_t value = 0;
    memcpy(&value, params[i], kernel->sizes[i]);
    if (out) fprintf(out, " %d:%lx", kernel->sizes[i], (unsigned long)value);
    if (kernel->sizes[i] == 8 && (i < kernel->count - 2 ? !inside(value, 1, 0) : value != 0)) return ILLEGAL_ADDRESS;
  }
  if (out) fprintf(out, "\n");
  return OK;
}

int cuLaunchKernel(Kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  return launch(kernel, x, y, z, bx, by, bz, shared, params, extra, 0);
}
typedef struct { int id; int value[17]; } Attribute; /* CUlaunchAttribute: the value begins at byte 8 */
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;
int cuLaunchKernelEx(const Config *c, Kernel *kernel, void **params, void **extra) {
  if (sizeof(Attribute) != 72 || c->count != 1 || c->attributes[0].id != 6) return INVALID_VALUE; /* PROGRAMMATIC_STREAM_SERIALIZATION */
  if (c->stream != &live_streams) return INVALID_VALUE;
  return launch(kernel, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, params, extra,
                c->attributes[0].value[1]);
}

/* graphs */
int cuStreamBeginCapture_v2(void *stream, int mode) { NOT_IN_CAPTURE; capturing = 1; return mode > 2 ? INVALID_VALUE : OK; }
int cuStreamEndCapture(void *stream, void **graph) { NEEDS_CONTEXT; capturing = 0; live_graphs++; *graph = &live_graphs; return OK; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) { NOT_IN_CAPTURE; executables++; *executable = &executables; return flags ? INVALID_VALUE : OK; }
int cuGraphDestroy(void *graph) { NEEDS_CONTEXT; live_graphs--; return OK; }
int cuGraphExecDestroy(void *executable) { NEEDS_CONTEXT; executables--; return OK; }
int cuGraphLaunch(void *executable, void *stream) {
  NOT_IN_CAPTURE;
  if (out) fprintf(out, "graph\n");
  return executable == &executables ? OK : INVALID_VALUE;
}

#include <dlfcn.h>
/* Drivers give the newest version of a symbol that the caller's toolkit knows. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  char name[128];
  const char *suffixes[] = {"_v2", ""};
  *function = NULL;
  for (int i = 0; i < 2 && !*function; i++) {
    snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
    *function = dlsym(RTLD_DEFAULT, name);
  }
  if (!strcmp(symbol, "cuGetProcAddress")) *function = cuGetProcAddress_v2;
  if (!strcmp(symbol, "cuGraphInstantiate")) *function = cuGraphInstantiateWithFlags;
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) { return cuGetProcAddress_v2(symbol, function, version, flags, NULL); }
