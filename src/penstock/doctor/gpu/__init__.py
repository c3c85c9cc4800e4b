"""Checks that only GPUs can answer: `penstock doctor --gpu`.

Every stage is a child process of every rank, with a time limit, so that a hang or a crash is a result like
any other. `run.py` starts them and collects what they find, `child.py` is such a process, `stages.py` lists
the stages. Everything also runs on processors, and on stand-ins for GPUs: that tests its own code, no GPU.
"""
