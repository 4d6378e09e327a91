/* What is kept of a thread: the libcuda call it is in, and its current contexts. */
#ifndef MGPU_CALLS_H
#define MGPU_CALLS_H

#include "maps.h"

MGPU_MAP("hash", __u64, struct mgpu_call, calls, 65536, BPF_F_NO_PREALLOC);
MGPU_MAP("hash", __u64, struct mgpu_thread, threads, 65536, BPF_F_NO_PREALLOC);

#endif
