/* The mailbox: storing, reading, deleting, listing, the old functions. */
#include "conform.h"

/* Stores an int under a name, as its arguments say: name, value, flags. Leaves on request. */
static int storer(int argc, char **argv)
{
    int value = atoi(argv[3]), index;
    (void)argc;
    pvm_setopt(PvmAutoErr, 0);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&value, 1, 1);
    index = pvm_putinfo(argv[2], pvm_getsbuf(), atoi(argv[4]));
    tell(pvm_parent(), 1, index);
    pvm_recv(pvm_parent(), 2);
    pvm_exit();
    return 0;
}

/* Waits for an entry and sends its contents. */
static int fetcher(int argc, char **argv)
{
    int value = -1;
    (void)argc;
    tell(pvm_parent(), 1, 0);
    if (pvm_recvinfo(argv[2], 0, PvmMboxWaitForInfo) > 0)
        pvm_upkint(&value, 1, 1);
    tell(pvm_parent(), 3, value);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "storer", storer }, { "fetcher", fetcher }, { NULL, NULL } };

static int put(const char *name, int value, int flags)
{
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&value, 1, 1);
    return pvm_putinfo((char *)name, pvm_getsbuf(), flags);
}

static int get(const char *name, int index, int flags)
{
    int value = -1000, id = pvm_recvinfo((char *)name, index, flags);
    if (id <= 0)
        return id;
    pvm_upkint(&value, 1, 1);
    return value;
}

static int start_storer(const char *name, const char *value, int flags, int *index)
{
    char number[16], *words[] = { "storer", (char *)name, (char *)value, number, NULL };
    int tid;
    snprintf(number, sizeof number, "%d", flags);
    pvm_spawn((char *)own_name, words, PvmTaskDefault, NULL, 1, &tid);
    *index = await_int(tid, 1, -999);
    return tid;
}

static void own_entries(void)
{
    int id, src = 0, before;
    is(put("own", 5, PvmMboxDefault), 0, "putinfo returns index 0 for the first entry");
    is(get("own", 0, PvmMboxDefault), 5, "recvinfo gets what putinfo stored");
    is(get("own", 0, PvmMboxDefault), 5, "recvinfo leaves the entry");
    is(put("own", 6, PvmMboxDefault), 0, "the owner may store again");
    is(get("own", 0, PvmMboxDefault), 6, "storing again replaces the entry");
    id = pvm_recvinfo("own", 0, PvmMboxDefault);
    is(pvm_getrbuf(), id, "recvinfo makes its message the active receive buffer");
    pvm_bufinfo(id, NULL, NULL, &src);
    is(src, own_tid, "a stored message has who packed it as its sender");
    before = pvm_getsbuf();
    put("own", 7, PvmMboxDefault);
    is(get("own", 3, PvmMboxDefault), PvmNotFound, "recvinfo of an index that nobody stored finds none");
    is(get("nothing", 0, PvmMboxDefault), PvmNotFound, "recvinfo of a name that nobody stored finds none");
    is(pvm_getrbuf(), 0, "a failed recvinfo leaves no active receive buffer");
    is(get("own", 0, PvmMboxFirstAvail), 7, "recvinfo of the first entry from an index on finds it");
    is(get("own", 1, PvmMboxFirstAvail), PvmNotFound, "recvinfo of the first entry behind the last finds none");
    is(pvm_delinfo("own", 0, PvmMboxDefault), 0, "delinfo returns the index");
    is(get("own", 0, PvmMboxDefault), PvmNotFound, "a deleted entry is not found");
    is(pvm_delinfo("own", 0, PvmMboxDefault), PvmNotFound, "delinfo of a deleted entry finds none");
    (void)before;
    put("own", 8, PvmMboxDefault);
    is(get("own", 0, PvmMboxReadAndDelete), 8, "recvinfo can delete what it reads");
    is(get("own", 0, PvmMboxDefault), PvmNotFound, "what was read and deleted is gone");
}

static void several(void)
{
    is(put("many", 10, PvmMboxMultiInstance), 0, "the first of many entries has index 0");
    is(put("many", 11, PvmMboxMultiInstance), 1, "the second of many entries has index 1");
    is(put("many", 15, PvmMboxMultiInstance | PvmMboxDirectIndex(5)), 5, "an entry can be given its index");
    is(put("many", 16, PvmMboxMultiInstance | PvmMboxDirectIndex(5)), 6, "an index that is taken gives the next free one");
    is(put("many", 12, PvmMboxMultiInstance), 2, "an entry takes the lowest free index");
    is(get("many", 5, PvmMboxDefault), 15, "entries are read by their index");
    is(get("many", 3, PvmMboxFirstAvail), 15, "the first entry from an index on is the next one there is");
    pvm_delinfo("many", 1, PvmMboxDefault);
    is(put("many", 21, PvmMboxMultiInstance), 1, "a free index is used again");
    is(put("many", 99, PvmMboxDirectIndex(6)), 6, "an entry at a given index replaces the owner's own");
    is(get("many", 6, PvmMboxDefault), 99, "the entry at a given index is the new one");
}

/* Another task stores a persistent entry and goes. */
static void leave(char *name, char *value, int flags)
{
    int index, kid = start_storer(name, value, PvmMboxPersistent | flags, &index);
    tell(kid, 2, 0);
    gone(kid);
}

/* Resets as the console has them. */
static void resets(void)
{
    int index, kid;
    leave("left", "54", PvmMboxMultiInstance);
    leave("left", "55", PvmMboxMultiInstance);
    leave("also left", "56", 0);
    pvmreset(own_tid, 0, "left", 1);
    is(get("left", 1, PvmMboxDefault), PvmNotFound, "a reset of an entry removes it if it has no owner");
    is(get("left", 0, PvmMboxDefault), 54, "a reset of an entry leaves the others of its name");
    pvmreset(own_tid, 0, "left", -1);
    is(get("left", 0, PvmMboxDefault), PvmNotFound, "a reset of a name removes its entries without owner");
    is(get("also left", 0, PvmMboxDefault), 56, "a reset of a name leaves other names");
    kid = start_storer("left", "57", PvmMboxPersistent, &index);
    pvmreset(own_tid, 0, "", -1);
    is(get("also left", 0, PvmMboxDefault), PvmNotFound, "a reset of no name removes all entries without owner");
    is(get("left", 0, PvmMboxDefault), 57, "a reset leaves entries that have an owner");
    tell(kid, 2, 0);
    gone(kid);
    leave("stays", "58", 0);
}

static void of_others(void)
{
    int index, kid = start_storer("theirs", "31", PvmMboxDefault, &index), sentenced;
    is(index, 0, "another task stores an entry");
    is(get("theirs", 0, PvmMboxDefault), 31, "entries of others can be read");
    is(put("theirs", 1, PvmMboxDefault), PvmDenied, "an entry of another task cannot be replaced");
    is(pvm_delinfo("theirs", 0, PvmMboxDefault), PvmDenied, "an entry of another task cannot be deleted");
    is(get("theirs", 0, PvmMboxReadAndDelete), PvmDenied, "an entry of another task cannot be read and deleted");
    is(put("theirs", 32, PvmMboxMultiInstance), 1, "an entry can stand next to that of another task");
    tell(kid, 2, 0);
    gone(kid);
    is(get("theirs", 0, PvmMboxDefault), PvmNotFound, "entries of a task go with it");
    is(get("theirs", 1, PvmMboxDefault), 32, "entries of others stay when a task goes");
    kid = start_storer("open", "41", PvmMboxOverWritable, &index);
    is(put("open", 42, PvmMboxDefault), 0, "an entry that allows it can be replaced by others");
    is(get("open", 0, PvmMboxDefault), 42, "the entry that was replaced is the new one");
    tell(kid, 2, 0);
    gone(kid);
    is(get("open", 0, PvmMboxDefault), 42, "an entry belongs to who replaced it");
    kid = start_storer("stays", "51", PvmMboxPersistent, &index);
    tell(kid, 2, 0);
    gone(kid);
    is(get("stays", 0, PvmMboxDefault), 51, "a persistent entry outlives its owner");
    sentenced = put("stays", 52, PvmMboxDefault);
    is(sentenced, PvmDenied, "a persistent entry without owner cannot be replaced");
    is(pvm_delinfo("stays", 0, PvmMboxDefault), PvmDenied, "a persistent entry without owner cannot be deleted");
    resets();
    kid = start_storer("free", "61", PvmMboxPersistent | PvmMboxOverWritable, &index);
    tell(kid, 2, 0);
    gone(kid);
    is(pvm_delinfo("free", 0, PvmMboxDefault), 0, "a persistent entry that allows it can be deleted by others");
}

static void waiting(void)
{
    char *words[] = { "fetcher", "later", NULL };
    int kid;
    pvm_spawn((char *)own_name, words, PvmTaskDefault, NULL, 1, &kid);
    await(kid, 1);
    is(comes_soon(kid, 3), 0, "recvinfo waits for an entry if it was told to");
    put("later", 71, PvmMboxDefault);
    is(await_int(kid, 3, 0), 71, "recvinfo returns when the entry is stored");
}

static struct pvmmboxinfo *find(struct pvmmboxinfo *list, int n, const char *name)
{
    int k;
    for (k = 0; k < n; k++)
        if (!strcmp(list[k].mi_name, name))
            return list + k;
    return NULL;
}

static void listing(void)
{
    struct pvmmboxinfo *list = NULL, *one;
    int n = -1;
    is(pvm_getmboxinfo("*", &n, &list), PvmOk, "getmboxinfo returns 0");
    holds(n >= 3, "getmboxinfo lists all names for a star");
    one = find(list, n, "many");
    holds(one != NULL, "getmboxinfo lists a name");
    is(one ? one->mi_nentries : -1, 5, "getmboxinfo counts the entries of a name");
    holds(one && one->mi_indices[0] == 0 && one->mi_indices[3] == 5, "getmboxinfo lists the indices in order");
    is(one ? one->mi_owners[0] : -1, own_tid, "getmboxinfo tells the owners");
    is(one ? one->mi_flags[0] : -1, PvmMboxMultiInstance, "getmboxinfo tells the flags");
    one = find(list, n, "stays");
    is(one ? one->mi_owners[0] : -1, 0, "getmboxinfo tells owner 0 of an entry whose owner is gone");
    pvm_getmboxinfo(NULL, &n, &list);
    holds(find(list, n, "many") && find(list, n, "stays"), "getmboxinfo of null lists all names");
    pvm_getmboxinfo("", &n, &list);
    holds(find(list, n, "many") && find(list, n, "stays"), "getmboxinfo of an empty pattern lists all names");
    pvm_getmboxinfo("many", &n, &list);
    is(n, 1, "getmboxinfo of a name lists one");
    pvm_getmboxinfo("man*", &n, &list);
    holds(n == 1 && find(list, n, "many"), "getmboxinfo takes a star at the end");
    pvm_getmboxinfo("*any", &n, &list);
    holds(n == 1 && find(list, n, "many"), "getmboxinfo takes a star at the beginning");
    pvm_getmboxinfo("tay", &n, &list);
    holds(n == 1 && find(list, n, "stays"), "getmboxinfo finds a pattern anywhere in a name");
    is(pvm_getmboxinfo("nobody stored this", &n, &list), PvmOk, "getmboxinfo of a pattern without match returns 0");
    is(n, 0, "getmboxinfo of a pattern without match lists none");
    is(sizeof *list, 40, "the entry for a name has 40 bytes");
}

static void old_functions(void)
{
    int value = 0, id;
    is(pvm_insert("old", -1, 81), 0, "insert at the lowest free index returns 0 first");
    is(pvm_insert("old", -1, 82), 1, "insert at the lowest free index returns 1 then");
    is(pvm_insert("old", 1, 83), PvmDupEntry, "insert at an index that is taken is refused");
    is(pvm_insert("old", 4, 84), 4, "insert at a free index returns it");
    tell(own_tid, 90, 1);
    id = await(own_tid, 90);
    is(pvm_lookup("old", 1, &value), 1, "lookup returns the index");
    is(value, 82, "lookup tells the number");
    is(pvm_getrbuf(), id, "lookup leaves the active receive buffer");
    is(pvm_lookup("old", -1, &value), 0, "lookup of any index takes the first");
    is(value, 81, "lookup of any index tells the first number");
    is(pvm_lookup("old", 3, &value), PvmNotFound, "lookup of an index that nobody stored finds none");
    is(pvm_lookup("none", -1, &value), PvmNotFound, "lookup of a name that nobody stored finds none");
    is(pvm_delete("old", 1), 1, "delete returns the index");
    is(pvm_delete("old", 1), PvmNotFound, "delete of a deleted entry finds none");
    is(get("old", 0, PvmMboxDefault), 81, "recvinfo reads what insert stored");
    pvm_delete("old", 0);
    is(pvm_lookup("old", -1, &value), 4, "lookup of any index returns the index of the first entry");
    is(value, 84, "lookup of any index tells the number of the first entry");
    pvm_delete("old", 4);
    pvm_initsend(PvmDataDefault);
    is(pvm_putinfo("high", pvm_getsbuf(), -1), 2097151, "putinfo with all flags uses the highest direct index");
    pvm_delinfo("high", 2097151, PvmMboxDefault);
}

static void sentences(void)
{
    own_entries();
    several();
    of_others();
    waiting();
    listing();
    old_functions();
}
