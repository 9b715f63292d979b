/* Puts the clock of a program ahead by the seconds that /etc/clock.ahead holds. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long seconds, nanoseconds;

__attribute__((constructor)) static void read_offset(void) {
    double ahead = 0;
    FILE *file = fopen("/etc/clock.ahead", "re");
    if (!file)
        return;
    if (fscanf(file, "%lf", &ahead) == 1) {
        seconds = (long)ahead;
        nanoseconds = (long)((ahead - (double)seconds) * 1e9);
    }
    fclose(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += seconds;
        now->tv_nsec += nanoseconds;
        if (now->tv_nsec >= 1000000000L) {
            now->tv_nsec -= 1000000000L;
            now->tv_sec += 1;
        } else if (now->tv_nsec < 0) {
            now->tv_nsec += 1000000000L;
            now->tv_sec -= 1;
        }
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place)
        *place = now.tv_sec;
    return now.tv_sec;
}
