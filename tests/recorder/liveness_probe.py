"""Programs that note which of their variables are live at a call, run by `test_liveness.py` in this Python and in
others. Prints what they noted as JSON. Needs nothing but the module that is tested, whose folder is the argument."""

# ruff: noqa - what looks superfluous here is what is looked at

from __future__ import annotations

import json
import sys

sys.path.insert(0, sys.argv[1])
import liveness  # by its folder: other Pythons have no torch, which its package may import

noted: dict[str, list[str]] = {}


def look(name):
    noted[name] = sorted(liveness.live_variables(sys._getframe(1)))


def training():
    seed, average, velocity, batch, loss, unused = 1, 0, [1], 0, 0, 4
    for step in range(2):
        batch = step
        target = batch + 1
        look("forward")
        loss = target
        average = average + loss
        if step == 1:
            velocity[0] = 3
    look("after the loop")
    return seed


def handlers():
    kept, other, result = 1, 2, 0
    try:
        look("in a try")
        result = other = 4
    except ValueError:
        print(kept)
    finally:
        look("in a finally")
        result += 1
    return other


def with_block():
    first, second = 1, 2
    with open(__file__) as file:
        look("in a with")
        second = first
    look("after a with")
    return second, file.closed


def deleted():
    name = 1
    del name
    look("deleted")
    name = 2
    return name


def comprehension():
    total = 0
    for _ in range(2):
        item = 3
        look("before a comprehension")
        total += sum([item for item in (1, 2)])
        item = total
    return total


def swapped():
    one, two, three = 1, 2, 3
    look("before a swap")
    one, two = two, one
    three = one
    return one + two + three


def closure():
    shared = hidden = 1

    def reads():
        return shared

    look("with a closure")
    hidden = 2
    return reads, hidden


def branches(flag):
    one, two, three = 1, 2, 3
    look("before a branch")
    if flag:
        three = one
    else:
        one = two
    return three


def suspended():
    step, epoch, fixed, used = 0, 0, 7, 1
    while True:
        used = fixed
        yield used
        step += 1
        used = step
        epoch = used
        fixed = epoch


training()
handlers()
with_block()
deleted()
comprehension()
swapped()
closure()
branches(True)

generator = suspended()
noted["not begun"] = sorted(liveness.live_variables(generator.gi_frame))
next(generator)
noted["suspended"] = sorted(liveness.live_variables(generator.gi_frame))

module_average, module_step, module_unread = 0, 0, 0


def reads_a_global():
    return read_by_function


read_by_function = 1
for module_step in range(2):
    look("in a module")
    module_average = module_average + module_step
    module_unread = 1
print(json.dumps(noted))
