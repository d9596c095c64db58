"""What a run of the demo consists of: the stages, who runs them, and on which frames."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrt.device import backend_of, default_device_kind
from streamrt.errors import ArrayError, ExhaustedError, PlacementError, UnavailableError
from transport.demo import photographs

MODULES = {
    "numpy": "transport.demo.numpy_stages",
    "cupy": "transport.demo.numpy_stages",
    "torch": "transport.demo.torch_stages",
    "jax": "transport.demo.jax_stages",
}
FUNCTIONS = ("denoise", "filter_bank", "finish")
TITLES = ("denoise", "filter bank", "tone and corners")
VICTIM = 1
"""The step whose worker `--kill` kills: its neighbours hold frames, too."""
BEFORE_KILL = 4
"""One part in so many of the frames is delivered before the kill."""
MEGAPIXELS = {"host": 4.0, "cuda": 24.0}
"""Sizes at which the transfer is a good part of a stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of the demo."""

    title: str
    library: str
    device: str
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the command line says, resolved."""

    steps: tuple[Step, ...]
    kind: str
    frames: int
    in_flight: int
    megapixels: float
    output: Path
    kill: bool = False

    @property
    def kill_at(self) -> int:
        """The frame after whose delivery `--kill` kills.  Does not touch the device."""
        return self.frames // BEFORE_KILL

    @property
    def libraries(self) -> str:
        """The libraries of the steps, as `--stages` takes them.  Does not touch the device."""
        return ",".join(step.library for step in self.steps)

    @property
    def command(self) -> str:
        """The command line that does the same again.  Does not touch the device."""
        act = "--kill" if self.kill else f"--output {self.output}"
        return (
            f"streamrt demo --device {self.kind} --frames {self.frames} --stages {self.libraries}"
            f" --in-flight {self.in_flight} --megapixels {self.megapixels:g} {act}"
        )


def make_plan(
    device: str,
    frames: int,
    stages: str | None,
    in_flight: int,
    megapixels: float | None,
    output: Path,
    kill: bool = False,
) -> Plan:
    """Checks and resolves the command line's values.  Does not block the host.

    Raises `PlacementError` for a device, `ArrayError` for a library, `UnavailableError` for one that is not installed,
    `ExhaustedError` where no frame would be left to follow a kill.
    """
    photographs.check_installed()
    if kill and frames < (least := frames_for_a_kill(in_flight)):
        raise ExhaustedError(
            f"--kill with --frames {frames} and --in-flight {in_flight}: all frames after the kill could be lost with "
            f"their worker, and none would show that the next one works; use --frames {least} or more"
            + (", or a smaller --in-flight" if in_flight > 1 else "")
        )
    if device not in ("auto", "host", "cpu", "cuda"):
        raise PlacementError(f"--device {device!r}: use auto, host (or cpu) or cuda")
    kind = default_device_kind() if device == "auto" else "host" if device == "cpu" else device
    libraries = (stages or ",".join(["cupy" if kind == "cuda" else "numpy"] * 3)).split(",")
    unknown = [library for library in libraries if library not in MODULES]
    if len(libraries) != 3 or unknown:
        fault = f"{unknown[0]!r} is none of them" if unknown else f"these are {len(libraries)}"
        raise ArrayError(
            f"--stages {stages!r}: name three libraries of {', '.join(MODULES)}, with commas between them; {fault}"
        )
    wrong = "numpy" if kind == "cuda" else "cupy"
    if wrong in libraries:
        raise ArrayError(f"--stages {stages!r}: {wrong} has no arrays on a {kind} device; use another library there")
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            extra = "cuda13" if library == "cupy" else library
            raise UnavailableError(
                f"the stages need {library}, which is not installed: pip install 'streamrt[{extra}]'"
                + (" (or cuda12), or name others with --stages" if library == "cupy" else "")
            )
    count = backend_of("cuda").device_count() if kind == "cuda" else len(libraries)
    if count == 0:
        raise UnavailableError("--device cuda: no GPU is visible here; use --device host")
    return Plan(
        tuple(
            Step(
                title, library, f"{kind}:{index % count}", getattr(importlib.import_module(MODULES[library]), function)
            )
            for index, (title, library, function) in enumerate(zip(TITLES, libraries, FUNCTIONS, strict=True))
        ),
        kind,
        frames,
        in_flight,
        MEGAPIXELS[kind] if megapixels is None else megapixels,
        output,
        kill,
    )


def frames_for_a_kill(in_flight: int) -> int:
    """The fewest frames of which one is left to come after a kill, however many are lost.

    When it is due, the middle worker may have let all frames in flight pass; those behind them are then lost with it.
    Does not touch the device.
    """
    return next(frames for frames in itertools.count(1) if frames - frames // BEFORE_KILL - 1 > 2 * in_flight)
