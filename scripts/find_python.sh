#!/bin/sh
# Prints a Python of at least 3.11 that can make environments: the one named as
# argument, or the first of the usual names. Says what to do if there is none.
set -eu

usable() {
    # Debian's python3 lacks ensurepip until python3-venv is installed.
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
        2>/dev/null
}

for candidate in "${@:-python3.11}" python3.12 python3.13 python3; do
    if usable "$candidate"; then
        echo "$candidate"
        exit 0
    fi
    if [ $# -gt 0 ]; then
        break
    fi
done
{
    echo "no usable Python among: ${*:-python3.11 python3.12 python3.13 python3}"
    echo "It must be 3.11 or later, with the venv and ensurepip modules. Install one"
    echo "(on Debian and Ubuntu: apt-get install python3-venv), or name one with"
    echo "make PYTHON=path."
} >&2
exit 1
