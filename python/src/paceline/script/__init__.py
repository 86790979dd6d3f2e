"""A user's own training script as the task of a trial: run it unchanged, record what it does.

- `rank`: one rank of such a trial from start to end, the counterpart of `paceline.worker`;
- `environment`: the variables that torchrun sets;
- `program`: run the file as Python would, and translate its end;
- `process_group`: answer `torch.distributed.init_process_group` with the trial's transport;
- `training`, `phases`: steps and their times, from torch's global optimiser hooks;
- `tensors`: the first gradient, and the weights before the first step and at the end.

A script may report more with `paceline.step` (`paceline.script_report`).
"""
