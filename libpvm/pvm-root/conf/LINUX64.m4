divert(-1)
# Macros for C sources that a Fortran program calls; make files of PVM programs pass this file to m4.
# The Fortran compiler appends an underscore to the name of a function, and passes the length of each
# string by value after all other arguments.
undefine(`len')
define(`FUNCTION', `$1_')
# Diversion 1 collects the lengths; the end of the argument list inserts them.
define(`SAVE', `divert(1)$1`'divert(0)')
define(`ARGS', `($1`'undivert(1))')
define(`STRING_PTR', `$1_ptr')
define(`STRING_LEN', `$1_len')
define(`STRING_ARG', `STRING_PTR($1)`'SAVE(`, 'STRING_LEN($1))')
define(`STRING_ARG_DECL', `char *STRING_PTR($1); int STRING_LEN($1)')
divert(0)dnl
