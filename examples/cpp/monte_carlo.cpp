// Estimates pi with a master-worker run: monte_carlo [TASKS]
//
// With SEMPA_WORK_IN_PROCESS=1 the program needs no virtual machine; SEMPA_WORK_JOURNAL names the
// directory of a journal.
#include <MWMap.h>
#include <cmath>
#include <numeric>

const int POINTS_PER_TASK = 1000000;

// Returns a number from 0 to 1 (splitmix64).
static double random_number(unsigned long &state)
{
    unsigned long mixed = state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return ((mixed ^ (mixed >> 31)) >> 11) / 9007199254740992.0;
}

// Counts the random points within the circle.
static long count_hits(unsigned long seed)
{
    unsigned long state = seed + 1;
    long hits = 0;
    for (int i = 0; i < POINTS_PER_TASK; ++i)
        hits += std::hypot(random_number(state), random_number(state)) < 1;
    return hits;
}

int main(int argc, char *argv[])
{
    std::vector<unsigned long> seeds(argc > 1 ? std::atoi(argv[1]) : 100);
    std::iota(seeds.begin(), seeds.end(), 0);
    std::vector<long> hits = MWMap("monte_carlo", count_hits, seeds);
    double points = double(seeds.size()) * POINTS_PER_TASK;
    std::printf("pi is about %.5f\n", 4 * std::accumulate(hits.begin(), hits.end(), 0L) / points);
}
