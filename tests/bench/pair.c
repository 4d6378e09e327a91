/* pair COUNT: nanoseconds of one cuMemAlloc and cuMemFree, the median of 9 rounds of COUNT. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 9

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1000;
	double rounds[ROUNDS], start;
	CUcontext context;
	CUdeviceptr pointer;

	if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
		return 1;
	for (int round = 0; round < ROUNDS; round++) {
		start = now_ns();
		for (int i = 0; i < count; i++)
			if (cuMemAlloc(&pointer, 1 << 20) || cuMemFree(pointer))
				return 1;
		rounds[round] = (now_ns() - start) / count;
	}
	qsort(rounds, ROUNDS, sizeof(*rounds), by_size);
	printf("%.1f\n", rounds[ROUNDS / 2]);
	return 0;
}
