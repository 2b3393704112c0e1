"""Small faults in a Python function, as people make them: each is one replaced piece of its text.

The list of a source is the same on every machine: its order is that of the text.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes [start, stop) of a source become `text`. Fault("comparison", 31, 36, "a <= b")"""

    kind: str
    start: int
    stop: int
    text: str

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.stop :]).decode()


def faults_of(source: str, function: str) -> tuple[Fault, ...]:
    """Every fault of the rules that leaves the source parsable. Not each of them changes what the function does."""
    tree = ast.parse(source)
    starts = _line_starts(source)
    found: dict[Fault, None] = {}
    for top in tree.body:
        if isinstance(top, ast.FunctionDef) and top.name == function:
            for node in _nodes(top):
                for kind, changed in _changes(node):
                    place = node.test if isinstance(node, ast.If) else node
                    span = (starts[place.lineno - 1] + place.col_offset, _end(place, starts))
                    found[Fault(kind, *span, ast.unparse(ast.fix_missing_locations(changed)))] = None
    kept = [fault for fault in found if _parses(fault.applied(source))]
    return tuple(sorted(kept, key=lambda fault: (fault.start, fault.stop, fault.kind, fault.text)))


def _nodes(top: ast.FunctionDef) -> Iterator[ast.expr | ast.AugAssign | ast.If]:
    """What can be changed in the body. No texts with braces: where their parts stand is not told by every Python."""
    waiting: list[ast.AST] = [*top.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr | ast.AugAssign | ast.If):
            yield node
        if not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)


def _changes(node: ast.expr | ast.AugAssign | ast.If) -> Iterator[tuple[str, ast.AST]]:
    """What the node may become, and by which rule; of an `if`, what its condition may become."""
    if isinstance(node, ast.If):
        yield "removed branch", ast.Constant(False)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in _COMPARISONS.get(type(node.ops[0]), ()):
            yield "comparison", _with(node, ops=[other()])
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        for operator in _OPERATORS.get(type(node.op), ()):
            yield "operator", _with(node, op=operator())
    elif isinstance(node, ast.BoolOp):
        yield "connective", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield "removed condition", copy.deepcopy(node.values[0])
    elif isinstance(node, ast.UnaryOp):
        yield "removed sign", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.IfExp):
        yield "swapped branches", _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.ListComp | ast.GeneratorExp) and node.generators[0].ifs:
        yield "removed filter", _with(node, generators=[_unfiltered(node.generators[0]), *node.generators[1:]])


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "off by one", ast.Constant(node.value + 1)
        if node.value > 0:
            yield "off by one", ast.Constant(node.value - 1)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        at = min(1, len(node.args) - 1)
        less = ast.BinOp(copy.deepcopy(node.args[at]), ast.Sub(), ast.Constant(1))
        yield "boundary", _with(node, args=[*node.args[:at], less, *node.args[at + 1 :]])
    if len(node.args) == 2 and not any(isinstance(argument, ast.Starred) for argument in node.args):
        yield "swapped arguments", _with(node, args=node.args[::-1])
    if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        yield "removed call", copy.deepcopy(node.func.value)
    elif isinstance(node.func, ast.Name) and len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp):
        yield "removed call", copy.deepcopy(node.args[0])


def _unfiltered(part: ast.comprehension) -> ast.comprehension:
    return ast.comprehension(part.target, part.iter, part.ifs[1:], part.is_async)


def _with(node: ast.expr | ast.AugAssign, **fields: object) -> ast.AST:
    """A copy with other fields; the original keeps its own."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return copy.deepcopy(changed)


def _line_starts(source: str) -> list[int]:
    """Where each line begins, in bytes: that is how the parser counts columns."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _end(node: ast.expr | ast.AugAssign, starts: list[int]) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
