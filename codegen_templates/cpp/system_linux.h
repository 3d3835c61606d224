// What kernels ask of the operating system, by Linux: to sleep until a number changes and to wake who does, threads, memory,
// cores. system_macos.h and system_windows.h have the same functions in the libraries for those.
#pragma once
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "simd.h"

// Sleeps where `value` is `old`, until it is woken; may return early.
ICC_INLINE void sleep_while(std::atomic<int32_t>& value, int32_t old) {
    syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
}
ICC_INLINE void wake_all(std::atomic<int32_t>& value) {
    syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
ICC_INLINE void give_way() { sched_yield(); }  // another thread may have the core

typedef pthread_t Thread;
typedef void* ThreadResult;

// Whether a thread that runs `work` has started.
ICC_INLINE bool start_thread(Thread& thread, ThreadResult (*work)(void*), void* arg) {
    return !pthread_create(&thread, nullptr, work, arg);
}
ICC_INLINE void join_thread(Thread thread) { pthread_join(thread, nullptr); }

// Memory on a cache line of its own; size: a multiple of 64. Null where there is none.
ICC_INLINE void* allocate_lines(size_t size) { return aligned_alloc(64, size); }
ICC_INLINE void free_lines(void* memory) { free(memory); }

// Reads the pages of a map all at once, where the kernel knows MADV_POPULATE_READ.
ICC_INLINE void populate(const void* data, size_t size) { madvise((void*)data, size, 22); }

// The cores that this process may use.
[[maybe_unused]] static int allowed_cores() {
    unsigned long mask[1024] = {};
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    int found = 0;
    for (long i = 0; i < bytes / (long)sizeof *mask; ++i) found += __builtin_popcountl(mask[i]);
    return found;
}
