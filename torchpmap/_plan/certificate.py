"""Whether the collectives of a call agree on all devices: what its graph proves, and what it does
not.

All devices run one graph.  So they agree if

    groups                 every device is in exactly one group of each partition, and the group has
                           as many members as the operation counts on
    permutations           no device sends twice or receives twice
    branches and loops     the devices of a group take the same branch, and the same number of
                           steps: what decides is the same on all of them (_trace/replication)

Most programs where it is otherwise raise when they are traced.  This looks at the finished graph,
so it also sees what passes made of it, and operations that the function calls by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.fx import Graph, Node

from torchpmap._base.errors import size_text
from torchpmap._plan.collectives import Collective, Inside, collective, users_operations
from torchpmap._plan.cost import propagated
from torchpmap._plan.plan import Plan
from torchpmap._runtime.current import process_count
from torchpmap._trace.graphs import SCAN, Met, kind_of_node, met, placeholders
from torchpmap._trace.replication import along_lines, differing, index_values, parting

Verdict = Literal["proved", "at run time", "wrong"]


@dataclass(frozen=True)
class Claim:
    """What a certificate says about some of the collectives."""

    about: str
    """``"order"``, ``"groups"``, ``"permutations"``, ``"branches and loops"`` or ``"results"``."""
    verdict: Verdict
    """``"proved"`` from the graph; ``"at run time"``: it depends on values; ``"wrong"``."""
    told: str
    """What holds, and what checks it; or what is wrong."""
    collectives: tuple[int, ...] = ()
    """The numbers of those that it is about, if not all."""

    def __str__(self) -> str:
        which = f" ({_listed(self.collectives)})" if self.collectives else ""
        return f"{self.verdict}: {self.about}{which}: {self.told}"


@dataclass(frozen=True)
class Certificate:
    """What is known, before it runs, about the agreement of the devices of a call; ``print`` it.

    It takes for granted that devices compute equal results from equal values.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.ppermute(x, "i", [(0, 1), (1, 2)]), "i")
        >>> certificate = f.lower(torch.zeros(4)).certificate()
        >>> [moved] = certificate.collectives
        >>> moved.moves, moved.zeros, certificate.is_proved
        (((0, 1), (1, 2)), (0, 3), True)
    """

    call: str
    """As messages name it."""
    devices: tuple[int, ...]
    """Their ids."""
    collectives: tuple[Collective, ...]
    """In program order."""
    claims: tuple[Claim, ...]

    @property
    def is_proved(self) -> bool:
        """Whether the graph proves all of it, so that the devices agree whatever the values."""
        return all(claim.verdict == "proved" for claim in self.claims)

    @property
    def wrong(self) -> tuple[Claim, ...]:
        """What can not work."""
        return tuple(claim for claim in self.claims if claim.verdict == "wrong")

    def as_dict(self) -> dict[str, Any]:
        """The same as lists, dicts, numbers and strings, for JSON."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    def to_json(self) -> str:
        """The text of ``as_dict()``."""
        collectives = [
            asdict(each) | {"moves": each.moves, "zeros": each.zeros} for each in self.collectives
        ]
        return json.dumps(asdict(self) | {"collectives": collectives}, indent=2)

    def __str__(self) -> str:
        count = len(self.collectives)
        few = f"{count or 'no'} collective{'' if count == 1 else 's'}"
        lines = [f"{self.call}: {few} on devices {_listed(self.devices)}"]
        for number, each in enumerate(self.collectives):
            times = f", {each.times} times" if each.times > 1 else ""
            size = f", {size_text(each.num_bytes)}" if each.num_bytes else ""
            lines.append(f"{number}  {each.name} over {each.axis}{size}{times}: {_route(each)}")
            lines += [f"   at {each.line}"] if each.line else []
            lines += [f"   in {inside}" for inside in reversed(each.inside)]
        return "\n".join([*lines, *map(str, self.claims)])


def _route(each: Collective) -> str:
    if each.pairs is None:
        return " | ".join(map(_listed, each.groups)) or "unknown devices"
    moves = " ".join(f"{source}->{destination}" for source, destination in each.moves)
    return f"{moves or 'nothing moves'}; zeros on {_listed(each.zeros)}" if each.zeros else moves


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def certificate_of(plan: Plan) -> Certificate:
    graph, ranks = propagated(plan), plan.definition.ranks
    found = met(graph)
    collectives = tuple(collective(plan, each) for each in found)
    claims = [
        *_of_order(graph),
        *of_groups(collectives, ranks),
        *of_permutations(collectives),
        *_of_ways(plan, graph, found, collectives),
        *_of_results(plan),
    ]
    return Certificate(plan.prefix, ranks, collectives, tuple(claims))


def _of_order(graph: Graph) -> Iterator[Claim]:
    yield Claim("order", "proved", "all devices run this one graph, in its order")
    unknown = users_operations(graph)
    if unknown:
        told = f"what {', '.join(unknown)} may send is not known, and nothing compares it"
        yield Claim("order", "at run time", told)
    if process_count() > 1:
        told = (
            "all processes must make this call: they compare it before its first run, and on CPUs "
            "each time"
        )
        yield Claim("order", "at run time", told)


def of_groups(collectives: Sequence[Collective], devices: Sequence[int]) -> list[Claim]:
    """Whether every device is in exactly one group of each collective, of the right size."""
    faults = [
        Claim("groups", verdict, told, (number,))
        for number, each in enumerate(collectives)
        for verdict, told in _faults_of_groups(each, devices)
    ]
    told = "every device is in exactly one group of each collective"
    return faults or [Claim("groups", "proved", told)]


def _faults_of_groups(each: Collective, devices: Sequence[int]) -> Iterator[tuple[Verdict, str]]:
    if not each.groups:
        told = "it names a group that the call does not have; a device that has none raises"
        yield "at run time", told
        return
    members = [device for group in each.groups for device in group]
    for device in sorted({*members, *devices}):
        times = members.count(device)
        if device not in devices:
            yield "wrong", f"device {device} is none of the call's"
        elif times != 1:
            yield "wrong", f"device {device} is in {times} groups"
    sizes = sorted({len(group) for group in each.groups})
    if each.size is not None and sizes != [each.size]:
        yield "wrong", f"it counts on {each.size} devices in a group, but there are {_or(sizes)}"


def of_permutations(collectives: Sequence[Collective]) -> list[Claim]:
    """Whether every permutation is one: each place sends at most once, and receives so."""
    numbers = [k for k, each in enumerate(collectives) if each.pairs is not None]
    faults = [
        Claim("permutations", "wrong", told, (number,))
        for number in numbers
        for told in _faults_of_pairs(collectives[number])
    ]
    told = "no device sends twice, and none receives twice" if numbers else "there are none"
    return faults or [Claim("permutations", "proved", told, tuple(numbers))]


def _faults_of_pairs(each: Collective) -> Iterator[str]:
    pairs = each.pairs or ()
    sides = ("sends", [a for a, _ in pairs]), ("receives", [b for _, b in pairs])
    for verb, places in sides:
        for place in sorted(set(places)):
            if places.count(place) > 1:
                yield f"place {place} {verb} {places.count(place)} times"
            sizes = sorted({len(group) for group in each.groups})
            if sizes and not 0 <= place < sizes[0]:
                yield f"place {place} {verb}, but a group has {_or(sizes)}"


def _or(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _of_ways(
    plan: Plan, graph: Graph, found: Sequence[Met], collectives: Sequence[Collective]
) -> Iterator[Claim]:
    """Whether the devices that a collective joins take the same ways in branches and loops."""
    apart = _parting(plan, graph, {each.group for each in found if each.outer})
    decided: dict[tuple[Inside, str, bool], list[int]] = {}
    for number, (its, each) in enumerate(zip(found, collectives, strict=True)):
        for node, inside in zip(its.outer, each.inside, strict=True):
            if kind_of_node(node) != SCAN:
                is_same = its.group in apart and node not in apart[its.group]
                decided.setdefault((inside, each.axis, is_same), []).append(number)
    for (inside, axis, is_same), numbers in decided.items():
        told = f"what the {inside.name} decides on is the same along {axis}"
        if not is_same:
            told = (
                f"what the {inside.name} decides on may differ along {axis}, and nothing compares "
                "it: devices that go apart wait for others, until the timeout= of the call, or "
                "exchange values of different collectives"
            )
        verdict: Verdict = "proved" if is_same else "at run time"
        yield Claim("branches and loops", verdict, told, tuple(dict.fromkeys(numbers)))
    if not decided:
        yield Claim("branches and loops", "proved", "no collective depends on values")


def _parting(plan: Plan, graph: Graph, groups: set[str]) -> dict[str, set[Node]]:
    """Per group: the branches and loops that devices of it may go through in different ways."""
    ranks = plan.definition.ranks
    places = {rank: place for place, rank in enumerate(ranks)}
    known = {
        name: tuple(tuple(places[rank] for rank in part) for part in partition)
        for name, partition in plan.groups.items()
    }
    index, inputs = None, placeholders(graph)
    if plan.definition.uses_index:
        index, *inputs = inputs
    values = {} if index is None else index_values(graph, index, len(ranks))
    differs = tuple(range(len(ranks)))
    values |= dict(zip(inputs, plan.held or [differs] * len(inputs), strict=True))
    found = {}
    for name in groups & known.keys():
        lines = known[name]
        varying = differing(graph, values, lines, known)
        found[name] = set(parting(graph, varying, along_lines(lines, known)))
    return found


def _of_results(plan: Plan) -> Iterator[Claim]:
    for claim in plan.checked:
        yield Claim("results", "at run time", f"{claim}: each call compares it")
