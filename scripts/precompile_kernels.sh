#!/bin/sh
# Compiles the header that each of mlx's compiled kernels for the CPU begins with.
#
#     sh scripts/precompile_kernels.sh VENV
#
# Where mlx fuses operations it has the C++ compiler make a kernel, which takes 0.8 s, of
# which 0.6 s are this header; a first run needs dozens. GCC takes the precompiled one
# where it stands beside the header and was made with the same options. That it belongs
# to this header is not checked by GCC, so it is made anew where the header is newer.
set -u

for header in "$1"/lib/python3*/site-packages/mlx/include/mlx/backend/cpu/compiled_preamble.h; do
    made=$header.gch
    [ -f "$header" ] && [ ! "$made" -nt "$header" ] || continue
    rm -f "$made"
    # clang, which may be named g++, takes no such file.
    g++ --version 2>/dev/null | grep -q 'Free Software Foundation' || continue
    # The options are those of mlx. Moved in one step, so that no half of it is read.
    g++ -std=c++17 -O3 -Wall -fPIC -w -I "${header%/mlx/backend/*}" -x c++-header \
        "$header" -o "$made.$$" && mv "$made.$$" "$made" || rm -f "$made.$$"
done
exit 0
