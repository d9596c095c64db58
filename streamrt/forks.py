"""What a forked child renews.

A fork copies the memory and one thread.  A lock that another thread held stays held for ever, and a table of threads
lists some that are not there.  So whoever has such a thing in the process's state says how it is made anew.  Devices
are another matter: CUDA does not work in a forked child of a process that has used it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

generation = 0
"""How many forks lie between this process and the first one that loaded this module: what was made in another
generation is the parent's."""
_renewed: list[tuple[weakref.ref[object], str, Callable[[], object]]] = []


def renew(owner: object, **makers: Callable[[], object]) -> None:
    """Sets attributes of `owner` (a module, or an object as long as it lives) anew in a forked child.

    Does not touch the device.
    """
    gone = _forget if not hasattr(owner, "__file__") else None
    for name, make in makers.items():
        _renewed.append((weakref.ref(owner, gone), name, make))


def _forget(reference: weakref.ref[object]) -> None:
    for entry in [entry for entry in _renewed if entry[0] is reference]:
        _renewed.remove(entry)


def _renew_all() -> None:
    global generation
    generation += 1
    for reference, name, make in list(_renewed):
        owner = reference()
        if owner is not None:
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew_all)
