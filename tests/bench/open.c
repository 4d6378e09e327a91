/* open PATH COUNT: nanoseconds of one open() and close() of PATH, the median of 9 rounds. An open
 * that fails counts as well: the gate has been asked by then. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

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
	int count = argc > 2 ? atoi(argv[2]) : 1000, fd;
	double rounds[ROUNDS], start;

	for (int round = 0; round < ROUNDS; round++) {
		start = now_ns();
		for (int i = 0; i < count; i++) {
			fd = open(argv[1], O_RDWR);
			if (fd >= 0)
				close(fd);
		}
		rounds[round] = (now_ns() - start) / count;
	}
	qsort(rounds, ROUNDS, sizeof(*rounds), by_size);
	printf("%.1f\n", rounds[ROUNDS / 2]);
	return 0;
}
