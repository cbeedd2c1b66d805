"""Covers: _trace/reach.py: hooks of modules, parameters and optimizers, in a jitted step."""

import pytest
import torch
from _cases import Cases
from torch import nn
from torch.nn.modules import module as modules

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

CASES = Cases()
STORING = {
    "backward": lambda model, _, keep: model[0].register_full_backward_hook(
        lambda module, given, cotangents: keep(cotangents[0])
    ),
    "backward_pre": lambda model, _, keep: model[0].register_full_backward_pre_hook(
        lambda module, cotangents: keep(cotangents[0])
    ),
    "parameter": lambda model, _, keep: model[0].weight.register_hook(keep),
    "accumulated": lambda model, _, keep: model[0].weight.register_post_accumulate_grad_hook(
        lambda weight: keep(weight.grad)
    ),
    "step_pre": lambda model, optimizer, keep: optimizer.register_step_pre_hook(
        lambda *_: keep(model[0].weight.grad)
    ),
    "step_post": lambda model, optimizer, keep: optimizer.register_step_post_hook(
        lambda *_: keep(model[0].weight.detach())
    ),
}
CHANGING = {
    "backward": lambda model: model[1].register_full_backward_hook(
        lambda module, given, cotangents: (given[0] * 2,)
    ),
    "backward_pre": lambda model: model[1].register_full_backward_pre_hook(
        lambda module, cotangents: (cotangents[0] * 2,)
    ),
}
OF_ALL = {
    "forward_pre": lambda: modules.register_module_forward_pre_hook(lambda _, xs: (xs[0] * 2,)),
    "forward": lambda: modules.register_module_forward_hook(lambda module, xs, y: y * 2),
    "backward_pre": lambda: modules.register_module_full_backward_pre_hook(
        lambda module, cotangents: (cotangents[0] * 2,)
    ),
    "backward": lambda: modules.register_module_full_backward_hook(
        lambda module, given, cotangents: (None if given[0] is None else given[0] * 2,)
    ),
}


def program(on):
    model = on.model(nn.Linear(8, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return model, optimizer, on.step(model, optimizer)


def storing(register):
    def run(on):
        model, optimizer, step = program(on)
        log, found = {}, []
        register(model, optimizer, lambda x: log.update(norm=x.norm()))
        for x in on.rows(3):
            found += [step(x), log["norm"]]
        return [*found, *model.parameters()]

    return run


def added_later(register):
    def run(on):
        model, _, step = program(on)
        first, *others = on.rows(3)
        found = [step(first)]
        register(model)
        return [*found, *map(step, others), *model.parameters()]

    return run


def of_all_modules(register):
    def run(on):
        model, _, step = program(on)
        first, second, last = on.rows(3)
        found = [step(first)]
        handle = register()
        found.append(step(second))
        handle.remove()
        return [*found, step(last), *model.parameters()]

    return run


for maker, hooks in ((storing, STORING), (added_later, CHANGING), (of_all_modules, OF_ALL)):
    for name, register in hooks.items():
        run = maker(register)
        run.__name__ = f"{maker.__name__}-{name}"
        CASES.add(2)(run)

test_as_in_plain_torch = CASES.tests()
