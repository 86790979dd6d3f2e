"""The search for each local strategy's fastest counts, schedule and cut on this node.

Short trials, measured and recorded as any other; see docs/tuning.md.
"""
