"""Searches by short trials, which are measured and recorded like all others; see
docs/how-to/tune.md.

`local` finds the fastest counts, schedule and split points of each local strategy on this node,
alone or before a run. `comm` finds the fastest communication settings of each trial with peers.
Both only list their rounds (`method`); one engine runs them: candidates as trials (`spaces`),
brackets of candidates (`search`), measurements that can be resumed (`measurement`, `session`),
results (`findings`), and the spec with the winners (`tuned_spec`). `batch` finds the largest batch
that fits into memory.
"""
