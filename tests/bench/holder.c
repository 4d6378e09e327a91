/* holder PROCESSES MIB: so many processes, each with a context and MIB on card 0, until standard
 * input ends. Prints "held" when all hold theirs. */
#include <cuda.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int processes = argc > 1 ? atoi(argv[1]) : 1, ready[2];
	size_t bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 1) << 20;
	char byte;

	if (pipe(ready))
		return 1;
	for (int i = 0; i < processes; i++) {
		CUcontext context;
		CUdeviceptr pointer;

		if (fork())
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) ||
		    cuCtxSetCurrent(context) || cuMemAlloc(&pointer, bytes))
			_exit(1);
		if (write(ready[1], "x", 1) != 1)
			_exit(1);
		pause();
		_exit(0);
	}
	close(ready[1]);
	for (int i = 0; i < processes; i++)
		if (read(ready[0], &byte, 1) != 1)
			return 1;
	puts("held");
	fflush(stdout);
	return getchar() == EOF ? 0 : 1;
}
