"""From a file to trials: arithmetic only, nothing is started.

1. `spec.load_spec` reads TOML and `--set`, and reports all faults at once as one UsageError;
2. `spec.extensions` finds the descriptors of strategies, transports, launchers and workloads;
3. `trials.planning.plan_trials` turns the request into trials: who runs where, with which cores;
4. `trials.sample_order` says which rank processes which samples in which step;
5. `costs` has the formulas: bytes, messages and seconds of a collective.

Read first: `trials.planning.plan_trials`.
"""
