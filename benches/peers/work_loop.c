/*
 * A task as a program, for systems whose tasks are programs, and as a library, for Python:
 *
 *   work_loop MICROSECONDS FILE      uses the processor, then appends the time of its end to FILE
 */
#include "work_loop.h"
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

void work_loop(double microseconds)
{
    use_processor(microseconds);
}

double work_machine_cpu_s(void)
{
    return machine_cpu_s();
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    use_processor(atof(argv[1]));
    double end = clock_s(CLOCK_MONOTONIC);
    int file = open(argv[2], O_WRONLY | O_APPEND | O_CREAT, 0666);
    return file >= 0 && write(file, &end, sizeof end) == sizeof end ? 0 : 1;
}
