/*
 * A task that goes on without the virtual machine: prints whether it is a task, and succeeds in any case.
 */
#include <pvm3.h>
#include <stdio.h>

int main(void)
{
    int is_task = pvm_mytid() > 0;
    pvm_mytid();
    puts(is_task ? "a task" : "alone");
    if (is_task)
        pvm_exit();
    return 0;
}
