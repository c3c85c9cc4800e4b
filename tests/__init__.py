"""Tests of Penstock, mirroring src/penstock. What they start has one thread for arithmetic.

Two workers and the ranks of their tests share the processors. A pool of threads in each of them, as BLAS and
OpenMP start by default, would wait for its turn with all processors busy. Set here, before anything imports
numpy or torch; ranks are started with one thread anyway.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
