"""The format of checkpoints on disk. Nothing that is read here can run code, no matter who wrote it.

::

    step-00000300/
        shard-00001.safetensors   what rank 0 has written: parts of tensors by logical name, with offsets
        shard-00001-2.safetensors second parts of the same tensors, where a rank's part is no box
        checkpoint.json           step, settings, ranks, and what else is no tensor
        plan.json, cluster.json   the plan in use, and the cluster for which it was made
        SHA256SUMS                of all of these, as `sha256sum -c` reads it; written last

The shards are those of torch: `torch.distributed.checkpoint.load` reads them by its HuggingFaceStorageReader.
"""
