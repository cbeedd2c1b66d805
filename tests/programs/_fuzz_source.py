"""Programs of the fuzzer as Python source."""

import functools
from collections.abc import Callable, Sequence

from _fuzz_programs import (
    Blocks,
    Body,
    Derivative,
    Input,
    Local,
    Loop,
    Map,
    Program,
    Spec,
    Step,
    is_mesh,
)

MODULES = """
class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x):
        y = x * self.factor.to(x) + self.shift.to(x)
        return y if self.training else -y


MODULE = Scale()
"""
"""A module that programs close over: with a parameter, a buffer and a mode."""

MADE = """
def made(seed, shape, dtype, special=False):
    kind = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=kind)
    if special:
        for k, value in enumerate([float("inf"), float("nan"), 0.0, -float("inf")]):
            x.view(-1)[seed % 3 + 3 * k :: 13] = value
    if dtype == torch.bool:
        return x > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        x = (2 * x).round().abs() if dtype == torch.uint8 else (2 * x).round()
    return x.to(dtype)
"""
"""Small numbers: floats of a normal distribution, integers from about -6 to 6."""


def source(program: Program) -> str:
    """Python source of ``made``, ``inputs`` and ``program(*inputs)``.

    It names ``COMPILE``, a dict of options of every ``pmap`` and ``shard_map``.
    """
    inputs = "".join(f"    {value(given)},\n" for given in program.inputs)
    lines = _function("program", program.body, set(), give=_tuple)
    return f"{MODULES}\n{MADE}\n\ninputs = [\n{inputs}]\n\n\n" + "\n".join(lines) + "\n"


def standalone(program: Program, num_devices: int, options: str, inline: str = "") -> str:
    """A script that runs the program and prints what it gives."""
    around = f"with {inline}:\n    " if inline else ""
    return (
        "import torch\nimport torchpmap as tp\n\n"
        f"tp.init(num_devices={num_devices})\nCOMPILE = {options}\n\n{source(program)}"
        f"\n\n{around}print(program(*inputs))\n"
    )


def value(given: Input) -> str:
    """An input, in terms of ``made``."""
    dtype, shape = f"torch.{given.dtype}", given.shape
    match given.layout:
        case "transposed":
            order = tuple(reversed(range(len(shape))))
            return f"made({given.seed}, {shape[::-1]}, {dtype}).permute({order})"
        case "sliced":
            wide = (*shape[:-1], 2 * shape[-1] + 1)
            return f"made({given.seed}, {wide}, {dtype})[..., 1::2]"
        case "expanded":
            return f"made({given.seed}, {shape[1:]}, {dtype}).expand({shape})"
        case "special":
            return f"made({given.seed}, {shape}, {dtype}, special=True)"
    return f"made({given.seed}, {shape}, {dtype})"


def _function(
    name: str,
    body: Body,
    known: set[str],
    head: str = "",
    begin: tuple[str, ...] = (),
    give: Callable[[tuple[str, ...]], str] | None = None,
) -> list[str]:
    """``def name(...)``; ``known`` are functions that are there already."""
    known = set(known)
    lines = [*begin, *(line for step in body.steps for line in _statements(step, known))]
    return [
        f"def {name}({head or ', '.join(body.params)}):",
        *(f"    {line}" for line in lines),
        f"    return {(give or ', '.join)(body.results)}",
    ]


def _statements(step: Step, known: set[str]) -> list[str]:
    if isinstance(step, Map):
        return [*_mapped(step, known), f"{_tuple(step.outs)} = {_call(step)}"]
    if isinstance(step, Blocks):
        given, taken = _tuple(step.args), ""
        if step.form == "tree":
            given, taken = f"({_tree('arguments', step.args)})", "['results']"
        call = f"{step.name}_mapped{given}{taken}"
        return [*_blocks(step, known), f"{_tuple(step.outs)} = {call}"]
    if isinstance(step, Loop):
        return _loop(step, known)
    if isinstance(step, Derivative):
        return [*_function(step.name, step.body, known), *_derivative(step)]
    if isinstance(step, Local):
        code = step.code.format(*step.args)
        return [f"{', '.join(step.outs)} = {code}" if step.outs else code]
    given = [_tuple(step.args)] if len(step.args) > 1 else list(step.args)
    given += [repr(step.axes), *(f"{name}={value!r}" for name, value in step.options)]
    return [f"{', '.join(step.outs)} = tp.{step.name}({', '.join(given)})"]


# --- mapped functions -----------------------------------------------------------------------------


def _mapped(step: Map, known: set[str]) -> list[str]:
    """Lines that define ``{name}_mapped``."""
    if step.name in known:
        return []
    known.add(step.name)
    if is_mesh(step):
        inner = step.body.steps[0]
        assert isinstance(inner, Map)
        lines, function = _mapped(inner, known), f"{inner.name}_mapped"
    else:
        lines, function = _row_function(step, known), step.name
    options = [function]
    if step.axis is not None:
        options.append(f"axis_name={step.axis!r}")
    transform, dims = f"tp.{step.transform}", "axes"
    if step.form == "torch":
        transform, dims = "torch.func.vmap", "dims"
    options += [f"in_{dims}={_in_axes(step)}", f"out_{dims}={_out_axes(step)}"]
    if step.statics:
        first = len(step.args)
        places = tuple(range(first, first + len(step.statics)))
        options.append(f"static_broadcasted_argnums={places}")
    if step.transform == "pmap":
        options += ["**COMPILE", step.option][: 2 if step.option else 1]
    return [*lines, f"{step.name}_mapped = {transform}({', '.join(options)})"]


def _row_function(step: Map, known: set[str]) -> list[str]:
    body = step.body
    if step.form not in ("dict", "tree"):
        head = ", ".join((*body.params, *(name for name, _ in step.statics)))
        return _function(step.name, body, known, head, give=_tuple)
    values = "tree" if step.form == "tree" else "tree.values()"
    begin = (f"{_unpacking(step)} = {values}",)

    def give(names: tuple[str, ...]) -> str:
        pairs = ", ".join(f"'{name}': {name}" for name in names)
        return f"{{{pairs}}}" if step.form == "dict" else f"[{', '.join(names)}]"

    return _function(step.name, body, known, "tree", begin, give)


def _unpacking(step: Map) -> str:
    first, *rest = step.body.params
    return f"{first}, {_tuple(tuple(rest))}" if step.form == "tree" else _tuple(step.body.params)


def _in_axes(step: Map) -> str:
    axes, params = step.in_axes, step.body.params
    match step.form:
        case "dict":
            return f"({dict(zip(params, axes, strict=True))!r},)"
        case "tree":
            return f"(({axes[0]}, {axes[1:]!r}),)"
        case "name":
            return repr(dict(zip(params, axes, strict=True)))
    if step.statics:
        return repr((*axes, *(None for _ in step.statics)))
    return repr(axes[0]) if len(set(axes)) == 1 else repr(axes)


def _out_axes(step: Map) -> str:
    axes = step.out_axes
    if len(set(axes)) == 1:
        return repr(axes[0])
    if step.form == "dict":
        return repr(dict(zip(step.body.results, axes, strict=True)))
    return repr(list(axes) if step.form == "tree" else axes)


def _call(step: Map) -> str:
    params, args = step.body.params, step.args
    match step.form:
        case "dict":
            pairs = ", ".join(f"'{p}': {a}" for p, a in zip(params, args, strict=True))
            return f"{step.name}_mapped({{{pairs}}}).values()"
        case "tree":
            return f"{step.name}_mapped(({args[0]}, {_tuple(args[1:])}))"
        case "name":
            pairs = ", ".join(f"{p}={a}" for p, a in zip(params[1:], args[1:], strict=True))
            return f"{step.name}_mapped({args[0]}, {pairs})"
    return f"{step.name}_mapped({', '.join((*args, *(text for _, text in step.statics)))})"


def _blocks(step: Blocks, known: set[str]) -> list[str]:
    if step.name in known:
        return []
    known.add(step.name)
    sizes, names = _tuple_of([s for _, s in step.mesh]), _tuple_of([n for n, _ in step.mesh])
    in_specs = tuple(_spec(spec, step.form) for spec in step.in_specs)
    out_specs = tuple(_spec(spec, step.form) for spec in step.out_specs)
    if step.form == "tree":
        begin = (f"{_tuple(step.body.params)} = tree['arguments']",)
        given, found = f"({_tree('arguments', in_specs)},)", _tree("results", out_specs)
        give = functools.partial(_tree, "results")
        lines = _function(step.name, step.body, known, "tree", begin, give)
    else:
        given, found = _tuple(in_specs), _tuple(out_specs)
        lines = _function(step.name, step.body, known, give=_tuple)
    options = [
        step.name,
        f"mesh=tp.make_mesh({sizes}, {names})",
        f"in_specs={given}",
        f"out_specs={found}",
        *(() if step.check_vma else ("check_vma=False",)),
        "**COMPILE",
    ]
    return [*lines, f"{step.name}_mapped = tp.shard_map({', '.join(options)})"]


def _spec(spec: Spec, form: str) -> str:
    """``short`` leaves out what cuts nothing at the end, ``tuples`` has no bare names."""
    while form == "short" and spec and not spec[-1]:
        spec = spec[:-1]
    entries = [repr(e[0] if len(e) == 1 and form != "tuples" else e) if e else "None" for e in spec]
    return f"tp.P({', '.join(entries)})"


# --- loops ----------------------------------------------------------------------------------------


def _loop(step: Loop, known: set[str]) -> list[str]:
    """Definitions of the bodies, and the call."""
    f, args, outs = step.name, step.args, _tuple(step.outs)
    carries, rows = _tuple(args[: step.carries]), _tuple(args[step.carries :])
    option = f", {step.option}" if step.option else ""
    first = step.bodies[0]
    match step.kind:
        case "scan":
            begin = _begin(carry=first.params[: step.carries], row=first.params[step.carries :])
            lines = _function(f, first, known, "carry, row", begin, _cut(step.carries))
            xs = rows if args[step.carries :] else f"None, {step.length}"
            outs = f"{_tuple(step.outs[: step.carries])}, {_tuple(step.outs[step.carries :])}"
            return [*lines, f"{outs} = tp.scan({f}, {carries}, {xs}{option})"]
        case "map":
            lines = _function(f, first, known, "row", _begin(row=first.params), _tuple)
            return [*lines, f"{outs} = tp.map({f}, {rows}{option})"]
        case "fori_loop":
            index, *params = first.params
            begin = (f"{index} = {index}.long()", *_begin(carry=tuple(params)))
            lines = _function(f, first, known, f"{index}, carry", begin, _tuple)
            return [*lines, f"{outs} = tp.fori_loop(0, {step.length}, {f}, {carries}{option})"]
        case "while_loop":
            begin = ("count, carry = state", *_begin(carry=first.params))
            lines = _function(
                f, first, known, "state", begin, lambda names: f"count + 1, {_tuple(names)}"
            )
            test = f"lambda state: state[0] < {step.by[0]}"
            start = f"(torch.zeros((), dtype=torch.int64), {carries})"
            return [*lines, f"{outs} = tp.while_loop({test}, {f}, {start})[1]"]
        case "associative_scan":
            lines = _function(f, first, known)
            return [*lines, f"{step.outs[0]} = tp.associative_scan({f}, {args[0]}{option})"]
    lines = [
        line
        for k, body in enumerate(step.bodies)
        for line in _function(f"{f}_{k}", body, known, give=_tuple)
    ]
    functions = [f"{f}_{k}" for k in range(len(step.bodies))]
    chosen = ", ".join(functions) if step.kind == "cond" else f"[{', '.join(functions)}]"
    given = ", ".join((step.by[0], chosen, *args))
    return [*lines, f"{outs} = tp.{step.kind}({given})"]


def _begin(**given: tuple[str, ...]) -> tuple[str, ...]:
    """What takes the arguments of a body apart."""
    return tuple(f"{_tuple(names)} = {name}" for name, names in given.items() if names)


def _cut(carries: int) -> Callable[[tuple[str, ...]], str]:
    return lambda names: f"{_tuple(names[:carries])}, {_tuple(names[carries:])}"


# --- derivatives ----------------------------------------------------------------------------------


def _derivative(step: Derivative) -> list[str]:
    f, args = step.name, ", ".join(step.args)
    numbers = repr(tuple(range(len(step.args))))
    outs, rest = _tuple(step.outs), _tuple(step.outs[1:])
    match step.kind:
        case "grad":
            return [f"{outs} = tp.grad({f}, {numbers})({args})"]
        case "torch_grad":
            return [f"{outs} = torch.func.grad({f}, {numbers})({args})"]
        case "value_and_grad":
            return [f"{step.outs[0]}, {rest} = tp.value_and_grad({f}, {numbers})({args})"]
        case "vjp":
            pull = f"{f}_pull"
            lines = [f"{step.outs[0]}, {pull} = torch.func.vjp({f}, {args})"]
            return [*lines, f"{rest} = {pull}({step.along[0]})"]
        case "jvp":
            given = f"{_tuple(step.args)}, {_tuple(step.along)}"
            return [f"{step.outs[0]}, {step.outs[1]} = torch.func.jvp({f}, {given})"]
        case "backward":
            leaves = [f"{f}_{arg}" for arg in step.args]
            pairs = list(zip(leaves, step.args, strict=True))
            return [
                *(f"{leaf} = {arg}.detach().requires_grad_()" for leaf, arg in pairs),
                f"{f}({', '.join(leaves)}).backward()",
                *(
                    f"{out} = torch.zeros_like({leaf}) if {leaf}.grad is None else {leaf}.grad"
                    for out, leaf in zip(step.outs, leaves, strict=True)
                ),
            ]
    return [f"{step.outs[0]} = torch.func.{step.kind}({f})({args})"]


def _tuple(names: tuple[str, ...]) -> str:
    if not names:
        return "()"
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _tree(key: str, names: tuple[str, ...]) -> str:
    return f"{{'{key}': [{', '.join(names)}]}}"


def _tuple_of(values: Sequence[object]) -> str:
    return _tuple(tuple(map(repr, values)))
