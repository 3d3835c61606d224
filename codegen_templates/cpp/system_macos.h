// system_linux.h's functions by macOS. Apple's libc++ sleeps by the same two calls, which are in no header.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>

#include "simd.h"

extern "C" int __ulock_wait(uint32_t operation, void* address, uint64_t value, uint32_t microseconds);
extern "C" int __ulock_wake(uint32_t operation, void* address, uint64_t value);
constexpr uint32_t ULOCK_COMPARE_AND_WAIT = 1, ULOCK_WAKE_ALL = 0x100, ULOCK_NO_ERRNO = 0x1000000;  // sys/ulock.h of XNU
constexpr size_t STACK_BYTES = 8 << 20;  // a thread's is 512 KiB here where nobody says

ICC_INLINE void sleep_while(std::atomic<int32_t>& value, int32_t old) {
    __ulock_wait(ULOCK_COMPARE_AND_WAIT | ULOCK_NO_ERRNO, &value, (uint32_t)old, 0);
}
ICC_INLINE void wake_all(std::atomic<int32_t>& value) {
    __ulock_wake(ULOCK_COMPARE_AND_WAIT | ULOCK_WAKE_ALL | ULOCK_NO_ERRNO, &value, 0);
}
ICC_INLINE void give_way() { sched_yield(); }

typedef pthread_t Thread;
typedef void* ThreadResult;

static bool start_thread(Thread& thread, ThreadResult (*work)(void*), void* arg) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return false;
    const bool started = !pthread_attr_setstacksize(&attributes, STACK_BYTES) && !pthread_create(&thread, &attributes, work, arg);
    pthread_attr_destroy(&attributes);
    return started;
}
ICC_INLINE void join_thread(Thread thread) { pthread_join(thread, nullptr); }

ICC_INLINE void* allocate_lines(size_t size) { return aligned_alloc(64, size); }
ICC_INLINE void free_lines(void* memory) { free(memory); }

ICC_INLINE void populate(const void*, size_t) {}

[[maybe_unused]] static int allowed_cores() { return (int)sysconf(_SC_NPROCESSORS_ONLN); }
