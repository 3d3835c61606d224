// system_linux.h's functions by Windows, declared here: <windows.h> is long, and defines names that kernels use. A library is
// linked without a C runtime of its own, so that what compilers expect of one is here, too.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

#include "simd.h"

#define ICC_IMPORT extern "C" __declspec(dllimport)

ICC_IMPORT int WaitOnAddress(volatile void* address, void* compared, size_t size, unsigned milliseconds);
ICC_IMPORT void WakeByAddressAll(void* address);
ICC_IMPORT int SwitchToThread();
ICC_IMPORT void* CreateThread(void* security, size_t stack, unsigned (*work)(void*), void* arg, unsigned flags, unsigned* id);
ICC_IMPORT unsigned WaitForSingleObject(void* handle, unsigned milliseconds);
ICC_IMPORT int CloseHandle(void* handle);
ICC_IMPORT void* GetCurrentProcess();
ICC_IMPORT int GetProcessAffinityMask(void* process, size_t* own, size_t* whole);
ICC_IMPORT unsigned GetActiveProcessorCount(unsigned short group);
ICC_IMPORT void* _aligned_malloc(size_t size, size_t alignment);
ICC_IMPORT void _aligned_free(void* memory);
constexpr unsigned FOREVER = 0xffffffff, STACK_IS_RESERVED = 0x10000, STACK_BYTES = 8 << 20;

// The library's entry, which has nothing to do: kernels have no constructors. Of floats a compiler asks for _fltused.
extern "C" int DllMainCRTStartup(void*, unsigned, void*) { return 1; }
extern "C" int _fltused = 0;

// Before a function takes more than a page of stack it touches each, as a stack grows by the page that guards it. rax, or x15
// in units of 16 bytes: how much; all other registers are kept (compiler-rt, chkstk.S).
#if defined(__x86_64__)
asm(".text\n___chkstk_ms:\n"
    "push %rcx\npush %rax\ncmp $0x1000, %rax\nlea 24(%rsp), %rcx\njb 2f\n"
    "1: sub $0x1000, %rcx\ntest %rcx, (%rcx)\nsub $0x1000, %rax\ncmp $0x1000, %rax\nja 1b\n"
    "2: sub %rax, %rcx\ntest %rcx, (%rcx)\npop %rax\npop %rcx\nret\n");
#else
asm(".text\n__chkstk:\n"
    "lsl x16, x15, #4\nmov x17, sp\n"
    "1: sub x17, x17, #4096\nsubs x16, x16, #4096\nldr xzr, [x17]\nb.gt 1b\nret\n");
#endif

ICC_INLINE void sleep_while(std::atomic<int32_t>& value, int32_t old) { WaitOnAddress(&value, &old, sizeof old, FOREVER); }
ICC_INLINE void wake_all(std::atomic<int32_t>& value) { WakeByAddressAll(&value); }
ICC_INLINE void give_way() { SwitchToThread(); }

typedef void* Thread;
typedef unsigned ThreadResult;

ICC_INLINE bool start_thread(Thread& thread, ThreadResult (*work)(void*), void* arg) {
    return (thread = CreateThread(nullptr, STACK_BYTES, work, arg, STACK_IS_RESERVED, nullptr)) != nullptr;
}
ICC_INLINE void join_thread(Thread thread) {
    WaitForSingleObject(thread, FOREVER);
    CloseHandle(thread);
}

ICC_INLINE void* allocate_lines(size_t size) { return _aligned_malloc(size, 64); }
ICC_INLINE void free_lines(void* memory) { _aligned_free(memory); }

ICC_INLINE void populate(const void*, size_t) {}

// A process may use one group of at most 64 cores, of which the mask says which, or all groups, where the mask is empty.
[[maybe_unused]] static int allowed_cores() {
    size_t own = 0, whole = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &own, &whole) && own) return __builtin_popcountll(own);
    return (int)GetActiveProcessorCount(0xffff);
}
