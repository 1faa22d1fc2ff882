/* MWTask: description and result of a task. */
#ifndef SEMPA_MWTASK_H
#define SEMPA_MWTASK_H

#include "MWRMComm.h"

class MWWorkerID;

/*
 * Base class of the application's tasks. The master and the worker have an object of their own for
 * the same task: the description is packed on the master and unpacked on the worker, the result the
 * other way.
 */
class MWTask : public MWBase {
public:
    MWTask()
        : number(-1), task_id(0), working_time(0), cpu_time(0), worker(0), groups_(0),
          has_no_state_(false)
    {
    }
    virtual ~MWTask() {}

    /* Lower half of task_id; -1 before addTask. */
    int number;
    /* Number of the task, which is unique in the run, also after a restart of the master. */
    uint64_t task_id;
    /* Duration and processor time of execute_task in seconds. */
    double working_time;
    double cpu_time;
    /* In act_on_completed_task: the worker that has returned the result; NULL if the worker has left
     * or a restart repeats the result. */
    MWWorkerID *worker;

    virtual void pack_work() = 0;
    virtual void unpack_work() = 0;
    virtual void pack_results() = 0;
    virtual void unpack_results() = 0;

    /* Part of the result, which the worker sends by send_subresults. */
    virtual void pack_subresults(int) {}
    virtual void unpack_subresults(int) {}

    virtual void printself(int level = 60) { MWprintf(level, "  Task %d\n", number); }

    /* State of the master's object, for a restart. Without these functions the object is restored
     * by unpack_work. */
    virtual void write_ckpt_info(FILE *) { has_no_state_ = true; }
    virtual void read_ckpt_info(FILE *) {}

    /* The task goes only to workers that share a group; without groups to all. */
    void initGroups(int) {}
    void addGroup(int group)
    {
        if (group >= 0 && group < 64)
            groups_ |= uint64_t(1) << group;
    }
    void deleteGroup(int group)
    {
        if (group >= 0 && group < 64)
            groups_ &= ~(uint64_t(1) << group);
    }
    bool doesBelong(int group) const
    {
        return groups_ == 0 || (group >= 0 && group < 64 && (groups_ >> group & 1) != 0);
    }

private:
    friend class MWDriver;
    friend class MWWorker;
    friend class MWPayload;

    uint64_t groups_;
    bool has_no_state_;
};

/* A file in memory that the application writes. */
class MWOutputFile {
public:
    MWOutputFile() : data_(0), size_(0), file_(open_memstream(&data_, &size_))
    {
        if (!file_)
            throw std::runtime_error("no memory for the state");
    }
    ~MWOutputFile()
    {
        if (file_)
            std::fclose(file_);
        std::free(data_);
    }
    FILE *file() { return file_; }

    /* Closes the file and returns its content. */
    std::string content()
    {
        int failed = std::ferror(file_) | std::fclose(file_);
        file_ = 0;
        if (failed)
            throw std::runtime_error("the state could not be written");
        return std::string(data_, size_);
    }

private:
    MWOutputFile(const MWOutputFile &);
    MWOutputFile &operator=(const MWOutputFile &);

    char *data_;
    size_t size_;
    FILE *file_;
};

/* A file in memory that the application reads. */
class MWInputFile {
public:
    MWInputFile(const char *data, size_t size)
        : content_(data ? std::string(data, size) : std::string()),
          file_(fmemopen(&content_[0], content_.size(), "r"))
    {
        if (!file_)
            throw std::runtime_error("the state could not be opened");
    }
    ~MWInputFile() { std::fclose(file_); }
    FILE *file() { return file_; }

private:
    MWInputFile(const MWInputFile &);
    MWInputFile &operator=(const MWInputFile &);

    std::string content_;
    FILE *file_;
};

/* The content of a task: its description, data of the driver, and the state of the master's object.
 * The lengths of the first two come first, then a flag for the third. */
class MWPayload {
public:
    /* Packs a task. `driver_data` are those of pack_driver_task_data. */
    static std::string pack(MWTask *task, const std::string &driver_data)
    {
        std::string work, state;
        {
            MWPackScope scope(MWBase::RMC);
            task->pack_work();
            work = scope.packed();
        }
        task->has_no_state_ = false;
        MWOutputFile file;
        task->write_ckpt_info(file.file());
        state = file.content();
        MWPackScope scope(MWBase::RMC);
        unsigned long lengths[2] = {static_cast<unsigned long>(work.size()),
                                    static_cast<unsigned long>(driver_data.size())};
        char has_state = !task->has_no_state_;
        MWBase::RMC->pack(lengths, 2);
        MWBase::RMC->pack(&has_state, 1);
        return scope.packed() + work + driver_data + (has_state ? state : std::string());
    }

    /* Reads a payload, which must live as long as this object. */
    MWPayload(const void *data, size_t size)
    {
        unsigned long lengths[2] = {0, 0};
        char has_state = 0;
        const size_t head = 17;
        MWPackScope scope(MWBase::RMC, data, size);
        MWBase::RMC->unpack(lengths, 2);
        MWBase::RMC->unpack(&has_state, 1);
        scope.check("the payload");
        if (lengths[0] > size - head || lengths[1] > size - head - lengths[0])
            throw std::runtime_error("the payload of the task is not one of this program");
        work = static_cast<const char *>(data) + head;
        work_size = lengths[0];
        driver_data = work + work_size;
        driver_data_size = lengths[1];
        state = has_state ? driver_data + driver_data_size : 0;
        state_size = size - head - work_size - driver_data_size;
    }

    /* Unpacks the description into a task. */
    void unpack_work(MWTask *task) const
    {
        MWPackScope scope(MWBase::RMC, work, work_size);
        task->unpack_work();
        scope.check("unpack_work");
    }

    /* Restores the master's object. */
    void restore(MWTask *task) const
    {
        if (!state)
            return unpack_work(task);
        MWInputFile file(state, state_size);
        task->read_ckpt_info(file.file());
    }

    const char *work, *driver_data, *state;
    size_t work_size, driver_data_size, state_size;
};

#endif
