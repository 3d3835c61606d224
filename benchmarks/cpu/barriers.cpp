// What a barrier of the kernels' threads takes; see barriers.py.
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#include "team.h"

struct Task { Barrier* barrier; int tid, core, rounds; };

static void* meet(void* arg) {
    const Task& task = *(const Task*)arg;
    if (task.core >= 0) {
        unsigned long mask[16] = {};
        mask[task.core / 64] |= 1ul << task.core % 64;
        syscall(SYS_sched_setaffinity, 0, sizeof mask, mask);
    }
    for (int i = 0; i < task.rounds; ++i) task.barrier->wait(task.tid);
    return nullptr;
}

// Seconds of one barrier. cores: one for each thread, -1 for any.
extern "C" double barrier_seconds(int threads, const int* cores, int rounds) {
    Barrier* barrier = new Barrier;
    barrier->members = threads;
    if (threads > allowed_cores()) barrier->gate.spins = 0;
    Task* tasks = new Task[threads];
    pthread_t* ids = new pthread_t[threads];
    timespec begin, end;
    for (int t = 0; t < threads; ++t) tasks[t] = {barrier, t, cores[t], rounds};
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int t = 0; t < threads; ++t) pthread_create(&ids[t], nullptr, meet, &tasks[t]);
    for (int t = 0; t < threads; ++t) pthread_join(ids[t], nullptr);
    clock_gettime(CLOCK_MONOTONIC, &end);
    delete[] ids;
    delete[] tasks;
    delete barrier;
    return (double)(end.tv_sec - begin.tv_sec + 1e-9 * (end.tv_nsec - begin.tv_nsec)) / rounds;
}
