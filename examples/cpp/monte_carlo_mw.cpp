// Estimates pi with the classes of MW: monte_carlo_mw [TASKS]
//
// With SEMPA_WORK_IN_PROCESS=1 the program needs no virtual machine; SEMPA_WORK_JOURNAL names the
// directory of a journal.
#include <MWDriver.h>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

const int POINTS_PER_TASK = 1000000;

// A batch of random points; the seed is its description, the number of hits its result.
struct Batch : MWTask {
    Batch(unsigned long seed = 0) : seed(seed), hits(0) {}
    void pack_work() { RMC->pack(&seed, 1); }
    void unpack_work() { RMC->unpack(&seed, 1); }
    void pack_results() { RMC->pack(&hits, 1); }
    void unpack_results() { RMC->unpack(&hits, 1); }
    unsigned long seed, hits;
};

struct Pi : MWDriver {
    int tasks = 100;
    unsigned long hits = 0;

    MWReturn get_userinfo(int argc, char *argv[])
    {
        if (argc > 1)
            tasks = std::atoi(argv[1]);
        set_target_num_workers(4);
        return OK;
    }
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        for (int seed = 0; seed < tasks; ++seed)
            addTask(new Batch(seed));
        return OK;
    }
    MWReturn pack_worker_init_data() { return OK; }
    MWReturn act_on_completed_task(MWTask *task)
    {
        hits += static_cast<Batch *>(task)->hits;
        return OK;
    }
    void write_master_state(FILE *file) { std::fprintf(file, "%lu", hits); }
    void read_master_state(FILE *file)
    {
        if (std::fscanf(file, "%lu", &hits) != 1)
            throw std::runtime_error("the saved state has no number of hits");
    }
    MWTask *gimme_a_task() { return new Batch; }
    void printresults() { std::printf("pi is about %.5f\n", 4.0 * hits / tasks / POINTS_PER_TASK); }
};

struct Thrower : MWWorker {
    MWTask *gimme_a_task() { return new Batch; }
    MWReturn unpack_init_data() { return OK; }
    // Counts the points within the circle.
    void execute_task(MWTask *task)
    {
        Batch *batch = static_cast<Batch *>(task);
        unsigned long state = batch->seed + 1;
        for (int i = 0; i < POINTS_PER_TASK; ++i)
            batch->hits += std::hypot(random(state), random(state)) < 1;
    }
    // Returns a number from 0 to 1 (splitmix64).
    static double random(unsigned long &state)
    {
        unsigned long mixed = state += 0x9e3779b97f4a7c15;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
        return ((mixed ^ (mixed >> 31)) >> 11) / 9007199254740992.0;
    }
};

MWWorker *gimme_a_worker() { return new Thrower; }

int main(int argc, char *argv[]) { Pi().go(argc, argv); }
