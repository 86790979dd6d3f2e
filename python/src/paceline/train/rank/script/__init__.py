"""A user's own training script as the task of a trial: run it unchanged, record what it does.

- `train`: one rank of such a trial from start to end, as `paceline.train.rank.train` of a task;
- `program`: set the variables of torchrun, run the file as Python would, and translate its end;
- `process_group`: answer `torch.distributed.init_process_group` with the trial's transport;
- `alterations`: give a script equal random numbers, or none, to compare it with one process;
- `touched_files`: record what the script makes, notice a snapshot of an earlier trial;
- `spawned`: answer a script that starts its ranks itself;
- `recorder`, `phases`: steps and their times, from torch's global optimiser hooks;
- `observer`, `own_steps`, `reached_rows`, `resume_state`: what `paceline verify` records;
- `tensors`: the first gradient, and the weights before the first step and at the end;
- `step`: what a script may report with `paceline.step`.
"""
