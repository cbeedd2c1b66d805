"""Covers: optim/_checks.py: what is no optimizer, no parameter, no gradient or no state of one."""

import re

import pytest
import torch

import torchpmap as tp


class HidesState(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.state["total"] = {"k": 1}
        super().step()


PARAMS = {"a": torch.ones(2), "b": [torch.ones(3)]}
SGD = tp.optim.functional(torch.optim.SGD, lr=0.1)
ADAM = tp.optim.functional(torch.optim.Adam)
MOMENTUM = tp.optim.functional(torch.optim.SGD, momentum=0.9)
DAMPENED = tp.optim.functional(torch.optim.SGD, momentum=0.9, dampening=0.5)
STATE = SGD.init(PARAMS)
ONES = {"w": torch.ones(2)}
NOT_FLOAT = "only floating-point and complex tensors can be optimized"

MISUSE = {
    "lbfgs": (lambda: tp.optim.functional(torch.optim.LBFGS), TypeError,
        "LBFGS.step() calls the loss itself, so it is no function of gradients"),
    "lbfgs-made": (
        lambda: tp.optim.functional(lambda p: torch.optim.LBFGS([p])).init(torch.ones(2)),
        TypeError, "LBFGS.step() calls the loss itself"),
    "sparse-adam": (lambda: tp.optim.functional(torch.optim.SparseAdam), TypeError,
        "SparseAdam takes sparse gradients only, and mapped functions work on dense tensors. Use"),
    "instance": (
        lambda: tp.optim.functional(torch.optim.SGD([torch.ones(1)])),
        TypeError,
        "or a function from the tree of parameters to an optimizer, but got an object of type SGD.",
    ),
    "other-class": (lambda: tp.optim.functional(dict), TypeError,
        "optim.functional needs a torch.optim.Optimizer, but got dict."),
    "function-of-other-class": (lambda: tp.optim.functional(lambda params: None).init(PARAMS),
        TypeError, "optim.functional needs a torch.optim.Optimizer, but got NoneType."),
    "foreign-parameter": (
        lambda: tp.optim.functional(lambda p: torch.optim.SGD([torch.ones(1)])).init(PARAMS),
        ValueError,
        "SGD was given a parameter that is not in the tree passed to init or update. Use the"),
    "integers": (lambda: SGD.init({"n": [torch.ones(2, dtype=torch.int64)]}), TypeError,
        f"params['n'][0] is int64[2]: {NOT_FLOAT}. Keep it out of params, or put None"),
    "number": (
        lambda: SGD.init({"n": 1.0}), TypeError, f"params['n'] is of type float: {NOT_FLOAT}"),
    "missing-grad": (lambda: SGD.update({"a": torch.ones(2)}, STATE, PARAMS), ValueError,
        "grads is dict with ['a'], but params has a dict with ['a', 'b'] there. grads must have"),
    "other-container": (
        lambda: SGD.update({"a": torch.ones(2), "b": (torch.ones(3),)}, STATE, PARAMS), ValueError,
        "grads['b'] is tuple with [0], but params has a list with [0] there."),
    "leaf-for-container": (
        lambda: SGD.update({"a": torch.ones(2), "b": torch.ones(3)}, STATE, PARAMS), ValueError,
        "grads['b'] is float32[3], but params has a list with [0] there."),
    "grad-shape": (lambda: SGD.update({"a": torch.ones(2), "b": [torch.ones(4)]}, STATE, PARAMS),
        ValueError, "grads['b'][0] is float32[4], but the parameter is float32[3]."),
    "grad-dtype": (lambda: SGD.update({"a": torch.ones(2).double(), "b": [None]}, STATE, PARAMS),
        ValueError, "grads['a'] is float64[2], but the parameter is float32[2]."),
    "grad-type": (lambda: SGD.update({"a": 1, "b": [None]}, STATE, PARAMS), TypeError,
        "grads['a'] is of type int, expected a tensor, or None to skip it."),
    "grad-of-none": (
        lambda: SGD.update([torch.ones(2), torch.ones(2)], [{}, None], [torch.ones(2), None]),
        TypeError, "grads[1] is float32[2], expected None, as in params."),
    "grad-sparse": (
        lambda: SGD.update({"a": torch.ones(2).to_sparse(), "b": [None]}, STATE, PARAMS), TypeError,
        "grads['a'] is sparse, expected a dense tensor: grads['a'].to_dense()."),
    "order": (lambda: SGD.update(PARAMS, PARAMS, PARAMS), TypeError,
        "state['a'] is float32[2], expected the dict of one parameter's state. The order of "
        "arguments is update(grads, state, params)"),
    "state-structure": (lambda: SGD.update(PARAMS, {"a": {}}, PARAMS), ValueError,
        "state is dict with ['a'], but params has a dict with ['a', 'b'] there. state must have"),
    "state-of-another": (
        lambda: ADAM.update(PARAMS, MOMENTUM.init(PARAMS), PARAMS), ValueError,
        "Adam.step() found no 'exp_avg' in the state. Pass a state that came from init or update"),
    "hyperparameter": (lambda: SGD.update(PARAMS, STATE, PARAMS, betas=(0.1, 0.2)), TypeError,
        "update got an unexpected hyperparameter 'betas': SGD has dampening, lr, maximize, "),
    "switch": (lambda: SGD.update(PARAMS, STATE, PARAMS, foreach=True), TypeError,
        "update got an unexpected hyperparameter 'foreach'"),
    "groups": (lambda: SGD.update(PARAMS, STATE, PARAMS, lr=[0.1, 0.2]), ValueError,
        "update got 2 values of lr, but SGD has 1 parameter groups: pass one value, or a list"),
    "hidden-state": (lambda: tp.optim.functional(HidesState, lr=0.1).update(PARAMS, STATE, PARAMS),
        TypeError,
        "HidesState.step() writes state['total'], param_groups[0]['k'], which belongs to no "
        "parameter and would be lost."),
    "accumulate-class": (lambda: tp.optim.accumulate(torch.optim.SGD, 2), TypeError,
        "optim.accumulate takes what torchpmap.optim.functional returns, but got an object of type "
        "type."),
    "accumulate-every": (lambda: tp.optim.accumulate(SGD, 0), ValueError,
        "optim.accumulate: every must be an int of at least 1, not 0."),
    "accumulate-state": (
        lambda: tp.optim.accumulate(SGD, 2).update(ONES, SGD.init(ONES), ONES), ValueError,
        "state['w'] has no 'accumulated_calls'. Pass a state that came from init or update of"),
    "accumulate-shape": (lambda: tp.optim.accumulate(SGD, 2).update(
        {"w": torch.ones(3)}, tp.optim.accumulate(SGD, 2).init(ONES), ONES), ValueError,
        "grads['w'] is float32[3], but the parameter is float32[2]."),
    "accumulate-first-step": (lambda: tp.optim.accumulate(DAMPENED, 2).update(
        ONES, tp.optim.accumulate(DAMPENED, 2).init(ONES), ONES), TypeError,
        "makes momentum_buffer in its first step, so it cannot accumulate. Accumulate the"),
}  # fmt: skip


@pytest.mark.parametrize(("misuse", "error", "text"), MISUSE.values(), ids=MISUSE)
def test_misuse(misuse, error, text):
    with pytest.raises(error, match=re.escape(text)):
        misuse()
    assert not torch.compiler.is_compiling()
