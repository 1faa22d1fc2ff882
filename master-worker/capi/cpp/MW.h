/* Names that all classes of the MW interface use. */
#ifndef SEMPA_MW_H
#define SEMPA_MW_H

#include <cstdarg>
#include <cstdio>

/* Result of most functions that an application defines. */
enum MWReturn {
    OK,
    /* The run ends without an error. Open tasks stay in the journal. */
    QUIT,
    /* The run ends with an error. */
    ABORT
};

/* Key of a task. Tasks with lower keys are better. */
typedef double MWKey;

/* Where addTask puts tasks. */
enum MWTaskAdditionMode { ADD_AT_END, ADD_AT_BEGIN, ADD_BY_KEY };

/* Which task a worker gets: the first one, or the one with the lowest key. */
enum MWTaskRetrievalMode { GET_FROM_BEGIN, GET_FROM_KEY };

/* What happens to the task of a worker that is paused. DEFAULT: an idle worker gets the task too.
 * REASSIGN: the task waits again at once. MW_KEEP: the worker keeps the task. MW_MOVE: the worker
 * migrates with the task. */
enum MWSuspensionPolicy { DEFAULT, REASSIGN, MW_KEEP, MW_MOVE };

/* Which idle worker gets the next task. The other orders than NO_ORDER use the benchmark. */
enum MWMachineOrderingPolicy { NO_ORDER, BY_USER_BENCHMARK, BY_KFLOPS };

/* Which present workers refreshWorkers gives new init data: none, those of the group, or all. */
enum MWRefreshType { MW_NONE, MW_THIS, MW_ALL };

inline int &sempa_mw_print_level()
{
    static int level = 50;
    return level;
}

/* Sets the level up to which MWprintf prints, and returns the previous one. */
inline int set_MWprintf_level(int level)
{
    int previous = sempa_mw_print_level();
    if (level >= 0 && level <= 99)
        sempa_mw_print_level() = level;
    return previous;
}

inline int get_MWprintf_level()
{
    return sempa_mw_print_level();
}

/* Prints to standard output if `level` is at most the one that was set (50 at first). */
inline void MWprintf(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

inline void MWprintf(int level, const char *format, ...)
{
    if (level > sempa_mw_print_level())
        return;
    va_list arguments;
    va_start(arguments, format);
    std::vprintf(format, arguments);
    va_end(arguments);
    std::fflush(stdout);
}

#endif
