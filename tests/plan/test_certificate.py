"""Covers: _plan/certificate.py and _plan/collectives.py, through ``f.lower(x).certificate()``:
groups, routes and verdicts worked out by hand, for right programs and for planted wrong ones.
"""

import json

import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._plan.certificate import of_groups, of_permutations
from torchpmap.debug import Collective

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)
WHOLE = "ranks:0,1,2,3"
raw = torch.ops._c10d_functional


def certificate(f, *args, **options):
    return tp.pmap(f, "i", compile=EAGER, **options).lower(*(args or (X,))).certificate()


def on_mesh(f):
    """Of ``f`` on one element for each device of a mesh of 2 x 2: rows are (0, 1) and (2, 3)."""
    mesh, cut = tp.make_mesh((2, 2), ("a", "b")), tp.P("a", "b")
    f = tp.shard_map(f, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False, compile=EAGER)
    return f.lower(torch.ones(2, 2)).certificate()


def line_of(f, after):
    """The place ``after`` lines below the first one of a function."""
    return f"{__file__}:{f.__code__.co_firstlineno + after} "


# what is listed -----------------------------------------------------------------------------------


def step(x):
    def body(c, _):
        return tp.pmax(c, "i"), None

    tp.debug.print("{}", x)
    y = tp.ppermute(x.double(), "i", [(0, 1), (1, 2)])
    z, _ = tp.scan(body, x, None, length=700)
    return tp.all_gather(x, "i"), y, z


def test_the_collectives_in_program_order():
    found = certificate(step)
    assert found.devices == (0, 1, 2, 3)
    print_, permuted, maximum, gathered = found.collectives
    assert (print_.name, print_.line[: len(line_of(step, 4))]) == ("debug_print", line_of(step, 4))
    assert (permuted.name, permuted.num_bytes, permuted.times) == ("ppermute", 8, 1)
    assert permuted.line.startswith(line_of(step, 5))
    assert (maximum.name, maximum.num_bytes, maximum.times) == ("all_reduce", 4, 700)
    assert maximum.line.startswith(line_of(step, 2))
    [loop] = maximum.inside
    assert (loop.name, loop.steps) == ("scan", 700)
    assert loop.line.startswith(line_of(step, 6))
    assert (gathered.name, gathered.size, gathered.inside) == ("all_gather_into_tensor", 4, ())
    assert {each.groups for each in found.collectives} == {((0, 1, 2, 3),)}
    assert {each.axis for each in found.collectives} == {"i"}


def test_groups_and_routes_on_a_mesh():
    def f(x):
        return (
            tp.pmax(x, "a")
            + tp.pmin(x, "b")
            + tp.pmax(x, ("a", "b"))
            + tp.ppermute(x, "a", [(1, 0)])
            + tp.pshuffle(x, "b", [1, 0])
        )

    found = on_mesh(f).collectives
    over_a, over_b = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    assert [(each.axis, each.groups) for each in found] == [
        ("a", over_a),
        ("b", over_b),
        ("a, b", ((0, 1, 2, 3),)),
        ("a", over_a),
        ("b", over_b),
    ]
    assert [(each.moves, each.zeros) for each in found[-2:]] == [
        (((2, 0), (3, 1)), (2, 3)),
        (((1, 0), (0, 1), (3, 2), (2, 3)), ()),
    ]
    assert [(each.moves, each.zeros) for each in found[:-2]] == [((), ())] * 3


def test_groups_of_indices():
    def f(x):
        return tp.pmax(x, "i", axis_index_groups=[[0, 3], [1, 2]])

    [maximum] = certificate(f).collectives
    assert maximum.groups == ((0, 3), (1, 2))


def test_a_collective_of_a_derivative_names_its_line():
    def f(x):
        def loss(x):
            return tp.psum(x * x, "i")

        return tp.grad(loss)(x)

    lines = [each.line for each in certificate(f).collectives]
    assert lines[-1].startswith(line_of(f, 4))


def test_lines_of_jit():
    mesh = tp.make_mesh((4,), ("x",))
    w, x = (tp.device_put(torch.ones(8, 8), tp.NamedSharding(mesh, tp.P("x"))) for _ in range(2))

    def f(x):
        y = x @ w
        return y.amax(0)

    found = tp.jit(f).lower(x).certificate()
    gathered, maximum = found.collectives
    assert (gathered.name, gathered.num_bytes) == ("all_gather_into_tensor", 2 * 8 * 4)
    assert gathered.line.startswith(line_of(f, 1))
    assert (maximum.name, maximum.axis, maximum.groups) == ("all_reduce", "x", ((0, 1, 2, 3),))
    assert maximum.line.startswith(line_of(f, 2))
    assert found.is_proved


# what is proved -----------------------------------------------------------------------------------


def decided(pred, axis="b"):
    """A program whose branch has a collective."""
    return lambda x: tp.cond(pred(x), lambda x: tp.pmax(x, axis), lambda x: x + 1, x)


def chosen(x):
    choice = tp.pmax(x, "b").sum().long()
    return tp.switch(choice, [lambda x: tp.pmax(x, "b"), torch.sin, lambda x: tp.pmin(x, "b")], x)


def until_large(x):
    return tp.while_loop(lambda c: tp.pmin(c, "b").sum() < 9, lambda c: c + tp.pmax(c, "b"), x)


def inside_a_scan(x):
    branch = decided(lambda c: tp.pmax(c, "b").sum() > 0)
    return tp.scan(lambda c, _: (branch(c), None), x, None, length=700)[0]


ALONG_B = {
    "a maximum over the axis": decided(lambda x: tp.pmax(x, "b").sum() > 0),
    "the index of the other axis": decided(lambda x: tp.axis_index("a") == 0),
    "a closed-over value": decided(lambda x: X[1] > 0),
    "of three branches": chosen,
    "a loop": until_large,
    "in a scan": inside_a_scan,
}


@pytest.mark.parametrize("f", ALONG_B.values(), ids=ALONG_B)
def test_what_decides_is_the_same(f):
    """Along b only: the devices of the other row may go another way, but wait for none of these."""
    found = on_mesh(f)
    assert found.is_proved
    [claim] = [claim for claim in found.claims if claim.about == "branches and loops"]
    assert claim.told.endswith("is the same along b")
    assert claim.collectives == tuple(
        number
        for number, each in enumerate(found.collectives)
        if {inside.name for inside in each.inside} & {"cond", "switch", "while_loop"}
    )


def test_a_replicated_argument_decides():
    def f(w, x):
        return tp.cond(w > 0, lambda x: tp.pmax(x, "i"), lambda x: x, x)

    assert certificate(f, X[0], X, in_axes=(None, 0)).is_proved
    with pytest.raises(ValueError, match="the predicate may differ along axis 'i'"):
        certificate(f, X, X)


def test_without_collectives():
    found = certificate(torch.sin)
    assert (found.collectives, found.is_proved, found.wrong) == ((), True, ())


# what is not --------------------------------------------------------------------------------------


def sends(pairs):
    sources, destinations = map(list, zip(*pairs, strict=True))
    return lambda x: torch.ops.torchpmap.ppermute(x, sources, destinations, WHOLE)


def among_some(x, pred):
    """Devices exchange values that others do not."""

    def largest(x):
        return raw.wait_tensor(raw.all_reduce(x, "max", WHOLE))

    return torch.cond(pred, largest, lambda x: x + 1, (x,))


MAY_DIFFER = (
    "what the cond decides on may differ along i, and nothing compares it: devices that go apart "
    "wait for others, until the timeout= of the call, or exchange values of different collectives"
)
PLANTED = {
    "two senders to one": (
        sends([(0, 1), (2, 1)]), "permutations", "wrong", "place 1 receives 2 times"),
    "one sender to two": (
        sends([(0, 1), (0, 2)]), "permutations", "wrong", "place 0 sends 2 times"),
    "off the axis": (
        sends([(0, 4)]), "permutations", "wrong", "place 4 receives, but a group has 4"),
    "another size": (
        lambda x: raw.wait_tensor(raw.all_gather_into_tensor(x[None], 2, WHOLE))[:1],
        "groups", "wrong", "it counts on 2 devices in a group, but there are 4"),
    "another group": (
        lambda x: raw.wait_tensor(raw.all_reduce(x, "sum", "theirs")), "groups", "at run time",
        "it names a group that the call does not have; a device that has none raises"),
    "apart by their values": (
        lambda x: among_some(x, x > 0), "branches and loops", "at run time", MAY_DIFFER),
    "apart by their index": (
        lambda x: among_some(x, tp.axis_index("i") > 0), "branches and loops", "at run time",
        MAY_DIFFER),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_programs(name):
    """Operations that a function calls by itself are not checked when it is traced."""
    f, about, verdict, told = PLANTED[name]
    found = certificate(f)
    doubts = [claim for claim in found.claims if claim.verdict != "proved"]
    assert [(claim.about, claim.verdict, claim.told) for claim in doubts] == [
        (about, verdict, told)
    ]
    assert doubts[0].collectives == (0,)
    assert not found.is_proved
    assert found.wrong == tuple(doubts if verdict == "wrong" else ())
    assert f"{verdict}: {about} (0): {told}" in str(found).splitlines()


def test_devices_that_go_apart_wait():
    """As the certificate says; and so the predicate is not the same by chance."""
    f = tp.pmap(lambda x: among_some(x, x > 0), "i", compile=EAGER, timeout=1)
    with pytest.raises(tp.CallTimeout, match="waits for rank 0"):
        f(X).block_until_ready()


GROUPS = {
    "two rows": (((0, 1), (2, 3)), []),
    "in another order": (((3, 1, 0, 2),), []),
    "one is missing": (((0, 1), (2,)), ["device 3 is in 0 groups"]),
    "one is in two": (((0, 1, 2), (2, 3)), ["device 2 is in 2 groups"]),
    "a stranger": (((0, 1), (2, 3, 7)), ["device 7 is none of the call's"]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_partitions(name):
    groups, faults = GROUPS[name]
    claims = list(of_groups([Collective("all_reduce", 4, "i", groups=groups)], (0, 1, 2, 3)))
    assert [claim.told for claim in claims if claim.verdict == "wrong"] == faults
    assert len(claims) == max(len(faults), 1)


def test_permutations_within_groups():
    """Of two devices each: their places are 0 and 1."""
    swap = Collective("ppermute", 4, "b", groups=((0, 1), (2, 3)), pairs=((0, 1), (1, 0)))
    far = Collective("ppermute", 4, "b", groups=((0, 1), (2, 3)), pairs=((0, 2),))
    [claim] = of_permutations([swap])
    assert (claim.verdict, claim.collectives) == ("proved", (0,))
    [claim] = of_permutations([swap, far])
    assert (claim.verdict, claim.collectives) == ("wrong", (1,))
    assert claim.told == "place 2 receives, but a group has 2"
    assert far.moves == ()


def test_what_only_a_run_tells():
    @torch.library.custom_op("certified::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    def f(x):
        return twice(x)

    found = certificate(f, out_axes=None, check_replicated=True)
    doubts = [(claim.about, claim.verdict, claim.told) for claim in found.claims[1:]]
    doubts = [doubt for doubt in doubts if doubt[1] != "proved"]
    assert doubts == [
        ("order", "at run time",
         "what certified.twice may send is not known, and nothing compares it"),
        ("results", "at run time",
         "out_axes is None for the output of f: each call compares it"),
    ]  # fmt: skip


def test_without_a_graph():
    with pytest.raises(tp.TraceError, match="runs as Python code"):
        tp.pmap(torch.sin, compile=False).lower(X)


# how it is shown ----------------------------------------------------------------------------------


def test_text():
    """All of it: docs/debugging.md."""
    text = str(certificate(step))
    assert f'   at {line_of(step, 5)}`y = tp.ppermute(x.double(), "i", [(0, 1), (1, 2)])`' in text
    assert "2  all_reduce over i, 4 B, 700 times: 0 1 2 3" in text
    assert f"   in scan of 700 steps at {line_of(step, 6)}" in text


def test_json():
    found = certificate(step)
    data = found.as_dict()
    assert json.loads(found.to_json()) == data
    assert list(data) == ["call", "devices", "collectives", "claims"]
    assert [each["name"] for each in data["collectives"]] == [
        "debug_print",
        "ppermute",
        "all_reduce",
        "all_gather_into_tensor",
    ]
    permuted = data["collectives"][1]
    assert permuted["groups"] == [[0, 1, 2, 3]]
    assert (permuted["moves"], permuted["zeros"]) == ([[0, 1], [1, 2]], [0, 3])
    assert {claim["verdict"] for claim in data["claims"]} == {"proved"}
