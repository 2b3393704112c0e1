"""Repositories about structures: a cache and a graph."""

from __future__ import annotations

from palestra.envs.builtin.swe_kinds import Fault, Kind

CACHE = Kind(
    "cache",
    {
        "cache/__init__.py": "from cache.recent import Recent\n\n__all__ = ['Recent']\n",
        "cache/counts.py": '''"""How often a cache helped."""


class Counts:
    """Hits and misses."""

    def __init__(self):
        self.hits = 0
        self.misses = 0

    def share(self):
        """Hits among all; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0
''',
        "cache/recent.py": '''"""A cache that keeps what was used last."""

from collections import OrderedDict

from cache.counts import Counts


class Recent:
    """At most `size` keys; the one that was not used for longest goes first."""

    def __init__(self, size):
        self.size = size
        self.counts = Counts()
        self._kept = OrderedDict()

    def get(self, key, default=None):
        """The value, which counts as a use."""
        if key not in self._kept:
            self.counts.misses += 1
            return default
        self.counts.hits += 1
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key, value):
        """Set the value, which counts as a use."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)

    def __len__(self):
        return len(self._kept)
''',
    },
    """from cache import Recent


def test_what_was_put_is_there():
    cache = Recent(2)
    cache.put("a", 1)
    assert cache.get("a") == 1
""",
    """from cache import Recent


def filled():
    cache = Recent(2)
    cache.put("a", 1)
    cache.put("b", 2)
    return cache


def test_the_oldest_goes_first():
    cache = filled()
    cache.put("c", 3)
    assert cache.get("a") is None and cache.get("b") == 2


def test_reading_is_a_use():
    cache = filled()
    cache.get("a")
    cache.put("c", 3)
    assert cache.get("a") == 1 and cache.get("b") is None


def test_writing_again_is_a_use():
    cache = filled()
    cache.put("a", 5)
    cache.put("c", 3)
    assert cache.get("a") == 5


def test_it_never_grows_over_its_size():
    cache = filled()
    for n in range(9):
        cache.put(n, n)
    assert len(cache) == 2


def test_the_share_of_hits():
    cache = filled()
    assert cache.counts.share() == 0.0
    cache.get("a")
    cache.get("none")
    assert cache.counts.share() == 0.5
""",
    (
        Fault(
            "cache/recent.py",
            "        self._kept.move_to_end(key)\n        return self._kept[key]\n",
            "        return self._kept[key]\n",
            "Reading a key does not save it from being dropped.",
            ("test_reading_is_a_use",),
        ),
        Fault(
            "cache/recent.py",
            "        self._kept[key] = value\n        self._kept.move_to_end(key)\n",
            "        self._kept[key] = value\n",
            "Writing a key again should make it the newest one, and does not.",
            ("test_writing_again_is_a_use",),
        ),
        Fault(
            "cache/counts.py",
            "self.hits / asked if asked else 0.0",
            "self.hits / asked",
            "`counts.share()` of a new cache ends in a ZeroDivisionError.",
            ("test_the_share_of_hits",),
        ),
    ),
)

GRAPH = Kind(
    "graph",
    {
        "graph/__init__.py": "from graph.order import sorted_nodes\nfrom graph.paths import shortest\n\n"
        "__all__ = ['shortest', 'sorted_nodes']\n",
        "graph/paths.py": '''"""Ways through a graph: {node: {neighbour: length}}."""

import heapq


def shortest(graph, start, goal):
    """(length, nodes) of the shortest way, or None where there is none."""
    queue = [(0, start, [start])]
    done = set()
    while queue:
        length, node, way = heapq.heappop(queue)
        if node == goal:
            return length, way
        if node in done:
            continue
        done.add(node)
        for other, step in graph.get(node, {}).items():
            heapq.heappush(queue, (length + step, other, way + [other]))
    return None
''',
        "graph/order.py": '''"""The order in which things that need each other can be done."""


def sorted_nodes(needs):
    """Every node after all that it needs: {node: [needed, ...]}. Raises ValueError for a circle."""
    order = []
    state = {}

    def visit(node):
        if state.get(node) == "open":
            raise ValueError(f"{node} needs itself")
        if node in state:
            return
        state[node] = "open"
        for other in sorted(needs.get(node, [])):
            visit(other)
        state[node] = "done"
        order.append(node)

    for node in sorted(needs):
        visit(node)
    return order
''',
    },
    """from graph import shortest, sorted_nodes


def test_one_step():
    assert shortest({"a": {"b": 2}}, "a", "b") == (2, ["a", "b"])


def test_one_needs_the_other():
    assert sorted_nodes({"a": ["b"]}) == ["b", "a"]
""",
    """import pytest

from graph import shortest, sorted_nodes


def test_a_detour_may_be_shorter():
    assert shortest({"a": {"b": 9, "c": 1}, "c": {"b": 2}}, "a", "b") == (3, ["a", "c", "b"])


def test_no_way():
    assert shortest({"a": {"b": 1}}, "b", "a") is None


def test_it_begins_at_the_goal():
    assert shortest({}, "a", "a") == (0, ["a"])


def test_a_circle_is_refused():
    with pytest.raises(ValueError):
        sorted_nodes({"a": ["b"], "b": ["a"]})


def test_two_may_need_the_same():
    assert sorted_nodes({"a": ["c"], "b": ["c"]}) == ["c", "a", "b"]


def test_deep_before_shallow():
    assert sorted_nodes({"a": ["b"], "b": ["c"]}) == ["c", "b", "a"]
""",
    (
        Fault(
            "graph/paths.py",
            "            heapq.heappush(queue, (length + step, other, way + [other]))\n",
            "            heapq.heappush(queue, (step, other, way + [other]))\n",
            "The length of a way of several steps is that of its last step.",
            ("test_a_detour_may_be_shorter",),
        ),
        Fault(
            "graph/order.py",
            '        state[node] = "done"\n',
            "",
            "Two nodes that need the same third one are reported as a circle.",
            ("test_two_may_need_the_same", "test_deep_before_shallow"),
        ),
        Fault(
            "graph/order.py",
            '            raise ValueError(f"{node} needs itself")\n',
            "            return\n",
            "Nodes that need each other in a circle should raise ValueError; they are put in some order instead.",
            ("test_a_circle_is_refused",),
        ),
    ),
)

KINDS = (CACHE, GRAPH)
