/*
 * A knapsack problem by branch and bound, with the classes of MW:
 * work_mw ITEMS MICROSECONDS MODE [WORKERS [WORKER_PROGRAM]]
 *
 * MODE is `best` (best bound first) or `depth` (last task first). A task searches up to 30 nodes,
 * each of which takes the given processor time; the rest of its nodes are new tasks. The value of
 * the best solution does not depend on the order. Prints that value, and the value by dynamic
 * programming. Compiled with -DWORKER_ONLY, the program is only a worker.
 */
#include "MWDriver.h"

#include <ctime>

static void compute(int microseconds)
{
    std::clock_t end = std::clock() + std::clock_t(microseconds) * (CLOCKS_PER_SEC / 1000000);
    while (std::clock() < end)
        ;
}

struct Instance {
    std::vector<int> weights, values;
    int capacity, microseconds;
};

/* A node decides the items before `item`. */
struct Node {
    int item, weight, value;
};

/* Items are sorted by value per weight, so that the greedy fraction is an upper bound. */
static double upper_bound(const Instance &instance, const Node &node)
{
    double bound = node.value;
    int room = instance.capacity - node.weight;
    for (size_t i = node.item; i < instance.weights.size() && room > 0; ++i) {
        int taken = std::min(room, instance.weights[i]);
        bound += double(taken) * instance.values[i] / instance.weights[i];
        room -= taken;
    }
    return bound;
}

static Instance create_instance(int items, int microseconds)
{
    Instance instance;
    unsigned long state = 12345;
    std::vector<std::pair<double, std::pair<int, int> > > sorted;
    for (int i = 0; i < items; ++i) {
        state = state * 6364136223846793005 + 1442695040888963407;
        int weight = 100 + int(state >> 40) % 900;
        int value = weight + int(state >> 20) % 20;
        sorted.push_back(std::make_pair(-double(value) / weight, std::make_pair(weight, value)));
    }
    std::sort(sorted.begin(), sorted.end());
    int sum = 0;
    for (int i = 0; i < items; ++i) {
        instance.weights.push_back(sorted[i].second.first);
        instance.values.push_back(sorted[i].second.second);
        sum += instance.weights[i];
    }
    instance.capacity = sum / 2;
    instance.microseconds = microseconds;
    return instance;
}

static int solve_by_table(const Instance &instance)
{
    std::vector<int> best(instance.capacity + 1, 0);
    for (size_t i = 0; i < instance.weights.size(); ++i)
        for (int room = instance.capacity; room >= instance.weights[i]; --room)
            best[room] = std::max(best[room], best[room - instance.weights[i]] + instance.values[i]);
    return best[instance.capacity];
}

class KnapsackTask : public MWTask {
public:
    KnapsackTask() : bound(0), best(0), note(0) { node.item = node.weight = node.value = 0; }
    KnapsackTask(const Node &the_node, double the_bound)
        : node(the_node), bound(the_bound), best(0), note(42) {}

    void pack_work()
    {
        RMC->pack(&node.item, 3);
        RMC->pack(&bound, 1);
    }
    void unpack_work()
    {
        RMC->unpack(&node.item, 3);
        RMC->unpack(&bound, 1);
    }
    void pack_results()
    {
        int count = int(rest.size());
        RMC->pack(&best, 1);
        RMC->pack(&count, 1);
        for (int i = 0; i < count; ++i) {
            RMC->pack(&rest[i].item, 3);
            RMC->pack(&bounds[i], 1);
        }
    }
    void unpack_results()
    {
        int count = 0;
        RMC->unpack(&best, 1);
        RMC->unpack(&count, 1);
        rest.resize(count);
        bounds.resize(count);
        for (int i = 0; i < count; ++i) {
            RMC->unpack(&rest[i].item, 3);
            RMC->unpack(&bounds[i], 1);
        }
    }
    void write_ckpt_info(FILE *file)
    {
        std::fprintf(file, "%d %d %d %.17g %d\n", node.item, node.weight, node.value, bound, note);
    }
    void read_ckpt_info(FILE *file)
    {
        if (std::fscanf(file, "%d %d %d %lf %d", &node.item, &node.weight, &node.value, &bound,
                        &note) != 5)
            throw std::runtime_error("the state of a task cannot be read");
    }

    Node node;
    double bound;
    int best;
    std::vector<Node> rest;
    std::vector<double> bounds;
    /* Known only to the master. */
    int note;
};

static MWKey key_of(MWTask *task)
{
    return -static_cast<KnapsackTask *>(task)->bound;
}

class KnapsackDriver : public MWDriver {
public:
    KnapsackDriver() : best(0), results(0), deleted(0), lost(0), starts(0) {}

    MWTask *gimme_a_task() { return new KnapsackTask; }
    void printresults()
    {
        std::printf("best %d\ntable %d\nfinished %d\nresults %ld\naccepted %lu\ndeleted %s\n"
                    "workers_lost %d\nstarts %d\n",
                    best, solve_by_table(instance), is_finished(), results,
                    (unsigned long)statistics().results_accepted, deleted > 0 ? "some" : "none",
                    lost, starts);
    }
    void write_master_state(FILE *file) { std::fprintf(file, "%d %ld\n", best, results); }
    void read_master_state(FILE *file)
    {
        if (std::fscanf(file, "%d %ld", &best, &results) != 2)
            throw std::runtime_error("the state of the driver cannot be read");
    }

protected:
    MWReturn get_userinfo(int argc, char *argv[])
    {
        if (argc < 4)
            return ABORT;
        instance = create_instance(std::atoi(argv[1]), std::atoi(argv[2]));
        set_run_name("knapsack");
        set_task_key_function(key_of);
        if (std::string(argv[3]) == "best") {
            set_task_add_mode(ADD_BY_KEY);
            set_task_retrieve_mode(GET_FROM_KEY);
        } else {
            set_task_add_mode(ADD_AT_BEGIN);
        }
        set_suspension_policy(REASSIGN);
        set_machine_ordering_policy(BY_USER_BENCHMARK);
        register_benchmark_task(new KnapsackTask(Node(), 1));
        RMC->set_target_num_workers(argc > 4 ? std::atoi(argv[4]) : 1);
        if (argc > 5)
            RMC->add_executable(argv[5], "");
        return OK;
    }
    MWReturn setup_initial_tasks(int *count, MWTask ***tasks)
    {
        static MWTask *first[1];
        Node root = Node();
        first[0] = new KnapsackTask(root, upper_bound(instance, root));
        *count = 1;
        *tasks = first;
        return OK;
    }
    MWReturn pack_worker_init_data()
    {
        int items = int(instance.weights.size());
        RMC->pack(&items, 1);
        RMC->pack(&instance.weights[0], items);
        RMC->pack(&instance.values[0], items);
        RMC->pack(&instance.capacity, 1);
        RMC->pack(&instance.microseconds, 1);
        RMC->pack("knapsack");
        return OK;
    }
    MWReturn act_on_completed_task(MWTask *t)
    {
        KnapsackTask *task = dynamic_cast<KnapsackTask *>(t);
        // Only tasks that the master has created have the note.
        if (!task || task->note != 42)
            return ABORT;
        ++results;
        if (task->best > best) {
            best = task->best;
            deleted += delete_tasks_worse_than(-best - 1);
            send_update_message();
        }
        std::vector<MWTask *> added;
        for (size_t i = 0; i < task->rest.size(); ++i)
            if (task->bounds[i] > best)
                added.push_back(new KnapsackTask(task->rest[i], task->bounds[i]));
        addTasks(int(added.size()), added.empty() ? 0 : &added[0]);
        MWKey todo = return_best_todo_keyval(), running = return_best_running_keyval();
        if (get_number_tasks() > 0 && todo == DBL_MAX)
            return ABORT;
        if (get_number_running_tasks() > 0 && running == DBL_MAX)
            return ABORT;
        return OK;
    }
    MWReturn act_on_starting_worker(MWWorkerID *worker)
    {
        MWprintf(10, "ready %s\n", worker->machine_name());
        ++starts;
        return OK;
    }
    MWReturn act_on_pool_event(const sempa_pool_event *event)
    {
        lost += event->kind == SEMPA_WORKER_LOST;
        return OK;
    }
    void pack_update() { RMC->pack(&best, 1); }

private:
    Instance instance;
    int best;
    long results;
    int deleted, lost, starts;
};

class KnapsackWorker : public MWWorker {
public:
    KnapsackWorker() : best(0) {}
    MWTask *gimme_a_task() { return new KnapsackTask; }

protected:
    MWReturn unpack_init_data()
    {
        int items = 0;
        char name[16];
        RMC->unpack(&items, 1);
        instance.weights.resize(items);
        instance.values.resize(items);
        RMC->unpack(&instance.weights[0], items);
        RMC->unpack(&instance.values[0], items);
        RMC->unpack(&instance.capacity, 1);
        RMC->unpack(&instance.microseconds, 1);
        RMC->unpack(name);
        return std::string(name) == "knapsack" ? OK : ABORT;
    }
    void unpack_update()
    {
        int newer = 0;
        RMC->unpack(&newer, 1);
        best = std::max(best, newer);
    }
    void execute_task(MWTask *t)
    {
        KnapsackTask *task = dynamic_cast<KnapsackTask *>(t);
        std::vector<Node> stack(1, task->node);
        for (int count = 0; count < 30 && !stack.empty() && !is_canceled(); ++count) {
            Node node = stack.back();
            stack.pop_back();
            compute(instance.microseconds);
            receive_update();
            best = std::max(best, node.value);
            task->best = std::max(task->best, node.value);
            if (upper_bound(instance, node) <= best || node.item == int(instance.weights.size()))
                continue;
            Node without = {node.item + 1, node.weight, node.value};
            Node with = {node.item + 1, node.weight + instance.weights[node.item],
                         node.value + instance.values[node.item]};
            stack.push_back(without);
            if (with.weight <= instance.capacity)
                stack.push_back(with);
        }
        for (size_t i = 0; i < stack.size(); ++i) {
            task->rest.push_back(stack[i]);
            task->bounds.push_back(upper_bound(instance, stack[i]));
        }
    }

private:
    Instance instance;
    int best;
};

#ifdef WORKER_ONLY
int main(int argc, char *argv[])
{
    KnapsackWorker worker;
    worker.go(argc, argv);
    return 0;
}
#else
MWWorker *gimme_a_worker()
{
    return new KnapsackWorker;
}

int main(int argc, char *argv[])
{
    KnapsackDriver driver;
    driver.go(argc, argv);
    return 0;
}
#endif
