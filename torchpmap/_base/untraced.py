"""Code that ``torch.compile`` leaves alone."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import TypeVar

import torch

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Mark the methods of a class: in a function that ``torch.compile`` compiles they run as they
    are, with all that they call.

    Dynamo (torch 2.13) runs an operation on a tensor of a class that it does not know as Python
    does, but takes the methods behind it for code to compile.  ``torch.compiler.disable`` says the
    same as the mark, at the price of importing Dynamo and of a microsecond in every call.
    """
    for value in vars(cls).values():
        for function in (getattr(value, "__func__", value), *_accessors(value)):
            if isinstance(function, FunctionType):
                _skip(function.__code__)
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cls


def _accessors(value: object) -> tuple[object, ...]:
    return (value.fget, value.fset) if isinstance(value, property) else ()


def _skip(code: CodeType) -> None:
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
