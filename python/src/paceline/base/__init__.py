"""Facts about a machine, and the errors of all rooms.

- `errors` is the exception tree with the exit codes; `version` is the package's version;
- `host` reads `/proc`, control groups and topology, finds programs, and starts and ends processes;
- `torch_internals` has the names of torch without a stable public interface;
- values and errors go from here to every room above; nothing comes back;
- a fact about a machine is read once, where it is needed, and recorded by `measure`.

Read first: `errors.PacelineError`.
"""
