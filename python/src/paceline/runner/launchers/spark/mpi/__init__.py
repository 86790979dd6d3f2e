"""One MPI job inside a Spark barrier stage.

- `task`: what each barrier task does: task 0 leads, the others hold slots and start daemons;
- `mpirun`: the commands that tasks start, their environment, and how mpirun ended;
- `agent`: the program that mpirun calls in place of ssh to start a daemon on another host, and its
  messages to the tasks.

The ranks themselves run `paceline.runner.launchers.mpi.rank`, as under any mpirun.
"""
