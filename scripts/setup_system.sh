#!/bin/sh
# Installs what pip cannot: the venv module of Debian's Python, on Debian and Ubuntu,
# where run as root. Elsewhere it says what is missing and goes on.
#
#     sh scripts/setup_system.sh
#     sh scripts/setup_system.sh python [NAME]
#
# The second prints a Python of at least 3.11 that can make environments: the one that is
# named, or the first of the usual names. It says what to do if there is none.
set -u

find_python() {
    for candidate in "${@:-python3.11}" python3.12 python3.13 python3; do
        # Debian's python3 lacks ensurepip until python3-venv is installed.
        if "$candidate" -c \
            'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return 0
        fi
        [ $# = 0 ] || break
    done
    return 1
}

if [ "${1-}" = python ]; then
    shift
    find_python "$@" && exit
    {
        echo "no usable Python among: ${*:-python3.11 python3.12 python3.13 python3}"
        echo "It must be 3.11 or later, with the venv and ensurepip modules. Install one"
        echo "(on Debian and Ubuntu: apt-get install python3-venv), or name one with"
        echo "make PYTHON=path."
    } >&2
    exit 1
fi
[ "$(uname -s)" = Linux ] || exit 0 # macOS brings all that mlx needs.
if [ -x "$(dirname "$0")/../.venv/bin/python" ] || find_python >/dev/null; then
    exit 0
fi
package=python3-venv # as Debian names it
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing system package: $package" >&2
    exit 0
fi
echo "installing $package"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $package; } \
    >/dev/null; then
    echo "apt-get could not install $package; going on without" >&2
fi
