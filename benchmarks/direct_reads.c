/* The bound of `benchmarks.cold_rows`: single pages read from a disk by several threads, past the page cache. */

#define _GNU_SOURCE /* O_DIRECT */

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE 4096
#define THREADS 32

struct reads {
    const int64_t *pages;
    int64_t count, next, failed;
    int file;
};

static void *work(void *given) {
    struct reads *reads = given;
    void *page = NULL;
    if (posix_memalign(&page, PAGE, PAGE)) return NULL;
    for (int64_t i; (i = __atomic_fetch_add(&reads->next, 1, __ATOMIC_RELAXED)) < reads->count;)
        if (pread(reads->file, page, PAGE, reads->pages[i] * PAGE) != PAGE)
            __atomic_fetch_add(&reads->failed, 1, __ATOMIC_RELAXED);
    free(page);
    return NULL;
}

/* Read these pages of a file. Return how many failed, or -1 if the file or the threads did. */
int64_t read_pages(const char *path, const int64_t *pages, int64_t count) {
    struct reads reads = {.pages = pages, .count = count, .file = open(path, O_RDONLY | O_DIRECT)};
    pthread_t threads[THREADS];
    int started = 0;
    if (reads.file < 0) return -1;
    while (started < THREADS && !pthread_create(&threads[started], NULL, work, &reads)) started++;
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    close(reads.file);
    return started == THREADS ? reads.failed : -1;
}
