/*
 * A signal is a cause: the sender sends data to the receiver and then a signal. When the receiver's handler has run,
 * the receiver finds the data at once. The receiver computes until then, or waits in the kernel in odd rounds.
 */
#include "causal.h"

enum { SENDER, RECEIVER };
enum { TAG_DATA = 1, TAG_READY };

static volatile sig_atomic_t handled;

static void count_signal(int number)
{
    (void)number;
    handled++;
}

static void run_sender(void)
{
    int receiver = tid_of(RECEIVER, 0);
    for (int round = 1; round <= job.rounds; round++) {
        await(receiver, TAG_READY);
        send_data(receiver, TAG_DATA, round);
        must(pvm_sendsig(receiver, SIGUSR1), "sendsig");
    }
}

/* Without a call of PVM. The signal is blocked between the look at the counter and the wait. */
static void wait_for_signal(int count, int computes)
{
    sigset_t signals, before;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    if (computes) {
        while (handled < count)
            continue;
        return;
    }
    sigprocmask(SIG_BLOCK, &signals, &before);
    while (handled < count)
        sigsuspend(&before);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

static void run_receiver(void)
{
    int sender = tid_of(SENDER, 0);
    signal(SIGUSR1, count_signal);
    for (int round = 1; round <= job.rounds; round++) {
        tell(sender, TAG_READY, round);
        wait_for_signal(round, round % 2 == 0);
        find_at_once(sender, TAG_DATA);
        be_slow();
    }
}

static struct role roles[ROLES_MAX] = {
    [SENDER] = { "sender", run_sender, 1 },
    [RECEIVER] = { "receiver", run_receiver, 1 },
};

static void prepare(void)
{
}

int main(int argc, char **argv)
{
    return run_causal("signal", argc, argv, prepare);
}
