"""The work of one rank.

1. `rank.train` opens the transport, builds the task (`workloads`) and the strategy (`strategies`);
2. `data` delivers the samples of each global step, in the order of `plan`;
3. `rank.loop` runs the steps: the strategy computes gradients with the parts in `training`;
4. `transports` carries them to the other ranks, and the optimiser updates the weights;
5. rows, sample log and tensors go to `measure`.

Read first: `rank.train.train`.
"""
