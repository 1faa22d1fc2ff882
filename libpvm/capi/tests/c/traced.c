/*
 * A tracer that prints trace records in the format of PVM's manual, and a task that is traced.
 * The first argument selects the role of this process.
 */
#include <pvm3.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT 4096

static char names[65536][32];
static int kinds[65536][32], counts[65536];

static int next(void)
{
    int word;

    if (pvm_upkint(&word, 1, 1) < 0) {
        puts("cut short");
        exit(1);
    }
    return word;
}

static void value(int kind)
{
    static char text[TEXT];
    int i, n = kind & 0x80 ? next() : 1;
    long number;

    for (i = 0; i < n; i++)
        switch (kind & 0x7f) {
        case 6:
            printf(" %d", next());
            break;
        case 8:
            pvm_upklong(&number, 1, 1);
            printf(" %s", number ? "somewhere" : "nowhere");
            break;
        case 12:
            pvm_upkstr(text);
            printf(" '%s'", text);
            break;
        default:
            printf("unknown type %d\n", kind);
            exit(1);
        }
}

static void record(int first)
{
    int event = next(), item = 0, i;

    if (first) {
        pvm_upkstr(names[event]);
        printf("%s%s:", names[event], event & 0x4000 ? " begins" : event & 0x8000 ? " ends" : "");
        while ((i = next()) != -6) {
            kinds[event][item] = next();
            value(kinds[event][item++]);
        }
        counts[event] = item;
    } else {
        if (!counts[event]) {
            puts("values of an unknown event");
            exit(1);
        }
        printf("%s again:", names[event]);
        for (i = 0; i < counts[event]; i++)
            value(kinds[event][i]);
        if (next() != -8)
            puts("no end");
    }
    puts("");
}

static void items(void)
{
    char text[TEXT];
    int n;

    for (n = 0; next() != -4; n++) {
        pvm_upkstr(text);
        pvm_upkstr(text);
    }
    printf("%d items\n", n);
}

static void own_event(void)
{
    char text[TEXT];
    int event = next(), seconds, type;

    pvm_upkstr(text);
    seconds = next();
    next();
    type = next();
    printf("own event %d %s %d: %d of type %d\n", event, text, seconds > 0, next(), type);
}

/* Reads one message: single records or a group of records. */
static void records(void)
{
    int marker = next(), grouped = marker == -1;

    if (grouped) {
        puts("group");
        marker = next();
    }
    do {
        if (marker == -3)
            items();
        else if (marker == -5 || marker == -7)
            record(marker == -5);
        else if (marker == -9)
            own_event();
        else {
            printf("unknown marker %d\n", marker);
            exit(1);
        }
    } while (grouped && (marker = next()) != -2);
}

static int tracer(int buffer, int option)
{
    static char mask[36] = "OOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO";
    int tag, tid, count;

    if (pvm_mytid() < 0 || pvm_reg_tracer(0, 77, 0, 88, mask, buffer, option) < 0)
        return 1;
    puts("serving");
    fflush(stdout);
    while (pvm_recv(-1, -1) > 0) {
        pvm_bufinfo(pvm_getrbuf(), 0, &tag, 0);
        if (tag == 88) {
            pvm_upkint(&tid, 1, 1);
            pvm_upkint(&count, 1, 1);
            printf("output %d\n", count);
        } else if (tag == 77)
            records();
        fflush(stdout);
    }
    return 0;
}

static int task(const char *self)
{
    int numbers[3] = {1, 2, 3}, tid = pvm_mytid(), child;
    char *argv[] = {"child", 0};

    pvm_initsend(PvmDataDefault);
    pvm_pkint(numbers, 3, 1);
    pvm_pkstr("text");
    pvm_send(tid, 5);
    pvm_recv(tid, 5);
    pvm_upkint(numbers, 3, 1);
    pvm_kill(-5);
    pvm_initsend(PvmDataTrace);
    pvm_pkint(numbers, 3, 1);
    pvm_send(-1111, -2222);
    if (pvm_spawn((char *)self, argv, 0, "", 1, &child) == 1)
        pvm_recv(child, 6);
    pvm_exit();
    return 0;
}

static int child(void)
{
    pvm_initsend(PvmDataDefault);
    pvm_send(pvm_parent(), 6);
    puts("child");
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    pvm_setopt(PvmAutoErr, 0);
    if (argc > 3 && !strcmp(argv[1], "tracer"))
        return tracer(atoi(argv[2]), atoi(argv[3]));
    if (argc > 1 && !strcmp(argv[1], "child"))
        return child();
    return task(argv[0]);
}
