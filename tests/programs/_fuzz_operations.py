"""Operations of torch from which the fuzzer makes programs: code, and the operands it takes.

An operand is a letter: ``f`` real floating, ``c`` complex, ``i`` integer, ``b`` bool, ``n`` number
of any kind, ``a`` anything.  In the code ``$d`` is some dim of the first operand, ``$k`` a small
number. An operation that does not fit its operands is not taken, so shapes need not be said here.
"""

from _support import entries


def _operations(text: str) -> tuple[tuple[str, str], ...]:
    """Operands and code of each entry."""
    return tuple(
        (kinds, code) for kinds, _, code in (each.partition(": ") for each in entries(text))
    )


OUT_OF_PLACE = _operations("""
    # elementwise
    f: torch.sin({0}); f: torch.tanh({0}) * $k; f: torch.exp(-{0}.abs()); f: torch.relu({0})
    f: torch.sigmoid({0}); f: torch.nn.functional.elu({0}); f: torch.sqrt({0}.abs() + 0.5)
    f: torch.log1p({0} ** 2); f: {0}.clamp(-1.0, 0.5)
    f: torch.where({0} > 0.1, {0}, 0.25 * {0} ** 2); n: {0} * 2 - 1; n: -{0}; n: {0} ** 2
    f: 1 / (1.5 + {0} ** 2); n: {0} + $k; f: 0.5 * {0}; nn: {0} + {1}; nn: {0} - {1}; nn: {0} * {1}
    ff: {0} / (2 + {1} ** 2); ff: torch.maximum({0}, {1}); ff: torch.atan2({0}, 2 + {1} ** 2)
    ff: torch.lerp({0}, {1}, 0.3); fff: torch.addcmul({0}, {1}, {2})
    baa: torch.where({0}, {1}, {2}); fb: {0}.masked_fill({1}, 0.5)
    # other dtypes
    f: {0} > 0; f: {0}.clamp(-9, 9).round().to(torch.int64); f: {0}.to(torch.float64)
    i: {0}.to(torch.float64); f: {0}.to(torch.float32); f: {0}.to(torch.bfloat16)
    i: {0}.to(torch.int32); i: {0} % 3; i: {0} // 2; i: {0} > 1; i: {0}.to(torch.float32); b: ~{0}
    bb: {0} & {1}; b: {0}.any(); b: {0}.to(torch.int8); ff: torch.complex({0}, {1}); c: {0}.abs()
    c: {0}.conj() * {0}; c: torch.view_as_real({0}); c: {0}.real
    # reductions and scans
    n: {0}.sum(); n: {0}.sum($d); n: {0}.sum($d, keepdim=True); f: {0}.mean($d); f: {0}.mean()
    f: {0}.amax($d); f: {0}.amin(); f: {0}.max($d).values; f: ({0}.var($d) + 1).sqrt()
    f: {0}.var($d, correction=0) + 1; f: {0}.prod($d); f: {0}.logsumexp($d); f: {0}.argmax($d)
    f: torch.linalg.vector_norm({0}); f: {0}.softmax($d); f: {0}.log_softmax($d); n: {0}.cumsum($d)
    f: {0}.cumprod($d); f: torch.logcumsumexp({0}, $d); f: torch.sort({0}, $d, stable=True).values
    f: {0} - {0}.mean($d, keepdim=True); f: torch.nn.functional.layer_norm({0}, {0}.shape[-1:])
    # shapes
    a: {0}.unsqueeze($d); a: {0}.transpose($d, -1); a: {0}.movedim(0, $d)
    # a view or not, as the strides are
    a: {0}.reshape(-1).clone(); a: {0}.flip($d); a: {0}.roll($k, $d); a: {0}.expand(2, *{0}.shape)
    a: {0}.repeat_interleave(2, $d); a: torch.cat([{0}, {0}], $d); aa: torch.cat([{0}, {1}], $d)
    a: torch.stack([{0}, {0}], $d); n: torch.stack([{0}, {0} * 2, {0} - 1])
    n: torch.nn.functional.pad({0}, (1, 0)); a: {0}.unfold($d, 2, 1); f: {0}.tril()
    a: {0}.diagonal(); a: {0}.contiguous().clone()
    # indexing
    a: {0}[..., 0]; a: {0}[-1]; a: {0}[..., ::2]; a: {0}[..., 1:]; a: {0}[None]; a: {0}[[0, -1, 0]]
    a: {0}.select($d, -1); a: {0}.narrow($d, 0, 1); ai: {0}[{1}.long().reshape(-1) % {0}.shape[0]]
    ai: {0}[..., {1}.long().reshape(-1) % {0}.shape[-1]]
    ai: {0}.index_select(0, {1}.reshape(-1).long() % {0}.shape[0])
    f: {0}.gather($d, {0}.argsort($d, stable=True))
    f: torch.take_along_dim({0}, {0}.argmin($d, keepdim=True), $d)
    ff: {0}.index_add(0, torch.arange({1}.shape[0]) % {0}.shape[0], {1})
    f: torch.zeros_like({0}).scatter_add($d, torch.zeros_like({0}, dtype=torch.int64), {0})
    # writes to what is expanded, or is read too, which a compiler may do in place
    n: {0}[:1].expand({0}.shape).index_add(0, torch.zeros(1, dtype=torch.int64), {0}[:1])
    n: ({0} * 2)[:1].expand({0}.shape).index_copy(0, torch.tensor([0]), {0}[-1:])
    n: {0}.index_add(0, torch.arange({0}.shape[0]).flip(0), {0})
    # products
    nn: {0} @ {1}; nn: {0} @ {1}.transpose(-1, -2); ff: torch.einsum('...i,...j->...ij', {0}, {1})
    ff: torch.einsum('i...,i...->...', {0}, {1}); f: torch.einsum('...ij,...kj->...ik', {0}, {0})
    ff: torch.outer({0}.reshape(-1), {1}.reshape(-1)[:3]); ff: torch.nn.functional.linear({0}, {1})
    f: torch.linalg.solve({0} @ {0}.transpose(-1, -2) + torch.eye({0}.shape[-1]).to({0}), {0})
    ff: torch.nn.functional.conv1d({0}[:, None], {1}.reshape(1, 1, -1)[..., :2])
    f: torch.nn.functional.avg_pool1d({0}[None], 2, 1); ff: torch.dist({0}, {1})
    # an index that is a value
    ai: {0}[{1}.long().reshape(-1)[0] % {0}.shape[0]]
    ai: {0}[..., {1}.long().reshape(-1)[0] % {0}.shape[-1]]
    fi: torch.nn.functional.one_hot({1}.long() % 3, 3) * {0}.sum()
    # a module that is closed over
    f: MODULE({0}); f: torch.func.functional_call(MODULE, {{'shift': {0}.mean()}}, ({0},))
""")

RANDOM = _operations("""
    f: torch.bernoulli(torch.ones_like({0})) * {0}; f: torch.nn.functional.dropout({0}, 0.0)
    f: torch.randn({0}.shape).clamp(2, 2) * {0}
    f: torch.nn.init.normal_(torch.empty_like({0}), 0.5, 0.0) * {0}
    f: torch.empty_like({0}).uniform_().clamp(0.5, 0.5) + {0}
    i: {0} + torch.randint(0, 1, {0}.shape)
""")
"""Random functions whose numbers are known."""

Family = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
STATICS: tuple[Family, ...] = (
    (("2", "2.0", "True", "1", "1.0"), (("n", "{0} * $s"), ("n", "{0} + $s"))),
    (("0.0", "-0.0"), (("f", "torch.copysign({0}, torch.tensor($s))"),)),
    (("(2,)", "(2.0,)", "(True,)", "(1,)"), (("n", "{0} * $s[0]"),)),
    (("frozenset({1})", "frozenset({1.0})", "frozenset({True})"), (("n", "{0} * next(iter($s))"),)),
    (("'sum'", "'mean'"), (("f", "{0}.sum() if $s == 'sum' else {0}.mean()"),)),
    (("None", "3", "False"), (("n", "{0} - 1 if $s is None else {0} * 3"),)),
    (("torch.float32", "torch.float64"), (("f", "{0}.to($s) * 2"),)),
)
"""Values of static arguments, some of which are equal, and operations with one of them, ``$s``."""

ASSOCIATIVE = _operations("""
    n: {0} + {1}; n: {0} * {1}; f: torch.maximum({0}, {1}); a: {1}.clone()
""")

WRITES = _operations("""
    n: {0}.mul_(2); f: {0}.sin_(); a: {0}.zero_(); n: {0} += 1
""")
"""What a body does to its own arguments."""

STATE = (
    "MODULE.shift.add_(0.5)",
    "MODULE.factor.data.mul_(2)",
    "MODULE.eval()",
    "MODULE.train()",
    "setattr(MODULE, 'shift', torch.tensor(1.0))",
)
"""What happens to the module between calls."""

IN_PLACE = _operations("""
    n: {0}.mul_(2); f: {0}.sin_(); nn: {0}.add_({1}); nn: {0}.sub_({1}, alpha=2); a: {0}.zero_()
    aa: {0}.copy_({1}); n: {0}[..., 0] += 1; n: {0}[-1] *= 2; aa: {0}[0] = {1}
    aa: {0}[..., 0] = {1}; f: {0}.clamp_(min=0); n: {0}.t().mul_(3)
    n: {0}.transpose(0, -1)[1:].sub_(1)
    nn: {0}.index_add_(0, torch.zeros({1}.shape[0], dtype=torch.int64), {1})
    a: {0}[1:] = {0}[:-1].clone(); a: {0}[torch.arange({0}.shape[0]).flip(0)] = {0}.clone()
    a: {0}.index_fill_($d, torch.tensor([0]), 1); fb: {0}.masked_fill_({1}, -1.0)
    aia: {0}[{1}.long().reshape(-1)[0] % {0}.shape[0]] = {2}
    nin: {0}[{1}.long().reshape(-1)[0] % {0}.shape[0]] += {2}
    ni: {0}[{1}.long().reshape(-1)[0] % {0}.shape[0]].mul_(2)
    ni: {0}[..., {1}.long().reshape(-1)[0] % {0}.shape[-1]].zero_()
""")

VIEWS = (
    "{0}[..., 1:]",
    "{0}.transpose(0, -1)",
    "{0}.select($d, 0)",
    "{0}.unsqueeze($d)",
    "{0}.narrow($d, 0, 1)",
)

SCALARS = (
    "{0}.sum()",
    "torch.sin({0}).sum()",
    "({0} ** 2).sum()",
    "({0} * torch.linspace(0.5, 1.5, {0}.numel()).to({0}).reshape({0}.shape)).sum()",
)
"""From any real tensor to what can be differentiated."""
