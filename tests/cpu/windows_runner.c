// Runs kernels.dll of the working directory on Windows: memory.bin is the memory that it works on, where numbers are places in it
// until they are told where it lies. Without a C runtime. See test_systems.py, which writes the one and reads the other.
#include <stdint.h>
#define IMPORT __declspec(dllimport)
IMPORT void* LoadLibraryA(const char*);
IMPORT void* GetProcAddress(void*, const char*);
IMPORT void* CreateFileA(const char*, unsigned, unsigned, void*, unsigned, unsigned, void*);
IMPORT int ReadFile(void*, void*, unsigned, unsigned*, void*);
IMPORT int WriteFile(void*, const void*, unsigned, unsigned*, void*);
IMPORT int CloseHandle(void*);
IMPORT void* VirtualAlloc(void*, uint64_t, unsigned, unsigned);
IMPORT void Sleep(unsigned);
IMPORT _Noreturn void ExitProcess(unsigned);

typedef struct {
    int64_t bytes, threads, steps, places, num_places;  // places: of the numbers that are addresses
    void *weights, *arena, *kv;
    const int64_t* num_blocks;
    void *batch, *message;
    int64_t message_bytes, piece;
    int64_t* following;
    void* digests;
} Memory;

void mainCRTStartup(void) {
    void* library = LoadLibraryA(".\\kernels.dll");
    if (!library) ExitProcess(2);
    int32_t (*version)(void) = (int32_t (*)(void))GetProcAddress(library, "icc_abi_version");
    void (*blake3)(const void*, int64_t, int64_t, int64_t*, void*) = (void (*)(const void*, int64_t, int64_t, int64_t*, void*))GetProcAddress(library, "icc_blake3");
    void* (*create)(int32_t, void*, void*, void*, const int64_t*) = (void* (*)(int32_t, void*, void*, void*, const int64_t*))GetProcAddress(library, "icc_create");
    int32_t (*step)(void*, void*) = (int32_t (*)(void*, void*))GetProcAddress(library, "icc_step");
    void (*destroy)(void*) = (void (*)(void*))GetProcAddress(library, "icc_destroy");
    if (!version || version() != 6 || !blake3 || !create || !step || !destroy) ExitProcess(3);
    char* memory = VirtualAlloc(0, 64 << 20, 0x3000, 4);
    unsigned count = 0;
    void* file = CreateFileA("memory.bin", 0x80000000, 0, 0, 3, 0, 0);
    if (!ReadFile(file, memory, 64 << 20, &count, 0)) ExitProcess(4);
    CloseHandle(file);
    Memory* m = (Memory*)memory;
    const int64_t* places = (int64_t*)(memory + m->places);
    for (int64_t i = 0; i < m->num_places; ++i) *(uint64_t*)(memory + places[i]) += (uint64_t)memory;
    blake3(m->message, m->message_bytes, m->piece, m->following, m->digests);
    void* handle = create((int32_t)m->threads, m->weights, m->arena, m->kv, m->num_blocks);
    if (!handle) ExitProcess(5);
    for (int64_t i = 0; i < m->steps; ++i) {
        if (i % 8 == 0) Sleep(20);  // threads fall asleep, and are woken
        if (step(handle, m->batch)) ExitProcess(6);
    }
    destroy(handle);
    file = CreateFileA("result.bin", 0x40000000, 0, 0, 2, 0, 0);
    if (!WriteFile(file, memory, (unsigned)m->bytes, &count, 0)) ExitProcess(7);
    CloseHandle(file);
    ExitProcess(0);
}
