"""Recognises tensors that go with the parameters of a model one by one: averages of them, a teacher's, and what a
hand-written optimizer keeps for each. They share names or shapes with the parameters and no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Size, Tensor, nn

from detrun.recorder import reach

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What wrapping a module puts in front of its parameters' names."""

_MODEL_KEYS = frozenset(["model", "model_state_dict", "state_dict", "net", "network", "module", "weights", "params"])
"""Keys under which checkpoints hold the weights."""

Pairs = list[tuple[str, Tensor]]


class _Model:
    """shapes: of every parameter and buffer by its bare name. order: the parameters; trained: those that are."""

    def __init__(self, prefix: str, root: nn.Module) -> None:
        self.shapes: dict[str, Size] = {}
        self.order: Pairs = []
        for name, tensor in module_tensors(root):
            self.shapes[_bare(name)] = tensor.shape
            if isinstance(tensor, nn.Parameter):
                self.order.append((f"{prefix}.{name}" if prefix else name, tensor))
        self.trained = [(name, tensor) for name, tensor in self.order if tensor.requires_grad]
        self.elements = {sum(t.numel() for _, t in pairs) for pairs in (self.order, self.trained)} - {0}

    def goes_with(self, pairs: Sequence[tuple[str, Tensor]]) -> bool:
        """Do these names and shapes belong to this model, and at least half of what it trains?"""
        known = sum(self.shapes.get(_bare(name)) == tensor.shape for name, tensor in pairs)
        return known == len(pairs) and 2 * known >= len(self.trained)


class Models:
    """The root modules of a program.

    names_of: the full name of each of their parameters, by the parameter's id.
    """

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._models = [_Model(prefix, root) for prefix, root in roots]
        self._roots = {id(part) for _, root in roots for _, part in submodules(root)}
        self.names_of = {id(tensor): name for model in self._models for name, tensor in model.order}
        self._memory = {
            address
            for _, root in roots
            for _, tensor in module_tensors(root)
            for held in (tensor, tensor.grad if tensor.is_leaf else None)
            if held is not None and (address := _address(held))
        }

    def is_root(self, module: nn.Module) -> bool:
        """Is it a root, or a part of one?"""
        return id(module) in self._roots

    def shares_memory(self, tensor: Tensor) -> bool:
        """With a parameter, a buffer or a gradient of a root?"""
        return _address(tensor) in self._memory

    def is_flat_copy(self, tensor: Tensor) -> bool:
        """One vector with as many elements as a model has parameters?"""
        return tensor.dim() == 1 and any(tensor.numel() in model.elements for model in self._models)

    def copy_in(self, container: Any, kind: type) -> Pairs | None:
        """The (parameter's name, tensor) pairs of a dict by parameter or by name, or of a list in the parameters'
        order; None if it is something else."""
        if issubclass(kind, dict):
            return self._copy_in_dict(container)
        if not issubclass(kind, (list, tuple)):
            return None
        for model in self._models:
            for pairs in (model.trained, model.order):
                if len(pairs) == reach.size(container, kind) > 1:
                    tensors = [value for _, value in reach.members(container, kind, {})]
                    matches = [
                        issubclass(type(tensor), Tensor) and tensor.shape == parameter.shape
                        for tensor, (_, parameter) in zip(tensors, pairs, strict=False)
                    ]
                    if len(tensors) == len(pairs) and all(matches):
                        return [(name, tensor) for tensor, (name, _) in zip(tensors, pairs, strict=True)]
        return None

    def _copy_in_dict(self, container: dict[Any, Any]) -> Pairs | None:
        pairs: Pairs = []
        for key, value in dict.items(container):
            if not issubclass(type(value), Tensor):
                return None
            name = key if type(key) is str else self.names_of.get(key if type(key) is int else id(key))
            if name is None:
                return None
            pairs.append((name, value))
        named = [(self._without_prefix(name), tensor) for name, tensor in pairs]
        fits = bool(pairs) and any(model.goes_with(pairs) or model.goes_with(named) for model in self._models)
        return pairs if fits else None

    def is_checkpoint(self, container: dict[Any, Any]) -> bool:
        """Was it made to be saved, or loaded: does it hold a model's weights by one of the usual keys?"""
        held = [value for key, value in dict.items(container) if type(key) is str and key in _MODEL_KEYS]
        return any(issubclass(type(value), dict) and self._copy_in_dict(value) is not None for value in held)

    def copy_of_module(self, module: nn.Module) -> Pairs | None:
        """The tensors of a module that has a root's parameters, perhaps beside some of its own; None if it has not."""
        pairs = list(module_tensors(module))
        trained = [(name, tensor) for name, tensor in pairs if isinstance(tensor, nn.Parameter)]
        return pairs if trained and any(model.goes_with(trained) for model in self._models) else None

    def _without_prefix(self, name: str) -> str:
        return name.split(".", 1)[1] if "." in name else name


def holds_optimizer_state(container: dict[Any, Any]) -> bool:
    """Is it an optimizer's state dict, or a checkpoint with one?"""
    own = [container, *(value for value in dict.values(container) if issubclass(type(value), dict))]
    return any(dict.__contains__(each, "param_groups") and dict.__contains__(each, "state") for each in own)


def submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and all inside it, by dotted name, each once; reads nothing but instance dictionaries."""
    stack: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = reach.instance_dict(module).get("_modules")
        children = list(inner.items()) if isinstance(inner, dict) else []
        stack += [
            (f"{path}.{name}" if path else name, child) for name, child in reversed(children) if child is not None
        ]


def module_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with their dotted names, each once."""
    seen: set[int] = set()
    for path, module in submodules(root):
        own = reach.instance_dict(module)
        for held in (own.get("_parameters"), own.get("_buffers")):
            for name, tensor in list(held.items()) if isinstance(held, dict) else ():
                if issubclass(type(tensor), Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{name}" if path else name, tensor


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _address(tensor: Tensor) -> int:
    """Where its memory begins; 0 if it has none, or has given it back for a while."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
