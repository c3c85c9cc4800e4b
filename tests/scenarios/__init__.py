"""What Penstock does for those who use it, from end to end, one scenario in each file.

1. `test_train.py`: `penstock train` on ranks that it starts itself trains as one process would.
2. `test_resume.py`: a run that was stopped goes on with the very same bits.
3. `test_killed_rank.py`: a rank that is killed ends the run, and is named.
4. `test_ctrl_c.py`: Ctrl-C saves, and what was saved goes on.
5. `test_hugging_face.py`: a model of transformers comes back to transformers as it was trained, also where
   four ranks have saved what goes on on two.
6. `test_planning.py`: a searched plan is tried, told, and changed when the network changes.
7. `test_two_machines.py`: torchrun starts one run on two machines.

They hold whatever is inside. A scenario uses commands, documented functions and settings, environment
variables of launchers, exit codes, and documented files in the folder of a run; it reads losses, parameters
and logits as numbers. It knows no file inside a checkpoint: that one was written shows in what can be done
with it (`train.resume`, `penstock convert`, `from_pretrained`). Words that a command prints count only where
the documentation promises them.

`fine_tune.py` is a program of a user, `support.py` what several scenarios do.
"""
