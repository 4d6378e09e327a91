/* Makes the calls that it is told to make, on a library whose answers it is told too.
 *
 * puppet LIBRARY reads lines of words from standard input and answers each with one line:
 *   call NAME RESULT HANDLE ARGUMENT...   call NAME; the library returns RESULT and writes HANDLE out
 *   thread NAME RESULT HANDLE ...         the same in a new thread
 *   old-thread NAME RESULT HANDLE ...     the same in a thread that is there from the beginning
 *   together N NAME RESULT HANDLE ...     the same in N threads at once
 *   storm N TIMES BYTES                   N threads, TIMES each: allocate BYTES, free them
 *   fork                                  the child goes on, the parent waits for its end
 *   exec, exec-in-thread                  begin anew as another program, same PID
 *   end                                   leave
 * An argument is a number, `&` (a place for the new handle), or `=HEX` (a place with these bytes).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_ARGUMENTS 5
#define MOST_THREADS 64

typedef uint64_t word;
typedef unsigned int (*function)(word, word, word, word, word);

struct call {
	function to;
	unsigned int result;
	word handle;
	word arguments[MOST_ARGUMENTS];
	word places[MOST_ARGUMENTS][16];
};

struct storm {
	int times;
	word bytes;
	word handle;
};

static void *library;
static char **self;
static pthread_barrier_t together;
static sem_t asked, answered;
static struct call asked_for;

static void *symbol(const char *name)
{
	void *found = dlsym(library, name);

	if (!found) {
		fprintf(stderr, "puppet: no %s\n", name);
		exit(2);
	}
	return found;
}

static void say_next(unsigned int result, word handle)
{
	((void (*)(unsigned int, word))symbol("stub_say"))(result, handle);
}

static unsigned int make(struct call *call)
{
	say_next(call->result, call->handle);
	return call->to(call->arguments[0], call->arguments[1], call->arguments[2],
			call->arguments[3], call->arguments[4]);
}

static void *make_in_thread(void *call)
{
	make(call);
	return NULL;
}

static void *make_when_asked(void *unused)
{
	(void)unused;
	for (;;) {
		sem_wait(&asked);
		make(&asked_for);
		sem_post(&answered);
	}
	return NULL;
}

static void *make_together(void *call)
{
	struct call *mine = call;

	say_next(mine->result, mine->handle);
	pthread_barrier_wait(&together);
	mine->to(mine->arguments[0], mine->arguments[1], mine->arguments[2], mine->arguments[3],
		 mine->arguments[4]);
	return NULL;
}

static void parse(struct call *call, char *words)
{
	char *name = strtok(words, " ");
	int count = 0;

	memset(call, 0, sizeof(*call));
	call->to = (function)symbol(name);
	call->result = strtoul(strtok(NULL, " "), NULL, 0);
	call->handle = strtoull(strtok(NULL, " "), NULL, 0);
	for (char *text = strtok(NULL, " "); text; text = strtok(NULL, " "), count++) {
		unsigned char *place = (unsigned char *)call->places[count];

		call->arguments[count] = (word)place;
		if (*text == '=')
			for (size_t i = 0; i < (strlen(text) - 1) / 2; i++)
				sscanf(text + 1 + 2 * i, "%2hhx", place + i);
		else if (*text != '&')
			call->arguments[count] = strtoull(text, NULL, 0);
	}
}

static void in_threads(int count, void *(*run)(void *), char *each, size_t size)
{
	pthread_t threads[MOST_THREADS];

	pthread_barrier_init(&together, NULL, count);
	for (int i = 0; i < count; i++)
		pthread_create(&threads[i], NULL, run, each + i * size);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
}

static void *run_storm(void *argument)
{
	struct storm *mine = argument;
	function allocate = (function)symbol("cuMemAlloc_v2"), release = (function)symbol("cuMemFree_v2");
	word out;

	pthread_barrier_wait(&together);
	for (int i = 0; i < mine->times; i++) {
		say_next(0, mine->handle);
		allocate((word)&out, mine->bytes, 0, 0, 0);
		say_next(0, 0);
		release(mine->handle, 0, 0, 0, 0);
	}
	return NULL;
}

static void storm(int count, int times, word bytes)
{
	struct storm each[MOST_THREADS] = {0};

	for (int i = 0; i < count; i++)
		each[i] = (struct storm){.times = times, .bytes = bytes, .handle = 0x1000 * (i + 1)};
	in_threads(count, run_storm, (char *)each, sizeof(*each));
}

static void *exec_self(void *unused)
{
	(void)unused;
	execv("/proc/self/exe", self);
	exit(3);
}

static void fork_off(void)
{
	pid_t child = fork();

	if (child) {
		waitpid(child, NULL, 0);
		printf("back\n");
	} else {
		printf("%d\n", getpid());
	}
}

static void obey(char *line)
{
	static struct call calls[MOST_THREADS];
	char *words = strchr(line, ' ') ? strchr(line, ' ') + 1 : line;
	pthread_t thread;

	if (!strncmp(line, "call ", 5)) {
		parse(calls, words);
		printf("%u\n", make(calls));
	} else if (!strncmp(line, "thread ", 7)) {
		parse(calls, words);
		pthread_create(&thread, NULL, make_in_thread, calls);
		pthread_join(thread, NULL);
		printf("joined\n");
	} else if (!strncmp(line, "old-thread ", 11)) {
		parse(&asked_for, words);
		sem_post(&asked);
		sem_wait(&answered);
		printf("answered\n");
	} else if (!strncmp(line, "together ", 9)) {
		int count = strtol(words, &words, 0);

		parse(calls, words + 1);
		for (int i = 1; i < count; i++) /* places are written by nobody here */
			calls[i] = calls[0];
		in_threads(count, make_together, (char *)calls, sizeof(*calls));
		printf("joined\n");
	} else if (!strncmp(line, "storm ", 6)) {
		int count = strtol(words, &words, 0), times = strtol(words, &words, 0);

		storm(count, times, strtoull(words, NULL, 0));
		printf("over\n");
	} else if (!strcmp(line, "fork")) {
		fork_off();
	} else if (!strcmp(line, "exec")) {
		exec_self(NULL);
	} else if (!strcmp(line, "exec-in-thread")) {
		pthread_create(&thread, NULL, exec_self, NULL);
		pause();
	} else {
		exit(0);
	}
}

int main(int argc, char **argv)
{
	char line[1024];
	pthread_t old;

	self = argv;
	sem_init(&asked, 0, 0);
	sem_init(&answered, 0, 0);
	if (argc < 2 || !(library = dlopen(argv[1], RTLD_NOW))) {
		fprintf(stderr, "puppet: %s\n", dlerror());
		return 2;
	}
	setvbuf(stdin, NULL, _IONBF, 0);
	setvbuf(stdout, NULL, _IOLBF, 0);
	pthread_create(&old, NULL, make_when_asked, NULL);
	printf("%d\n", getpid());
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		obey(line);
	}
	return 0;
}
