#!/bin/sh
# Installs what pip cannot: the venv module of Debian's Python, on Debian and Ubuntu,
# where run as root. Elsewhere it says what is missing and goes on.
set -u

[ "$(uname -s)" = Linux ] || exit 0 # macOS brings all that mlx needs.

here=$(dirname "$0")
if [ -x "$here/../.venv/bin/python" ] || sh "$here/find_python.sh" >/dev/null 2>&1; then
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
