/*
 * Variadic functions, which Rust cannot define. Each converts its arguments to a va_list and calls a Rust function. The
 * functions sempa_va_* read one argument from such a list.
 *
 * The exported functions pvm_packf, pvm_unpackf and pvmlogprintf jump to this file (src/ffi/format.rs).
 */
#include <stdarg.h>

#if !defined(__x86_64__)
#error "the variadic part of libpvm3 knows the calling convention of x86-64 only"
#endif

int pvm_vpackf(const char *format, va_list items);
int pvm_vunpackf(const char *format, va_list items);
int vpvmlogprintf(const char *format, va_list items);

int sempa_packf(const char *format, ...)
{
    va_list items;
    int answer;

    va_start(items, format);
    answer = pvm_vpackf(format, items);
    va_end(items);
    return answer;
}

int sempa_unpackf(const char *format, ...)
{
    va_list items;
    int answer;

    va_start(items, format);
    answer = pvm_vunpackf(format, items);
    va_end(items);
    return answer;
}

int sempa_logprintf(const char *format, ...)
{
    va_list items;
    int answer;

    va_start(items, format);
    answer = vpvmlogprintf(format, items);
    va_end(items);
    return answer;
}

/* On x86-64 a va_list parameter is a pointer to the caller's list, so each read advances the caller's position. */
int sempa_va_int(va_list items) { return va_arg(items, int); }
long sempa_va_long(va_list items) { return va_arg(items, long); }
double sempa_va_double(va_list items) { return va_arg(items, double); }
void *sempa_va_pointer(va_list items) { return va_arg(items, void *); }
