/* OpenMP at full load: sums whose value is known, until the test says go. */
#include "kinds.h"
#include <omp.h>

static uint64_t sum_of(int count) {
    uint64_t sum = 0;
#pragma omp parallel for reduction(+ : sum) schedule(dynamic, 64)
    for (int i = 0; i < count; i++) sum += word_at(i) >> 8;
    return sum;
}

static int tree(int depth) {
    int left, right;
    if (depth == 0) return 1;
#pragma omp task shared(left) if (depth > 4)
    left = tree(depth - 1);
#pragma omp task shared(right) if (depth > 4)
    right = tree(depth - 1);
#pragma omp taskwait
    return left + right;
}

static void load(void) {
    enum { COUNT = 100000 };
    uint64_t expected = 0;
    int rounds = 0, inside = 0;
    for (int i = 0; i < COUNT; i++) expected += word_at(i) >> 8;
    omp_set_num_threads(4);
    do {
        int leaves = 0;
        CHECK(sum_of(COUNT) == expected);
#pragma omp parallel
        {
#pragma omp critical
            inside++;
#pragma omp barrier
#pragma omp single
            leaves = tree(8);
        }
        CHECK(leaves == 256 && inside == ++rounds * 4);
        if (rounds == 3) CHECK(write(1, "ready\n", 6) == 6);
    } while (rounds < 3 || !told_to_go());
    for (int i = 0; i < 3; i++) CHECK(sum_of(COUNT) == expected);
}

int main(int argc, char **argv) {
    const struct row rows[] = {{"load", load}, {0, 0}};
    return run_row(rows, argc, argv);
}
