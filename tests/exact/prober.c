/* Tries without end what must never succeed: a device allocation over the limit, and the opening of
 * another's card.
 *
 * prober MIB FORBIDDEN_NODE OWN_NODE: every round a child asks for MIB, which must kill it. Prints
 * one line
 * for everything that went as it must not; on SIGTERM the number of rounds, and ends.
 */
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t stopping;

static void stop(int number)
{
	(void)number;
	stopping = 1;
}

static int ask(size_t bytes)
{
	CUcontext context;
	CUdeviceptr address;

	if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
		return 2;
	return cuMemAlloc(&address, bytes) ? 3 : 1;
}

static void expect(const char *path, int wanted)
{
	int fd = open(path, O_RDWR), got = fd < 0 ? errno : 0;

	if (fd >= 0)
		close(fd);
	if (got != wanted)
		printf("open of %s: %s\n", path, strerror(got));
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = stop};
	long rounds = 0;
	int status;
	pid_t child;

	if (argc != 4)
		return 2;
	sigaction(SIGTERM, &action, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (!stopping) {
		expect(argv[2], EPERM);
		expect(argv[3], ENXIO);
		child = fork();
		if (child == 0)
			_exit(ask((size_t)atol(argv[1]) << 20));
		while (waitpid(child, &status, 0) < 0)
			;
		if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
			printf("not killed: %x\n", status);
		rounds++;
		usleep(2000);
	}
	printf("rounds %ld\n", rounds);
	return 0;
}
