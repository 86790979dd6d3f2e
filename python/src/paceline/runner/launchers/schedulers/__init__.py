"""Files that start the trials of a spec under a scheduler: Slurm, Kubernetes.

Each configuration is shipped as a planned trial in JSON; the job reads it with `--trial` and keeps
its own records in `--out`. What differs between launchers is in the launchers' own folders; their
descriptors name it (`render_slurm`, `render_kubernetes`).
"""
