"""The format of a checkpoint on disk. Nothing that is read here can run code, no matter who wrote it.

::

    step-00000300/
        shard-00001.safetensors   tensors by logical name, one file per rank that saved
        checkpoint.json           step, settings, ranks
        plan.json, cluster.json   the plan in use, and the cluster for which it was made
        SHA256SUMS                of all of these, as `sha256sum -c` reads it; written last
"""
