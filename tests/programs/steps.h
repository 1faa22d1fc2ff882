/* Work whose result is known without doing it: steps of a generator of numbers. */
#ifndef STEPS_H
#define STEPS_H
#include <stdint.h>
#include <time.h>

#define STEPS_PER_UNIT 10000000u
#define FACTOR 1664525u
#define ADDEND 1013904223u

static inline int64_t now_us(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* The result of this number of steps for a number, one by one. */
static inline uint32_t steps(uint32_t x, unsigned count)
{
    for (unsigned step = 0; step < count; step++) {
        x = x * FACTOR + ADDEND;
        __asm__ volatile("" : "+r"(x));
    }
    return x;
}

/* The result of this number of units, by squaring: n steps are a multiplication and an addition, too. */
static inline uint32_t expected(uint32_t x, unsigned units)
{
    uint32_t factor = FACTOR, addend = ADDEND;
    for (uint64_t n = (uint64_t)units * STEPS_PER_UNIT; n > 0; n >>= 1) {
        if (n & 1)
            x = x * factor + addend;
        addend = addend * factor + addend;
        factor = factor * factor;
    }
    return x;
}
#endif
