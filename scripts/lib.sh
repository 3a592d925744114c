# shellcheck shell=bash
# Shared by the scripts beside it; sourced, never run. Every script works from any directory and changes into the root.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT" || exit

say() {
  if [ -t 2 ]; then printf '\033[1m%s\033[0m\n' "$*" >&2; else printf '%s\n' "$*" >&2; fi
}

die() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2
  exit 1
}

# Prints the first Python that is 3.11 or newer and can make a virtual environment.
find_python() {
  local candidate too_old="" no_venv=""
  for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    command -v "$candidate" > /dev/null || continue
    # A name on the path may still refuse to run (version managers leave such names behind).
    "$candidate" -c '' 2> /dev/null || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      too_old="$candidate is $("$candidate" -c 'import platform; print(platform.python_version())')"
    elif ! "$candidate" -c 'import ensurepip, venv' 2> /dev/null; then
      no_venv="$candidate"
    else
      command -v "$candidate"
      return
    fi
  done
  [ -z "$no_venv" ] || die "$no_venv cannot make virtual environments" \
    "install its venv package, on Debian and Ubuntu: apt-get install $(basename "$no_venv")-venv"
  [ -z "$too_old" ] || die "no Python 3.11 or newer was found ($too_old)" "install Python 3.12 and run this again"
  die "no Python was found" "install Python 3.12 and run this again"
}

# True when .venv was filled with these extras (or all of them, which dev has) from the files as they are now.
is_installed() {
  local extras
  for extras in "$1" dev; do
    if cat pyproject.toml scripts/constraints.txt | cmp --silent - ".venv/optune-$extras.stamp"; then
      return 0
    fi
  done
  return 1
}

# use_python EXTRAS: sets PYTHON to an interpreter with optune and these extras.
# .venv is made and filled when it is missing or out of date; a second call costs nothing.
# OPTUNE_PYTHON names an interpreter that has everything already: nothing is made or installed then.
use_python() {
  local extras="$1"
  if [ -n "${OPTUNE_PYTHON:-}" ]; then
    PYTHON="$OPTUNE_PYTHON"
    "$PYTHON" -c 'import torch, hydra' || die "OPTUNE_PYTHON=$OPTUNE_PYTHON lacks optune's dependencies"
    return
  fi
  PYTHON="$ROOT/.venv/bin/python"
  if ! "$PYTHON" -c '' 2> /dev/null; then
    local base
    base="$(find_python)"
    say "Making .venv with $base"
    "$base" -m venv --clear .venv
  fi
  if ! is_installed "$extras"; then
    say "Installing optune[$extras] into .venv (once; most of the time and space goes to torch)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[$extras]"
    cat pyproject.toml scripts/constraints.txt > ".venv/optune-$extras.stamp"
  fi
}
