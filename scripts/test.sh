#!/usr/bin/env bash
# Checks everything: ruff, ruff format, mypy, pytest, in an environment that it makes itself.
#
#   bash scripts/test.sh [pytest arguments]            the pinned environment
#   bash scripts/test.sh --lowest [pytest arguments]   only pytest, on the lowest versions that we support
#
# Paths in the arguments are taken from the repository root. All checks run; the exit code is 1 if any failed.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

environment=default
if [[ ${1:-} == --lowest ]]; then
  environment=lowest
  shift
fi
source scripts/env.sh "$environment"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tensors of the tests are tiny: more threads only wait

failed=()
check() {
  printf '== %s\n' "$*"
  "$@" || failed+=("$1 (exit code $?)")
}
if [[ $environment == default ]]; then
  check ruff check
  check ruff format --check
  check mypy
fi
# A process per core; the tests of a file stay together, so that their fixtures are made once.
check pytest --numprocesses auto --maxprocesses 8 --dist loadfile "$@"

if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
