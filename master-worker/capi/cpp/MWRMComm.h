/* RMC: packs and unpacks the data of tasks, and describes the workers of a run. */
#ifndef SEMPA_MWRMCOMM_H
#define SEMPA_MWRMCOMM_H

#include "MW.h"
#include "sempa_work.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>

/*
 * There is one object of this class, to which MWDriver::RMC, MWTask::RMC and MWWorker::RMC point.
 *
 * Values are packed in little-endian order, long and unsigned long with 8 bytes. unpack returns -1
 * and leaves its argument unchanged if fewer values were packed; the task or run then fails, too.
 */
class MWRMComm {
public:
    /* Pack `count` values: the first one, and every `stride`-th after it. Return 0. */
    int pack(const char *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const float *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const double *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const int *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const unsigned int *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const short *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const unsigned short *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const long *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    int pack(const unsigned long *values, int count, int stride = 1) { return pack_all(values, count, stride); }
    /* Packs a string that ends with a zero byte. */
    int pack(const char *text)
    {
        if (!text)
            return -1;
        return pack(std::string(text));
    }
    int pack(const std::string &text)
    {
        if (text.size() > UINT_MAX)
            return -1;
        unsigned int length = static_cast<unsigned int>(text.size());
        pack(&length, 1);
        state().packed.append(text);
        return 0;
    }

    /* Unpack as many values. Return 0, or -1 if fewer were packed. */
    int unpack(char *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(float *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(double *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(int *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(unsigned int *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(short *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(unsigned short *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(long *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    int unpack(unsigned long *values, int count, int stride = 1) { return unpack_all(values, count, stride); }
    /* Unpacks a string with its zero byte. The caller's memory must be large enough. */
    int unpack(char *text)
    {
        std::string value;
        if (unpack(value) != 0)
            return -1;
        std::memcpy(text, value.c_str(), value.size() + 1);
        return 0;
    }
    int unpack(std::string &text)
    {
        unsigned int length = 0;
        if (unpack(&length, 1) != 0)
            return -1;
        const char *bytes = take(length);
        if (!bytes)
            return -1;
        text.assign(bytes, length);
        return 0;
    }

    double get_bytes_packed() const { return static_cast<double>(state().packed_total); }
    double get_bytes_unpacked() const { return static_cast<double>(state().unpacked_total); }

    /* Number of classes of worker programs. Only for information: add_executable creates classes. */
    void set_num_exec_classes(int count) { state().exec_classes = count; }
    int get_num_exec_classes() const { return state().exec_classes; }
    void set_num_arch_classes(int count) { state().arch_classes = count; }
    int get_num_arch_classes() const { return state().arch_classes; }
    void set_arch_class_attributes(int, const char *) {}
    void set_num_executables(int) {}
    void set_worker_checkpointing(bool) {}

    /* Sets the worker program of class 0: a name as for pvm_spawn. The requirements are ignored. */
    void add_executable(const char *program, const char *requirements = "")
    {
        add_executable(0, 0, program, requirements);
    }
    /* Sets the worker program of a class. A class has one program: the first one counts. */
    void add_executable(int exec_class, int, const char *program, const char *)
    {
        if (exec_class < 0 || exec_class > USHRT_MAX || !program) {
            MWprintf(10, "add_executable: class %d has no meaning; nothing was changed\n", exec_class);
            return;
        }
        Class &added = state().classes[exec_class];
        if (!added.program.empty() && added.program != program) {
            MWprintf(10, "add_executable: class %d keeps its program %s\n", exec_class,
                     added.program.c_str());
            return;
        }
        added.program = program;
        send_class(exec_class);
    }

    /* Sets the number of workers of class 0, or of a class. -1: as many as there are hosts. */
    void set_target_num_workers(int count) { set_target_num_workers(0, count); }
    void set_target_num_workers(int exec_class, int count)
    {
        if (exec_class < 0 || exec_class > USHRT_MAX || count < -1) {
            MWprintf(10, "set_target_num_workers: class %d cannot have %d workers; the number is "
                         "unchanged\n", exec_class, count);
            return;
        }
        state().classes[exec_class].target = count;
        send_class(exec_class);
    }
    /* Returns the number of workers of a class, as it was set; the sum of all classes for -1. */
    int get_target_num_workers(int exec_class = -1) const
    {
        int sum = 0;
        const std::map<int, Class> &classes = state().classes;
        for (std::map<int, Class>::const_iterator it = classes.begin(); it != classes.end(); ++it)
            if (exec_class < 0 || it->first == exec_class)
                sum += it->second.target;
        return sum;
    }
    /* Sets the number of workers that are requested at once. */
    void set_worker_increment(int count)
    {
        if (count > 0)
            state().increment = count;
    }
    int get_worker_increment() const { return state().increment; }

    void exit(int status) { std::exit(status); }

private:
    friend class MWDriver;
    friend class MWWorker;
    friend class MWPayload;
    friend class MWPackScope;

    /* A class of worker programs. */
    struct Class {
        Class() : target(1) {}
        std::string program;
        int target;
    };

    struct State {
        State()
            : unpacked(0), unpacked_size(0), has_overrun(false), packed_total(0), unpacked_total(0),
              exec_classes(1), arch_classes(1), increment(6), run(0) {}
        std::string packed;
        const char *unpacked;
        size_t unpacked_size;
        bool has_overrun;
        unsigned long packed_total, unpacked_total;
        int exec_classes, arch_classes, increment;
        std::map<int, Class> classes;
        /* The run while a callback of the driver works. */
        sempa_run *run;
    };

    /* The only object has static storage and no constructor, so that constructors of other static
     * objects may use it. The state is created at its first use and lives until the process ends. */
    State &state() const
    {
        if (!state_)
            state_ = new State;
        return *state_;
    }
    mutable State *state_;

    template <class T> struct Wire;

    template <class T> int pack_all(const T *values, int count, int stride)
    {
        if (count < 0 || (count > 0 && !values))
            return -1;
        State &s = state();
        for (int i = 0; i < count; ++i) {
            typename Wire<T>::Bits bits = Wire<T>::to_bits(values[static_cast<long>(i) * stride]);
            for (size_t byte = 0; byte < sizeof bits; ++byte)
                s.packed.push_back(static_cast<char>(bits >> (8 * byte) & 0xff));
        }
        return 0;
    }

    template <class T> int unpack_all(T *values, int count, int stride)
    {
        typedef typename Wire<T>::Bits Bits;
        if (count < 0 || (count > 0 && !values))
            return -1;
        const char *bytes = take(static_cast<size_t>(count) * sizeof(Bits));
        if (!bytes)
            return -1;
        for (int i = 0; i < count; ++i) {
            Bits bits = 0;
            for (size_t byte = 0; byte < sizeof bits; ++byte)
                bits |= static_cast<Bits>(static_cast<Bits>(static_cast<unsigned char>(*bytes++))
                                          << (8 * byte));
            values[static_cast<long>(i) * stride] = Wire<T>::from_bits(bits);
        }
        return 0;
    }

    /* Returns the next bytes; NULL if there are fewer. */
    const char *take(size_t size)
    {
        State &s = state();
        if (size > s.unpacked_size) {
            s.has_overrun = true;
            return 0;
        }
        const char *bytes = s.unpacked ? s.unpacked : "";
        s.unpacked = bytes + size;
        s.unpacked_size -= size;
        s.unpacked_total += size;
        return bytes;
    }

    /* Sets the program and the number of workers of a class in the present run, if there is one. */
    int send_class(int exec_class)
    {
        State &s = state();
        if (!s.run)
            return SEMPA_WORK_OK;
        const Class &sent = s.classes[exec_class];
        sempa_workers workers = sempa_workers();
        workers.size = sizeof workers;
        workers.program = sent.program.empty() ? 0 : sent.program.c_str();
        workers.target = static_cast<uint32_t>(sent.target);
        return sempa_run_set_workers(s.run, static_cast<uint16_t>(exec_class), &workers);
    }
};

/* Converts a number from and to an unsigned integer of its size on the wire. */
template <class T> struct MWRMComm::Wire {
    typedef typename std::conditional<
        sizeof(T) == 1, uint8_t,
        typename std::conditional<
            sizeof(T) == 2, uint16_t,
            typename std::conditional<
                std::is_same<T, long>::value || std::is_same<T, unsigned long>::value, uint64_t,
                uint32_t>::type>::type>::type Bits;
    static Bits to_bits(T value) { return static_cast<Bits>(value); }
    static T from_bits(Bits bits) { return static_cast<T>(bits); }
};

template <> struct MWRMComm::Wire<float> {
    typedef uint32_t Bits;
    static Bits to_bits(float value)
    {
        Bits bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static float from_bits(Bits bits)
    {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

template <> struct MWRMComm::Wire<double> {
    typedef uint64_t Bits;
    static Bits to_bits(double value)
    {
        Bits bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static double from_bits(Bits bits)
    {
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

/* Gives a function of the application buffers of its own. Driver and worker of a run in one process
 * share RMC, and their functions may call each other. */
class MWPackScope {
public:
    explicit MWPackScope(MWRMComm *rmc, const void *data = 0, size_t size = 0)
        : state_(rmc->state()), unpacked_(state_.unpacked), unpacked_size_(state_.unpacked_size),
          has_overrun_(state_.has_overrun)
    {
        packed_.swap(state_.packed);
        state_.unpacked = static_cast<const char *>(data);
        state_.unpacked_size = size;
        state_.has_overrun = false;
    }

    ~MWPackScope()
    {
        state_.packed_total += state_.packed.size();
        packed_.swap(state_.packed);
        state_.unpacked = unpacked_;
        state_.unpacked_size = unpacked_size_;
        state_.has_overrun = has_overrun_;
    }

    const std::string &packed() const { return state_.packed; }

    /* Throws if the function `name` has unpacked more than was packed. */
    void check(const char *name) const
    {
        if (state_.has_overrun)
            throw std::runtime_error(std::string(name) + " unpacked more than was packed");
    }

private:
    MWPackScope(const MWPackScope &);
    MWPackScope &operator=(const MWPackScope &);

    MWRMComm::State &state_;
    std::string packed_;
    const char *unpacked_;
    size_t unpacked_size_;
    bool has_overrun_;
};

/* Base of the classes that use RMC. A template, so that a header can define its static member. */
template <class Unused> struct MWShared {
    static MWRMComm instance;
    static MWRMComm *RMC;
};
template <class Unused> MWRMComm MWShared<Unused>::instance;
template <class Unused> MWRMComm *MWShared<Unused>::RMC = &MWShared<Unused>::instance;
typedef MWShared<void> MWBase;

/* Calls `f` and returns its code. An exception becomes the text and code of a failed callback. */
template <class F> int sempa_mw_guarded(F f)
{
    try {
        return f();
    } catch (const std::exception &error) {
        sempa_work_set_error(error.what());
    } catch (...) {
        sempa_work_set_error("an exception of an unknown type left a function of the application");
    }
    return 1;
}

/* Throws if a call of the interface has failed. */
inline void sempa_mw_check(int code)
{
    if (code < 0)
        throw std::runtime_error(sempa_work_last_error());
}

#endif
