"""Memory and signals that the ranks of one node share, without sockets.

`SharedNode` creates memory, `Barrier` objects and `Channel` objects (slots from one rank to
another). Waits sleep in the kernel, have a limit, and notice within half a second that a peer has
failed, left or been killed. The memory has no name in any file system and is freed with its last
user, however that process ends.
"""
