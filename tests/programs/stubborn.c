/* A task from the command line that does not listen to SIGTERM. It calls the library again when its standard input ends. */
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>

int main(void)
{
    signal(SIGTERM, SIG_IGN);
    if (pvm_mytid() < 0)
        return 1;
    puts("here");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    printf("recv: %d\n", pvm_recv(-1, -1));
    return 0;
}
