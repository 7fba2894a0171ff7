"""What in a process is the program's own, and what belongs to Python, to torch or to another library.

A library is told by where its code lies and by a list of names; a trainer that is installed as a package is a program.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import ModuleType

_TORCH = """torch torchgen functorch triton numpy sympy mpmath networkx jinja2 filelock fsspec typing_extensions"""
_VALUES = """scipy pandas pyarrow sklearn h5py PIL matplotlib yaml omegaconf hydra psutil xxhash"""
_WATCHERS = """tqdm rich tensorboard wandb mlflow absl google submitit IPython ipykernel pytest _pytest pluggy
    execnet xdist hypothesis setuptools pkg_resources pip debugpy sitecustomize usercustomize"""

LIBRARIES = frozenset(word for words in (_TORCH, _VALUES, _WATCHERS) for word in words.split())
"""Packages whose frames and objects are not walked. Whatever else is installed counts as a part of the program."""

_OWN = """recorder fingerprint determinism records rng errors recipe checkpoints compare launch diagnose report
    experiments cli"""
_OWN_PARTS = frozenset(_OWN.split())
"""Parts of detrun that are no training program, whether they run inside its process or happen to be imported there."""

FEEDS = ("torch.utils.data", "torchdata")
"""Libraries whose objects are walked all the same: where a program is in its data."""


@lru_cache(maxsize=4096)
def is_program_file(filename: str) -> bool:
    """Is the code of this file the program's? What was typed in or made from a string is."""
    if filename.startswith("<"):
        return not filename.startswith("<frozen")
    parts = os.path.abspath(filename).split(os.sep)  # noqa: PTH100, PTH206 - text, for every frame
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            inside = parts[parts.index(root) + 1 :]
            return not _is_library(".".join(inside).removesuffix(".py"))
    if any(filename.startswith(folder) for folder in _stdlib()):
        return False
    return not any(filename.startswith(folder) for folder in _library_folders())


def is_program_type(kind: type) -> bool:
    """Was this class made by the program?"""
    name = kind.__module__
    return not isinstance(name, str) or not _is_library(name)


def is_feed_type(kind: type) -> bool:
    """Is it one of torch's own data loaders, samplers, datasets or their iterators?"""
    name = kind.__module__
    return isinstance(name, str) and name.startswith(FEEDS)


def program_modules() -> list[tuple[str, ModuleType]]:
    """The modules that are the program's, `__main__` first, by name."""
    found = []
    for name, module in sorted(sys.modules.items(), key=lambda item: (item[0] != "__main__", item[0])):
        if type(module) is not ModuleType or _is_library(name) or name == "__mp_main__":  # another name of __main__
            continue
        filename = module.__dict__.get("__file__")
        if isinstance(filename, str) and is_program_file(filename) and not _is_installed(filename):
            found.append((name, module))
    return found


@lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    root, _, rest = name.partition(".")
    if root == "detrun":
        return rest == "" or rest.partition(".")[0] in _OWN_PARTS
    return root in LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


def _is_installed(filename: str) -> bool:
    """An installed package may be a program's trainer, but its many modules' globals are its constants."""
    return "site-packages" in filename or "dist-packages" in filename


@lru_cache(maxsize=1)
def _stdlib() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.join(paths[key], "") for key in ("stdlib", "platstdlib")})  # noqa: PTH118


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """Where libraries lie that are not in a folder for installed packages: detrun's own parts, a torch built in
    place."""
    folders = []
    for name in LIBRARIES:
        origin = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(origin, str) and os.path.basename(origin).startswith("__init__"):  # noqa: PTH119
            folders.append(os.path.join(os.path.dirname(origin), ""))  # noqa: PTH118, PTH120
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    folders += [os.path.join(own, part) for part in _OWN_PARTS]  # noqa: PTH118
    folders.append(os.path.join(own, "__init__"))  # noqa: PTH118
    return tuple(folders)
