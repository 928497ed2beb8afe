python=@@{python}
run=@@{run}
steps=@@{steps}
is() { "$python" -c "import sys, medlab.deploy.standing as s; sys.exit(not s.$1(*sys.argv[1:]))" "$run" "${@:2}"; }
