#!/usr/bin/env bash
# What one node does: begin the run, or go on with it where it is there. TERM, INT and USR1 ask it to save and to stop.
# shellcheck disable=SC2016,SC2329  # a path may hold a $, and the trap calls a function
set -euo pipefail

# A second signal ends training without saving, so what went into the background is asked once; a node that is asked
# before anything did does not begin.
asked=
trap '[ -n "$asked" ] || { asked=yes && [ -z "${!:-}" ] || ask "$!"; }' TERM INT USR1

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=@@{recipe}
@@{asks}
# Several nodes choose before any of them trains, unless a launcher chose for all of them.
go_on=${GO_ON-@@{go_on}}
if [ -n "$go_on" ]; then
    words=(train "$recipe" --resume "$run")
else
    words=(train "$recipe" --config "$here/config.yml" --run-dir "$run")
fi
words+=(--steps "$steps"@@{extra} "$@")

@@{launch}

# With a process group of its own (set -m) the launcher hears nothing of what a terminal or a scheduler tells all others.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
set -m
status=0
if [ -z "$asked" ]; then
    (trap '' USR1 && exec "${launch[@]}" "${words[@]}") &
    while wait "$!" || true; kill -0 "$!" 2>/dev/null; do :; done
    wait "$!" || status=$?
fi

# Whatever the launcher makes of it, a run that was asked to stop was saved.
[ -z "$asked" ] || status=0
@@{ending}exit "$status"
