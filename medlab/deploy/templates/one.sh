# What Kubeflow tells a rank is not meant for the process that starts the ranks.
unset RANK WORLD_SIZE
launch=("$python" -m medlab)
