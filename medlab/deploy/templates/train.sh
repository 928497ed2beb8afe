#!/usr/bin/env bash
# What one node does: begin the run, or go on with it where it is there. TERM, INT and USR1 ask it to save and to stop.
# shellcheck disable=SC2016  # a path may hold a $
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=@@{python}
recipe=@@{recipe}
run=@@{run}
is() { "$python" -c "import sys, medlab.deploy.standing as s; sys.exit(not s.$1(sys.argv[1]))" "$run"; }

# Several nodes choose before any of them trains, unless a launcher chose for all of them. GO_ON=yes fetches a run from
# its mirror where it is not here.
go_on=${GO_ON-@@{go_on}}
if [ -n "$go_on" ]; then
    words=(train "$recipe" --resume "$run")
else
    words=(train "$recipe" --config "$here/config.yml" --run-dir "$run")
fi
words+=(--steps @@{steps}@@{extra} "$@")

@@{launch}

# A second signal ends training without saving. So the launcher has a process group of its own (set -m), which hears
# nothing of what a terminal or a scheduler tells all others, and is asked once.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
set -m
(trap '' USR1 && exec "${launch[@]}" "${words[@]}") &
process=$!
asked=
trap '[ -n "$asked" ] || { asked=yes && kill -TERM "$process" 2>/dev/null || true; }' TERM INT USR1
while status=0; wait "$process" || status=$?; kill -0 "$process" 2>/dev/null; do :; done

# Whatever the launcher makes of it, a run that was asked to stop was saved.
[ -z "$asked" ] || status=0
@@{ending}exit "$status"
