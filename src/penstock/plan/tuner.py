"""Tuners of S_p, the size of an all-reduce chunk, by measured step times: ask for a size, tell its time.

FlowMoE (Section 3, Algorithm BO) tunes with a Gaussian process and expected improvement; grid and random
search are there for comparison. All of them work on the logarithm of the size, because what counts is how
often a gradient is cut in two. The time has several local minima over the size, so none of them climbs a
hill.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from penstock.schedule.system import least_chunk_bytes

TunerName = Literal["bayesian", "grid", "random"]

LEAST_BYTES = 1 << 12
MOST_CHUNKS = 64
"""The most pieces into which a layer's gradients may be cut: each costs a start-up."""
ROUND_BYTES = 1 << 10
FIRST_PLACES = (1 / 6, 1 / 2, 5 / 6)
"""Logarithmic places in the range where the Gaussian process gets points before it is trusted."""
XI = 0.01
"""An expected improvement over the best by less than this part of a step counts as none."""
NOISE = 0.01
"""Variance of a measurement, as a part of the variance of all measurements."""
SAME = 0.05
"""Places nearer to each other than this count as one size."""
RESTARTS = 1
APART, MOST_SAMPLES = 1e-9, 1000


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """The sizes worth trying, in bytes."""

    least_bytes: int
    most_bytes: int

    @staticmethod
    def of(all_reduce_bytes: tuple[int, ...]) -> SizeRange:
        """Return the range for layers with these gradients: from 1 / MOST_CHUNKS of the largest to all."""
        most = max(*all_reduce_bytes, LEAST_BYTES)
        least = max(LEAST_BYTES, -(-most // MOST_CHUNKS), least_chunk_bytes(all_reduce_bytes))
        return SizeRange(least_bytes=min(least, most), most_bytes=most)

    def at(self, place: float) -> int:
        """Return the size at a place from 0 to 1 on the logarithmic scale, rounded as FlowMoE's code does."""
        exact = self.least_bytes * (self.most_bytes / self.least_bytes) ** place
        return self.clamp(round(exact / ROUND_BYTES) * ROUND_BYTES)

    def place(self, size_bytes: int) -> float:
        """Return the place of a size, from 0 to 1; 0 if there is only one size."""
        octaves = math.log(self.most_bytes / self.least_bytes)
        return math.log(self.clamp(size_bytes) / self.least_bytes) / octaves if octaves else 0.0

    def clamp(self, size_bytes: int) -> int:
        return min(max(size_bytes, self.least_bytes), self.most_bytes)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One size and the step time that was measured with it."""

    size_bytes: int
    seconds: float


class Tuner(Protocol):
    """Interface of a tuner, used in turns: ask for a size, run with it, tell how long a step took."""

    def ask(self) -> int:
        """Return the next size to try, in bytes. The first is the start size given to the tuner."""
        ...

    def tell(self, size_bytes: int, seconds: float) -> None: ...

    @property
    def best(self) -> Sample:
        """The size to keep, and the time that was measured with it. Needs at least one sample."""
        ...


class FixedSizes:
    """Tuner that tries sizes decided beforehand and keeps the fastest; after the last it starts over."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes, self._told = sizes, list[Sample]()

    def ask(self) -> int:
        return self._sizes[len(self._told) % len(self._sizes)]

    def tell(self, size_bytes: int, seconds: float) -> None:
        self._told.append(Sample(size_bytes=size_bytes, seconds=seconds))

    @property
    def best(self) -> Sample:
        return min(self._told, key=lambda sample: sample.seconds)


class BayesianTuner:
    """Tuner with a Gaussian process (Matern kernel) over the logarithm of the size, and expected improvement.

    The paper begins with one random point. Here the first is the start, and the next two lie far from it,
    since a process that knows one corner of a function with several minima stays there; for the same reason a
    size that was measured before gives way to the middle of the widest gap. The process takes measurements as
    noisy, and the best size is the one that the process, not a single lucky sample, finds fastest.
    """

    def __init__(self, start_bytes: int, sizes: SizeRange, seed: int) -> None:
        from bayes_opt import BayesianOptimization, acquisition  # takes a second to import

        self._sizes, self._told = sizes, list[Sample]()
        start = sizes.place(start_bytes)
        away = sorted(FIRST_PLACES, key=lambda place: -abs(place - start))[:2]
        self._first = [sizes.clamp(start_bytes), *map(sizes.at, away)]
        self._process = BayesianOptimization(
            f=None,
            pbounds={"place": (0.0, 1.0 + MOST_SAMPLES * APART)},
            acquisition_function=acquisition.ExpectedImprovement(xi=XI),
            random_state=seed,
            verbose=0,
        )
        self._process.set_gp_params(alpha=NOISE, n_restarts_optimizer=RESTARTS)

    def ask(self) -> int:
        if len(self._told) < len(self._first):
            return self._first[len(self._told)]
        place = float(self._process.suggest()["place"])
        tried = any(abs(place - self._sizes.place(sample.size_bytes)) < SAME for sample in self._told)
        if not tried:
            return self._sizes.at(place)
        # The middle of the widest gap between known sizes.
        ends = sorted({0.0, 1.0, *(self._sizes.place(sample.size_bytes) for sample in self._told)})
        left, right = max(pairwise(ends), key=lambda gap: gap[1] - gap[0])
        return self._sizes.at((left + right) / 2)

    def tell(self, size_bytes: int, seconds: float) -> None:
        self._told.append(Sample(size_bytes=size_bytes, seconds=seconds))
        # Relative to the first sample, so that XI means the same for any model; the library maximises.
        target = -seconds / self._told[0].seconds
        self._process.register(params=self._points[-1], target=target)

    @property
    def best(self) -> Sample:
        expected = np.asarray(self._process.predict(self._points))
        return self._told[int(expected.argmax())]

    @property
    def _points(self) -> list[dict[str, float]]:
        """The samples' places. The library takes no point twice, so each is moved by a tiny distance."""
        return [
            {"place": self._sizes.place(sample.size_bytes) + APART * number}
            for number, sample in enumerate(self._told)
        ]


def build_tuner(name: TunerName, *, start_bytes: int, sizes: SizeRange, samples: int, seed: int = 0) -> Tuner:
    """Return the tuner of this name.

    The same seed and times give the same sizes.

    Args:
        start_bytes: The first size, which should be the one that the simulator finds best.
        sizes: The range from which the other sizes are taken.
        samples: The number of sizes that it will be asked for, also in a grid.
    """
    if name == "bayesian":
        return BayesianTuner(start_bytes, sizes, seed)
    rest = samples - 1
    if name == "grid":
        places = [(i + 0.5) / rest for i in range(rest)]
    else:
        generator = random.Random(seed)
        places = [generator.random() for _ in range(rest)]
    return FixedSizes([sizes.clamp(start_bytes), *map(sizes.at, places)])
