"""Memory and signals that the ranks of one node share; no socket, nothing to clean up.

`SharedNode` gives memory, `Barrier` (a barrier) and `Channel` (slots from one rank to another).
Waits sleep in the kernel, have a limit, and notice within half a second that a peer has failed,
left or been killed. The memory has no name in any file system, so it goes when its last user goes,
however that ends.
"""
