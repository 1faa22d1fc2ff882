/* MWWorkerID: what a driver knows about a worker. */
#ifndef SEMPA_MWWORKERID_H
#define SEMPA_MWWORKERID_H

#include <cstdint>
#include <string>

class MWWorkerID {
public:
    MWWorkerID(uint64_t worker, const char *machine) : worker_(worker), machine_(machine) {}

    /* The tid of the worker. */
    int get_id1() const { return static_cast<int>(worker_); }
    int get_id2() const { return static_cast<int>(worker_); }
    /* The host, also after a migration. */
    const char *machine_name() const { return machine_.c_str(); }
    /* Number of the worker in the functions of sempa_work.h. */
    uint64_t id() const { return worker_; }

private:
    friend class MWDriver;

    uint64_t worker_;
    std::string machine_;
};

#endif
