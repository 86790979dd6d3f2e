"""Record a training that its own launcher starts: `paceline watch -- COMMAND`.

The command runs unchanged. `startup` is a folder in its PYTHONPATH, so every Python process of the
command imports its `sitecustomize`. In a process that trains, that calls `rank.record`, which
writes the files of one rank of one trial: the same as those of a script under `paceline run`.

- `startup/sitecustomize`: find the processes that train; only the standard library;
- `rank`: the command as a trial, which rank this process is, and its records, from the import of
  torch to its end.
"""
