#!/bin/sh
# Installs what pip cannot: OpenBLAS on Debian and Ubuntu, where run as root, and the
# venv module of Debian's Python. Elsewhere it says what is missing and goes on: the
# package works without OpenBLAS, only slowly on a Linux CPU.
set -u

[ "$(uname -s)" = Linux ] || exit 0 # macOS brings all that mlx needs.

here=$(dirname "$0")
packages=""

# ldconfig is not on the PATH of every user.
if ! PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null | grep -q 'libopenblas\.so\.0'
then
    packages="libopenblas0-pthread"
fi
if [ ! -x "$here/../.venv/bin/python" ] && ! sh "$here/find_python.sh" >/dev/null 2>&1
then
    packages="$packages python3-venv"
fi
[ -n "$packages" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing system packages (named as in Debian): $packages" >&2
    exit 0
fi
echo "installing $packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of words
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } \
    >/dev/null; then
    echo "apt-get could not install $packages; going on without" >&2
fi
