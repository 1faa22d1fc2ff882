/* A task that prints a word, waits until a file exists, and prints another word. */
#include <pvm3.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 2 || pvm_mytid() < 0)
        return 1;
    printf("ready\n");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(20000);
    printf("again\n");
    fflush(stdout);
    pvm_exit();
    return 0;
}
