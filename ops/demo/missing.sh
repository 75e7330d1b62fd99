#!/bin/sh
# Print what is missing on this machine, one thing a line: APT_PACKAGE<TAB>what it is needed for.
# Usage: missing.sh PYTHON [build|test]. Prints nothing when all is there; changes nothing.
set -eu
python=$1
purpose=${2:-build}

need() { printf '%s\t%s\n' "$1" "$2"; }

if ! command -v "$python" >/dev/null 2>&1; then
    need python3 "the interpreter $python"
    need python3-venv "virtual environments"
    [ -n "${FLASHD_NO_NATIVE:-}" ] || need python3-dev "Python's C headers, for the native kernels"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    need python3.11 "Python 3.11 or newer: $python is $("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken)"
    need python3.11-venv "virtual environments"
    [ -n "${FLASHD_NO_NATIVE:-}" ] || need python3.11-dev "Python's C headers, for the native kernels"
else
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        need "python$version-venv" "virtual environments ($python cannot make one)"
    [ -n "${FLASHD_NO_NATIVE:-}" ] ||
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        need "python$version-dev" "Python's C headers, for the native kernels"
fi

if [ -z "${FLASHD_NO_NATIVE:-}" ] && [ -z "${CXX:-}" ] &&
    ! command -v c++ >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
    need g++ "a C++17 compiler, for the native kernels"
fi

if [ "$purpose" = test ]; then
    # The packaging test builds without FLASHD_NO_NATIVE too; the README's commands use curl.
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || [ -z "${FLASHD_NO_NATIVE:-}" ] ||
        need g++ "the test that builds the native kernels"
    command -v curl >/dev/null 2>&1 || need curl "the test that runs the README's commands"
    command -v fio >/dev/null 2>&1 || need fio "the test that compares read speeds with it"
fi
