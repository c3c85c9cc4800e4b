"""TRL's own script for supervised fine-tuning, by Penstock and by expert parallelism of other systems.

`prepared` makes what the script reads, `contenders` says how each system is asked for, `rank` runs the script
and notes its steps, `measure` starts the runs in turns, `result` prints them.
"""
