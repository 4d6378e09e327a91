/* Every map, pinned by the agent before the programs are compiled; MAP_ROOT is their folder. */
#ifndef MGPU_MAPS_H
#define MGPU_MAPS_H

#include "mgpu.h"

/* A loop that clang leaves one: unrolled it takes longer to compile. Bounded loops are of 5.3. */
#define MGPU_LOOP _Pragma("clang loop unroll(disable)") for

#define MGPU_MAP(type, key, value, name, size, flags) \
	BPF_F_TABLE(type ":" MAP_ROOT "/" #name, key, value, name, size, flags)

MGPU_MAP("array", __u32, struct mgpu_settings, settings, 1, 0);
MGPU_MAP("hash", __u64, struct mgpu_bound, bound, 4096, 0);
MGPU_MAP("hash", __u32, __u64, followed, 65536, BPF_F_NO_PREALLOC);

static __always_inline struct mgpu_settings *mgpu_settings(void)
{
	__u32 zero = 0;

	return settings.lookup(&zero);
}

#endif
