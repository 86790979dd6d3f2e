"""Searches by short trials, measured and recorded as any other; see docs/how-to/tune.md.

`local`: each local strategy's fastest counts, schedule and cut on this node. `comm`: the fastest
way of communicating for each trial with peers. What they share is here: candidates are trials
(`spaces`), brackets of candidates (`search`, `halving`), what measures them and can be resumed
(`measuring`, `session`), what was found (`findings`), and the spec with the winners (`tuned`).
"""
