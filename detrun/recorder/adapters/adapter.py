"""What an adapter may tell the recorder, and how it gets at a framework's inside.

A framework changes under its adapter. So everything that an adapter relies on goes through `wrap`, `needs` or `takes`:
what is not there is written down (`recorder/rank<r>.json`), and forbids the verdict "identical".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from detrun.recorder import live, pacing, state, tracking
from detrun.recorder.draft import EACH
from detrun.recorder.hooks import replace_everywhere
from detrun.recorder.progress import AdapterFacts

if TYPE_CHECKING:
    from torch import nn

    from detrun.recorder.components import Piece
    from detrun.recorder.observer import Observer
    from detrun.recorder.session import Session

Kind = Literal["training", "derived"]
"""derived: bookkeeping that may restart on resume, such as a cumulative rate. It is recorded and never an alarm."""

_SOURCES: Mapping[str, str] = {"training": "adapter", "derived": "derived"}


class Adapter:
    """One framework's in this process. Nothing that an adapter calls here raises into the program.

    name: the framework's. tried: the versions that the adapter was tried on.
    """

    def __init__(self, name: str, tried: Sequence[str], session: Session, observer: Observer) -> None:
        self.name = name
        self.session = session
        self.observer = observer
        self._facts = AdapterFacts(name, list(tried))
        session.cost.adapters.append(self._facts)

    # The framework's inside

    def version(self, text: object) -> None:
        """The framework's version as found."""
        self._facts.version = str(text)

    def lacks(self, what: str) -> None:
        """Something that the adapter relies on is not there: the run is not verified, and says so with these words."""
        if what not in self._facts.lacks:
            self._facts.lacks.append(what)
            self.session.when_claimed(self.session.write_cost)

    def failed(self, where: str, error: BaseException) -> None:
        """The adapter's own code raised: what it would have recorded is missing."""
        what = f"what it expected {where} ({type(error).__name__}: {error})"
        self.lacks(what)

    def needs(self, owner: Any, path: str) -> Any:
        """The attribute `path` (dotted) of a module or class, or None where it is not there, which is a lack."""
        found = owner
        for part in path.split("."):
            if not hasattr(found, part):
                self.lacks(f"{_name_of(owner)}.{path}")
                return None
            found = getattr(found, part)
        return found

    def takes(self, function: object, *parameters: str) -> bool:
        """Whether a function of the framework's has these parameters; each that it has not is a lack."""
        try:
            known = inspect.signature(function).parameters  # type: ignore[arg-type]
        except (TypeError, ValueError):
            self.lacks(f"the parameters of {_name_of(function)}")
            return False
        absent = [name for name in parameters if name not in known]
        for name in absent:
            self.lacks(f"parameter {name} of {_name_of(function)}")
        return not absent

    def wrap(self, owner: Any, path: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Replace the function `path` (dotted) of a module or class by `around(function)`, also in every module that
        imported it by name. False, and a lack, where it is not there."""
        original = self.needs(owner, path)
        if original is None:
            return False
        if not callable(original):
            self.lacks(f"a function {_name_of(owner)}.{path}")
            return False
        before, _, name = path.rpartition(".")
        holder = functools.reduce(getattr, before.split("."), owner) if before else owner
        static = inspect.getattr_static(holder, name)
        made = around(original)
        functools.update_wrapper(made, original)
        if isinstance(static, (staticmethod, classmethod)):
            setattr(holder, name, staticmethod(made))
            return True
        setattr(holder, name, made)
        if not isinstance(holder, type):
            replace_everywhere(name, original, made)
        return True

    def run(self, event: Callable[..., None], *args: Any) -> None:
        """Call a part of the adapter from inside the program: what it raises counts as a lack, its time is charged."""

        def guarded() -> None:
            try:
                event(*args)
            except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
                self.failed(f"in {getattr(event, '__name__', event)}", error)

        self.session.run(guarded)

    # Metrics

    def metric(self, name: str, value: object, kind: Kind = "training") -> None:
        """A metric of the step that is going on, or else has just ended. value: a number or a tensor of one element,
        which is read later and without waiting for its device."""
        self.session.tell(name, value, _SOURCES[kind])

    def microbatch_metric(self, name: str, value: object) -> None:
        """A metric of the micro-batch that is going on. Of several in a step each is there as `name[i]`, and their mean
        as `name`, as of a loss."""
        self.session.tell(name, value, EACH)

    def batch_of(self, given: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]) -> None:
        """given: takes a root module and the arguments that it is called with, and returns those that are data."""
        self.observer.batch_of.append(given)

    def outputs(self, event: Callable[[Any], None]) -> None:
        """event: called with what each root module returned in training mode."""

        def ended(_root: object, result: Any) -> None:
            self.run(event, result)

        self.observer.when_forward_ended.append(ended)

    def clipping(self, original: Callable[[], Any], parameters: Sequence[Tensor]) -> Any:
        """Call a framework's own clipping of these parameters' gradients, which returns their norm: it counts as one of
        torch's, whether it goes through that or not."""
        observer, session = self.observer, self.session
        session.run(observer.clip_begins, parameters)
        seen = len(session.draft.clip_norms)
        norm = original()
        if len(session.draft.clip_norms) == seen:
            session.run(observer.clip_ends, norm)
        return norm

    def tells(self, *names: str) -> None:
        """The adapter gives these (`loss`, `grad_norm`) in every step: the recorder need not find its own."""
        self.session.told_by_adapter.update(names)

    # Steps

    def paces(self) -> None:
        """From here on a step ends where the adapter says so, and not where torch's optimizers have stepped. To be told
        when the framework's own loop begins its first step."""
        self.session.paced = True

    def step_begins(self, number: int | None = None) -> None:
        """The framework's loop begins a step. number: its own, 1 for the first step ever."""
        self.session.run(pacing.step_begins, self.observer, number)

    def step_ends(self, number: int | None = None, *, skipped: bool = False) -> None:
        """It ends. skipped: an overflow was found and no optimizer stepped. Where a planned interruption is due, the
        process ends here."""
        self.session.run(pacing.step_ends, self.observer, number, skipped)
        self.session.interrupt_closed()

    def continues(self, done: int) -> None:
        """The framework says how many steps were taken before this process's first one, whose number that settles."""
        self.session.run(pacing.continues, self.observer, done)

    @contextmanager
    def backward(self, tensors: Tensor | Sequence[Tensor] | None) -> Iterator[None]:
        """A backward pass that does not go through `torch.autograd.backward`; what it starts from, if it is one number,
        is a loss."""
        with self.observer.backward_by_hand(tensors):
            yield

    # What this rank is, and what else it holds

    def coordinates(self, **places: int) -> None:
        """Where this rank stands: pp, tp, cp, dp, ep. Before the first step ends. A metric that no rank of a pipeline
        stage has is that stage's nature, as long as another stage has it."""
        self.session.told_coordinates.update(places)

    def replicas(self, ranks: Sequence[int]) -> None:
        """The global ranks, this one among them, that hold the same parameters as this one after every step."""
        self.session.told_replicas = sorted(int(rank) for rank in ranks)

    def names(self, function: Callable[[], Mapping[int, str | Sequence[Piece]]]) -> None:
        """function: gives, by id, names of tensors that an optimizer holds and no module has (master copies, shards);
        of a flat tensor with parts of several parameters, (name, first element, elements) of each, and every part has a
        row of its own. Called at each boundary."""
        self.observer.capture.namers.append(function)

    def stream(self, name: str, read: Callable[[], Any]) -> None:
        """A named random number stream. read: gives its state (uint8, on the host), a torch.Generator, or None where it
        does not exist yet. In every step's digest, and a row at each boundary."""
        self.session.streams.add(name, read)

    def track(self, name: str, thing: object) -> None:
        """More state, as `detrun.track` takes it: captured at each boundary, and a difference of it counts."""
        tracking.track(name, thing)

    def unread_buffer(self, module: nn.Module, name: str) -> None:
        """A buffer that the framework writes to and never reads: it only explains."""
        known = state.UNCOMPARED_BUFFERS.get(module, frozenset())
        state.UNCOMPARED_BUFFERS[module] = known | {name}

    def uncompared(self, kind: type, *attributes: str) -> None:
        """Attributes of the framework's objects that are no state (counters to be shown, timers): they only explain.
        One that is called otherwise in another version is compared, as any attribute is."""
        live.UNCOMPARED[kind] = live.UNCOMPARED.get(kind, frozenset()).union(attributes)

    def saves(self) -> None:
        """A save begins that goes through none of torch's own and of safetensors' functions."""
        self.session.run(self.observer.save_begins)

    @contextmanager
    def saving(self, path: str | None) -> Iterator[None]:
        """The same, with its place (absolute, None where that is not known) and its end: it is complete when this ends
        without an error."""
        with self.observer.during_save(path, self.name):
            yield

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A restore: what happens inside is no forward pass and no step."""
        self.observer.restoring += 1
        try:
            yield
        finally:
            self.observer.restoring -= 1


def _name_of(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__name__
    return f"{module}.{name}" if module and module != name else str(name)
