"""Checks before a run: of this host, and between hosts with a probe on each one.

`this_host` refuses a trial, for every launcher; `findings` has the conclusions from probes.
"""
