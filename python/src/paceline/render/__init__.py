"""A spec's trials as files for those who schedule: Slurm's sbatch, Kubernetes."""
