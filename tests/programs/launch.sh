#!/bin/sh
# A start script that puts the system's folder of libraries first, as that of R does.
LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:$LD_LIBRARY_PATH
export LD_LIBRARY_PATH
exec "${1:?program}"
