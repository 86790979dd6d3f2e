"""What a job script does with its ranks: options, rendezvous, one rank from start to end.

Between `report` and the layers below: `launch` starts job scripts, and they come here.
"""
