"""Refuse a request that cannot work, whatever the machine: each fault with its reason and the fix.

`experiment.faults_of` returns all faults of a spec at once. `experiment` has the rules of the file,
its tables and its [[workloads]]; `trial` those of one [[trials]] entry; `transport` says which
transports can join the ranks of an entry. What only one strategy, transport or launcher cannot do,
its descriptor says.
"""
