"""Each container or instance stays one object, whichever side changes it by whichever name."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook
from tests.objects.programs import (
    Run,
    Step,
    gives,
    here,
    hinting,
    holds,
    is_plain,
    ranks,
    run_in_one_process,
    table,
)

pytestmark = pytest.mark.shared_world

BOX = "class Box:\n    def __init__(self, x=None): self.x = x\n"

CASES: dict[str, list[Step]] = {
    "a config in a list of jobs": [
        here("cfg = {'lr': .1}; jobs = [cfg]"),
        ranks("print(cfg)"),
        holds("jobs[0] is cfg"),
        here("cfg['lr'] = .5; jobs.append(7)"),
        gives("cfg, jobs, jobs[0] is cfg", ({"lr": 0.5}, [{"lr": 0.5}, 7], True)),
        here("more = [cfg, jobs]"),
        ranks("more[0]['by'] = rank"),
        gives("jobs[0]['by']", 0, 1),
        holds("more[1] is jobs"),
    ],
    "a config that only the ranks change": [
        here("cfg = {'lr': .1}"),
        ranks("cfg['rank'] = rank"),
        here("jobs = [cfg, {'other': cfg}]"),
        gives("jobs[0]['rank'], jobs[1]['other'] is cfg", (0, True), (1, True)),
    ],
    "a name that begins with an underscore": [
        here("_cfg = {'lr': 1}\ndef _helper(): return 1"),
        ranks("_cfg = {'lr': 5}\ndef _helper(): return 2"),
        gives("_cfg, _helper()", ({"lr": 5}, 2)),
    ],
    "one that begins with an underscore and is changed in place": [
        here("_cfg = {'lr': 1}"),
        ranks("_cfg['lr'] = 5"),
        here("cfg = [_cfg]"),
        gives("_cfg, cfg[0] is _cfg", ({"lr": 5}, True)),
    ],
    "an alias that the ranks made": [
        here("a = [1]"),
        ranks("mine = [a]; same = a"),
        here("a.append(2)"),
        gives("mine, same is a, mine[0] is a", ([[1, 2]], True, True)),
    ],
    "an alias that the cell names alone": [
        here("a = [1]"),
        ranks("mine = {'a': a}"),
        here("a.append(2)"),
        gives("mine['a']", [1, 2]),
        here("a.append(3)"),
        ranks("def read(): return mine['a']"),
        here("a.append(4)"),
        gives("read()", [1, 2, 3, 4]),
    ],
    "nested dicts": [
        here("tree = {'a': {'b': {'c': [1]}}}; leaf = tree['a']['b']"),
        ranks("tree['a']['b']['c'].append(2)"),
        here("tree['a']['n'] = 1"),
        gives("tree, leaf is tree['a']['b']", ({"a": {"b": {"c": [1, 2]}, "n": 1}}, True)),
        here("tree['z'] = leaf"),
        gives("tree['z'] is tree['a']['b'] is leaf, leaf", (True, {"c": [1, 2]})),
    ],
    "a key that the notebook removes": [
        here("d = {'a': 1, 'b': 2}; l = [1, 2, 3]; s = {1, 2}"),
        ranks("kept = d, l, s"),
        here("del d['a'], l[0]; s.discard(1)"),
        gives(
            "d, l, s, [a is b for a, b in zip(kept, (d, l, s))]",
            ({"b": 2}, [2, 3], {2}, [True] * 3),
        ),
        here("d.clear(); l.clear(); s.clear()"),
        gives("kept", ({}, [], set())),
    ],
    "the order of a dict": [
        here("d = {'a': 1, 'b': 2}"),
        ranks("kept = d"),
        here("d['a'] = d.pop('a')"),
        gives("[*kept]", ["b", "a"]),
    ],
    "a list in a list, moved to another": [
        here("inner = [0]; a, b = [inner], []"),
        ranks("a[0].append(1); print(b)"),
        here("b.append(a.pop())"),
        gives("a, b, b[0] is inner", ([], [[0, 1]], True)),
    ],
    "a new part that holds old ones": [
        here("a = [1]; d = {}"),
        ranks("a.append(2); print(d)"),
        here("d['new'] = {'old': a}"),
        gives("d, d['new']['old'] is a", ({"new": {"old": [1, 2]}}, True)),
    ],
    "tuples with lists": [
        here("l = [1]; t = (l, 2, (l,)); u = {t[2]: 0} if False else {'t': t}"),
        ranks("l.append(2)"),
        gives("t, u['t'][0] is l, t[2][0] is l", (([1, 2], 2, ([1, 2],)), True, True)),
        here("v = [t, l]"),
        gives("v[0][0] is l, v[1] is l, t[0] is v[0][0]", (True, True, True)),
    ],
    "frozensets and tuples as keys": [
        here(f"{BOX}b = Box([1]); d = {{(b, 1): 'x', frozenset([b]): 'y'}}"),
        ranks("b.x.append(2)"),
        gives("d[b, 1], d[frozenset([b])], [*d][0][0] is b", ("x", "y", True)),
        here("d[b] = 'z'"),
        gives("d[b], [*d][0][0].x", ("z", [1, 2])),
    ],
    "an instance": [
        here(f"{BOX}b = Box([1]); again = {{'b': b}}"),
        ranks("b.x.append(rank); b.y = rank"),
        gives("again['b'] is b, again['b'].y", (True, 0), (True, 1)),
        here("other = Box(b)"),
        gives(
            "other.x is b, type(other) is type(b), b.x", (True, True, [1, 0]), (True, True, [1, 1])
        ),
        here("other.z = 3"),
        gives("other.z, other.x.y", (3, 0), (3, 1)),
        here("del other.z"),
        holds("not hasattr(other, 'z')"),
    ],
    "a dataclass": [
        here(
            "@dataclass\nclass D:\n    a: list = field(default_factory=list)\n    n: int = 0\n"
            "d = D(); e = [d.a]"
        ),
        ranks("d.a.append(1)"),
        here("d.n = 5"),
        gives("d.a, d.n, e[0] is d.a, d == D([1], 5)", ([1], 5, True, True)),
    ],
    "a frozen dataclass": [
        here(
            "@dataclass(frozen=True)\nclass F:\n    a: list\n    n: int = 0\n"
            "l = [1]; f = F(l); by = {f.n: f}"
        ),
        ranks("f.a.append(2)"),
        here("g = dataclasses.replace(f, n=1)"),
        gives("g.a is f.a is l, by[0] is f, l, g.n", (True, True, [1, 2], 1)),
        here("l = f.a"),
        gives("f.a, l is f.a", ([1, 2], True)),
    ],
    "a dataclass with slots": [
        here(
            "@dataclass(slots=True)\nclass S:\n    a: list\n    n: int = 0\n"
            "l = [1]; s = S(l); t = [s]"
        ),
        ranks("kept = s; s.a.append(2)"),
        here("s.n = 7"),
        gives("s.n, kept is s is t[0], s.a is l, l", (7, True, True, [1, 2])),
        here("s.a = [l]"),
        gives("kept.a, kept.a[0] is l", ([[1, 2]], True)),
    ],
    "slots that are not set": [
        here("class S:\n    __slots__ = ('a', 'b', '__weakref__')\ns = S(); s.a = 1"),
        ranks("kept = s"),
        here("s.b = 2; del s.a"),
        gives("kept.b, hasattr(kept, 'a'), kept is s", (2, False, True)),
    ],
    "pydantic": [
        here(
            "import pydantic\nclass M(pydantic.BaseModel):\n    a: list = []\n    n: int = 0\n"
            "m = M(); m.a = [1]; l = m.a"
        ),
        ranks("kept = m; m.a.append(2)"),
        here("m.n = 3; by = {'m': m}"),
        gives(
            "m.n, m.a, l is m.a, by['m'] is m is kept, m == M(a=[1, 2], n=3)",
            (3, [1, 2], True, True, True),
        ),
        here("again = M(n=9)"),
        gives("again.n, type(again) is type(m)", (9, True)),
    ],
    "attrs": [
        here(
            "import attrs\n@attrs.define\nclass A:\n"
            "    a: list = attrs.field(factory=list)\n    n: int = 0\n"
            "x = A(); l = x.a"
        ),
        ranks("kept = x; x.a.append(1)"),
        here("x.n = 3"),
        gives("x.n, x.a, l is x.a, kept is x, x == A([1], 3)", (3, [1], True, True, True)),
    ],
    "enums": [
        here(
            "class Colour(enum.Enum):\n    RED = 1\n    BLUE = 2\n"
            "c = Colour.RED; d = {Colour.RED: [1]}"
        ),
        ranks("d[Colour.RED].append(2)"),
        gives("c is Colour.RED, d[c], Colour(1) is c", (True, [1, 2], True)),
        here("e = [Colour.BLUE, c]"),
        gives("e[0] is Colour.BLUE, e[1] is c, isinstance(e[0], Colour)", (True, True, True)),
    ],
    "flags and the like": [
        here(
            "class F(enum.Flag):\n    A = 1\n    B = 2\nclass N(enum.IntEnum):\n    ONE = 1\n"
            "f, n = F.A | F.B, N.ONE"
        ),
        gives("f == F.A | F.B, n is N.ONE, n == 1", (True, True, True)),
        here("g = [f, n]"),
        gives("g[0] == f, g[1] is N.ONE, g[0] & F.A == F.A", (True, True, True)),
    ],
    "namedtuples with lists": [
        here("P = namedtuple('P', 'a b'); p = P([1], 2); l = p.a"),
        ranks("p.a.append(2)"),
        here("q = p._replace(b=3)"),
        gives(
            "q.a is p.a is l, q.a, isinstance(q, P), type(q) is type(p), q == P([1, 2], 3)",
            (True, [1, 2], True, True, True),
        ),
    ],
    "typed namedtuples": [
        here(
            "from typing import NamedTuple\nclass P(NamedTuple):\n    a: list\n"
            "    b: int = 0\np = P([1])"
        ),
        ranks("p.a.append(2)"),
        here("q = [p, p.a]"),
        gives("q[0].a is q[1] is p.a, q[0] == P([1, 2])", (True, True)),
    ],
    "defaultdict": [
        here("d = defaultdict(list); d['a'].append(1)"),
        ranks("kept = d; d['r'].append(rank)"),
        here("e = {'d': d, 'a': d['a']}"),
        gives(
            "e['d'] is d is kept, e['a'] is d['a'], d['r'], d['new']",
            (True, True, [0], []),
            (True, True, [1], []),
        ),
    ],
    "a defaultdict that the notebook changes": [
        here("d = defaultdict(list); d['a'].append(1)"),
        ranks("kept = d"),
        here("d['b'].append(2)"),
        gives("dict(kept), kept['c']", ({"a": [1], "b": [2]}, [])),
        here("d.default_factory = None"),
        gives("kept.default_factory is None, kept is d", (True, True)),
    ],
    "deque": [
        here("d = deque([1, 2], maxlen=3); l = [d]"),
        ranks("kept = d"),
        here("d.append(3); d.append(4)"),
        gives("[*kept], kept.maxlen, l[0] is kept is d", ([2, 3, 4], 3, True)),
        ranks("d.append(rank)"),
        here("m = {'d': d}"),
        gives("[*m['d']], m['d'] is kept", ([3, 4, 0], True), ([3, 4, 1], True)),
    ],
    "the other collections": [
        here("c, o, ch = Counter('aab'), OrderedDict(a=1, b=2), ChainMap({'x': 1}, {'y': 2})"),
        ranks("kept = [c, o, ch]"),
        here("c['a'] += 1; o.move_to_end('a'); ch['z'] = 3"),
        gives(
            "dict(kept[0]), [*kept[1]], kept[2].maps, [a is b for a, b in zip(kept, (c, o, ch))]",
            ({"a": 3, "b": 1}, ["b", "a"], [{"x": 1, "z": 3}, {"y": 2}], [True] * 3),
        ),
    ],
    "bytearray": [
        here("b = bytearray(b'abc'); l = [b]"),
        ranks("kept = b"),
        here("b[0] = 65; b += b'd'"),
        gives("bytes(kept), l[0] is kept is b", (b"Abcd", True)),
    ],
    "sets of objects": [
        here(f"{BOX}a, b = Box(1), Box(2); s = {{a}}"),
        ranks("kept = s; a.x = 10 + rank"),
        here("s.add(b)"),
        gives(
            "sorted(each.x for each in kept), a in s, b in kept, s is kept",
            ([2, 10], True, True, True),
            ([2, 11], True, True, True),
        ),
        here("t = {b, a} - s"),
        gives("t", set()),
    ],
    "objects that hash by value, as keys": [
        here(
            "@dataclass(unsafe_hash=True)\nclass K:\n    n: int\n"
            "    l: list = field(hash=False, compare=False)\n"
            "k = K(1, []); d = {k: 'x'}"
        ),
        ranks("k.l.append(rank); print(d[k])"),
        gives("d[K(1, None)], [*d][0] is k, [*d][0].l", ("x", True, [0]), ("x", True, [1])),
    ],
    "weak references": [
        here(
            f"{BOX}a = Box([1]); holder = [a]; r = weakref.ref(a); "
            f"w = weakref.WeakValueDictionary(a=a)"
        ),
        ranks("a.x.append(2)"),
        gives("r() is a, w['a'] is a, r().x", (True, True, [1, 2])),
        here("k = weakref.WeakKeyDictionary({a: 5}); s = weakref.WeakSet([a])"),
        gives("k[a], a in s, [*s][0] is holder[0]", (5, True, True)),
    ],
    "properties": [
        here(
            "class C:\n    def __init__(self): self._v = [1]\n"
            "    @property\n    def v(self): return self._v\n"
            "    @v.setter\n    def v(self, v): self._v = v\n    @classmethod\n"
            "    def make(cls): return cls()\n"
            "    @staticmethod\n    def two(): return 2\nc = C(); l = c.v"
        ),
        ranks("c.v.append(2)"),
        gives("l is c.v, c.v, type(C.make()) is C, C.two()", (True, [1, 2], True, 2)),
        here("c.v = [l]"),
        gives("c._v, c.v[0] is l", ([[1, 2]], True)),
    ],
    "a cached property": [
        here(
            "class C:\n    calls = 0\n    @functools.cached_property\n"
            "    def v(self): C.calls += 1; return [self]\nc = C()"
        ),
        gives("c.v[0] is c, c.v is c.v, C.calls", (True, True, 1)),
        here("d = (c,)"),
        gives("d[0] is c, d[0].v[0] is c, C.calls", (True, True, 1)),
    ],
    "descriptors": [
        here(
            "class Typed:\n    def __set_name__(self, owner, name): self.name, "
            "self.log = '_' + name, []\n"
            "    def __get__(self, o, t=None): return self if o is None else getattr(o, "
            "self.name, 0)\n"
            "    def __set__(self, o, v): self.log.append(v); setattr(o, self.name, v)\n"
            "class C:\n    n = Typed()\nc = C(); c.n = 1"
        ),
        ranks("c.n = 2 + rank"),
        gives("c.n, C.n.log", (2, [1, 2]), (3, [1, 3])),
        here("typed = vars(C)['n']"),
        gives("typed is vars(C)['n'], typed.log[-1]", (True, 2), (True, 3)),
    ],
    "__getstate__ and __setstate__": [
        here(
            "class G:\n    def __init__(self, l): self.l, self.cache = l, lambda: 1\n"
            "    def __getstate__(self): return {'l': self.l}\n"
            "    def __setstate__(self, s): self.l, self.cache = s['l'], None\nl = [1]; g = G(l)"
        ),
        ranks("kept = g; g.l.append(2)"),
        holds("g.l is l"),
        here("g.l = [l]; h = [g]"),
        gives("kept.l, h[0] is kept is g, kept.l[0] is l", ([[1, 2]], True, True)),
    ],
    "__reduce__": [
        here(
            "class R:\n    def __init__(self, l): self.l, self.n = l, 0\n"
            "    def __reduce__(self): return R, (self.l,), {'n': self.n}\nl = [1]; r = R(l)"
        ),
        ranks("kept = r; r.l.append(2); r.l"),
        here("s = {'r': r}"),
        gives("s['r'] is r is kept, r.l is l, l", (True, True, [1, 2])),
        here("r.n = 5"),
        gives("kept.n, kept is r", (5, True)),
    ],
    "copyreg and __copy__": [
        here(
            "import copyreg\nclass R:\n    def __init__(self, l): self.l = l\n"
            "l = [1]; r = R(l)\ndef make(l): return R(l)\n"
            "copyreg.pickle(R, lambda r: (make, (r.l,)))"
        ),
        ranks("r.l.append(2)"),
        gives("r.l is l, l", (True, [1, 2])),
    ],
    "subclasses of containers": [
        here(
            "class L(list):\n    pass\nclass D(dict):\n"
            "    def __getattr__(self, k): return self[k]\n"
            "l = L([1]); l.note = [2]; d = D(a=l)"
        ),
        ranks("kept = l, d; l.append(2); l.note.append(3)"),
        here("d['b'] = 5"),
        gives("d.b, d.a is l, l, l.note, kept[1] is d", (5, True, [1, 2], [2, 3], True)),
        here("e = [d.a.note]"),
        holds("e[0] is l.note"),
    ],
    "self references": [
        here("l = [1]; l.append(l); d = {}; d['me'] = d; d['l'] = l"),
        ranks("kept = l, d; l.append(rank)"),
        gives(
            "l[1] is l, d['me'] is d, d['l'] is l, l[2]",
            (True, True, True, 0),
            (True, True, True, 1),
        ),
        here("d['n'] = 1"),
        gives("kept[1]['n'], d['me'] is d is kept[1], d['l'][1] is kept[0]", (1, True, True)),
    ],
    "cycles through instances": [
        here(f"{BOX}a, b = Box(), Box(); a.x, b.x = b, a; tree = [a]"),
        ranks("a.name, b.name = 'a', 'b'"),
        gives("tree[0].x.name, tree[0].x.x is tree[0]", ("b", True)),
        here("c = Box(a); root = {'c': c}"),
        gives("root['c'].x is a, c.x.x.name", (True, "b")),
    ],
    "a linked list": [
        here(
            f"{BOX}first = node = Box()\nfor _ in range(50): node.x = Box(); node = node.x\n"
            f"last = node"
        ),
        ranks("last.end = True"),
        here("first.begin = True"),
        gives(
            "first.begin, last.end, "
            "len([n := first] + [n for _ in range(50) if (n := n.x)]), n is last",
            (True, True, 51, True),
        ),
    ],
    "an equal object is another": [
        here("a, b = [1], [1]; both = [a, b]"),
        ranks("a.append(2)"),
        gives("a, b, both, a is b", ([1, 2], [1], [[1, 2], [1]], False)),
        here("c = [b, a]"),
        gives("c, c[0] is b, c[1] is a", ([[1], [1, 2]], True, True)),
    ],
    "one of two that share a part is changed by each side": [
        here("part = [0]; x, y = {'p': part}, {'p': part}"),
        ranks("x['r'] = rank; print(y)"),
        here("y['n'] = 1"),
        gives(
            "x, y, x['p'] is y['p']",
            ({"p": [0], "r": 0}, {"p": [0], "n": 1}, True),
            ({"p": [0], "r": 1}, {"p": [0], "n": 1}, True),
        ),
        ranks("part.append(rank)"),
        here("z = [x, y, part]"),
        gives(
            "z[0] is x, z[1] is y, z[0]['p'] is z[2] is part, part",
            (True, True, True, [0, 0]),
            (True, True, True, [0, 1]),
        ),
    ],
    "random generators of Python": [
        here("r = random.Random(1); s = [r]"),
        ranks("kept = r; a = r.random()"),
        holds("s[0] is r is kept"),
        here("t = {'r': r}"),
        gives("t['r'] is kept, t['r'].getstate() == random.Random(1).getstate()", (True, False)),
    ],
    "a random generator that the notebook seeds again": [
        here("r = random.Random(1)"),
        ranks("kept = r"),
        here("r.seed(5)"),
        gives("kept.random() == random.Random(5).random(), kept is r", (True, True)),
    ],
    "simple namespaces, exceptions, slices and ranges": [
        here(
            "n = types.SimpleNamespace(l=[1]); e = ValueError('x'); e.l = n.l; "
            "s = slice(1, 2); q = range(3)"
        ),
        ranks("kept = n; n.l.append(2)"),
        here("n.k = 1"),
        gives(
            "kept.k, e.l is n.l, n.l, s == slice(1, 2), [*q], e.args",
            (1, True, [1, 2], True, [0, 1, 2], ("x",)),
        ),
    ],
    "an object that is deleted in the notebook lives on": [
        here("a = [1]; b = {'a': a}"),
        ranks("a.append(2); print(b)"),
        here("c = a; del a"),
        gives("c, c is b['a']", ([1, 2], True)),
    ],
    "a name that the ranks delete": [
        here("a = [1]; b = [a]"),
        ranks("print(a, b); del a"),
        here("b.append(2)"),
        gives("b", [[1], 2]),
        here("a = b[0]"),
        holds("a is b[0]"),
    ],
    "numbers and strings that are assigned in turn": [
        here("n = 1"),
        gives("n", 1),
        here("n = 2"),
        gives("n", 2),
        here("n += 1"),
        gives("n", 3),
    ],
}

BOTH: dict[str, list[Step]] = {
    "renamed in the notebook after the ranks have changed it": [
        here("a = [1]"),
        ranks("a.append(2)"),
        here("b = a; a = None"),
        hinting(gives("b, a", ([1, 2], None)), "replaces"),
    ],
    "the notebook puts another object in the place of one that the ranks have changed": [
        here("class O: pass\no = O(); o.l = [0]; o.t = torch.zeros(1); d = {'l': o.l, 'm': [0]}"),
        ranks("o.l.append(1); o.t += 1; d['m'].append(1)"),
        here("o.t = o.t + 5; d['m'] = d['m'] + [9]"),
        hinting(
            gives("o.t.item(), d['m'], o.l", (5, [0, 9], [0, 1])), "in `o.t`", r"in `d\['m'\]`"
        ),
        here("o.l = [3]"),
        gives("o.l, d['l']", ([3], [0, 1])),
    ],
    "the notebook changes an object that the ranks have replaced": [
        here("class O: pass\no = O(); o.opts = {'lr': 1}; lst = [{'lr': 1}]"),
        ranks("o.opts = {**o.opts, 'r': 1}; lst[0] = {'r': 1}"),
        here("o.opts['lr'] = 5"),
        hinting(gives("o.opts, lst", ({"lr": 1, "r": 1}, [{"r": 1}])), "`o`", "%dist_push o"),
        here("lst[0]['lr'] = 5"),
        hinting(gives("lst", [{"r": 1}]), "`lst`", "%dist_push lst"),
        gives("lst", [{"r": 1}]),
    ],
    "the same key of a dict": [
        here("cfg = {'lr': .1}"),
        ranks("cfg['lr'] = .5"),
        here("cfg['lr'] = .3"),
        hinting(gives("cfg['lr']", 0.5), "%dist_push cfg", "%dist_gather cfg"),
        gives("cfg['lr']", 0.5),
        here("other = [1]"),
        gives("cfg['lr'], other", (0.5, [1])),
    ],
    "the same key, where a container of it is named": [
        here("cfg = {'lr': .1}; jobs = [cfg]"),
        ranks("jobs[0]['lr'] = .5"),
        here("cfg['lr'] = .3"),
        hinting(gives("jobs[0]['lr']", 0.5), "`cfg`|`jobs", "%dist_push"),
    ],
    "both append": [
        here("l = [0]"),
        ranks("l.append(rank)"),
        here("l.append(5)"),
        hinting(gives("l", [0, 0], [0, 1]), "%dist_push l", "%dist_gather l"),
    ],
    "the notebook first, then the ranks": [
        here("l = [0]"),
        ranks("print(l)"),
        here("l.append(5)"),
        ranks("l.append(rank)"),
        gives("l", [0, 5, 0], [0, 5, 1]),
    ],
    "the same attribute": [
        here(f"{BOX}b = Box(1)"),
        ranks("b.x = 2 + rank"),
        here("b.x = 7"),
        hinting(gives("b.x", 2, 3), "%dist_push b", "%dist_gather b"),
    ],
    "another object of the same value": [
        here("d = {'a': [1]}"),
        ranks("d['a'].append(2)"),
        here("d['a'] = [1]"),
        hinting(holds("d['a'] in ([1], [1, 2])")),
    ],
    "one of several is changed by both": [
        here("a, b, c = [0], [0], [0]; all_of = [a, b, c]"),
        ranks("print(all_of); a.append(1); b.append(1)"),
        here("b.append(2); c.append(2)"),
        hinting(gives("all_of", [[0, 1], [0, 1], [0, 2]]), "`b`|all_of", "%dist_push"),
        here("a, c = a, c"),
        holds("c is all_of[2]"),
    ],
    "a conflict does not stop other objects": [
        here("a, b = {'x': 1}, {'a': None}; b['a'] = a"),
        ranks("a['x'] = 2; print(b)"),
        here("a['x'] = 3; b['n'] = 1"),
        hinting(gives("b", {"a": {"x": 2}, "n": 1}), "`a`|b", "%dist_push"),
        holds("b['a'] is a"),
    ],
    "one rank alone has changed it": [
        here("l = [0]"),
        ranks("if rank == 1: l.append(1)\nprint(l)"),
        here("l.append(5)"),
        hinting(ranks("print(l)"), "`l`", "rank 1"),
        hinting(holds("l[:2] == [0, 1] if rank else l[0] == 0")),
    ],
    "assigned again after both have changed it": [
        here("l = [0]"),
        ranks("l.append(rank)"),
        here("l.append(5)"),
        hinting(ranks("print(l)"), "`l`"),
        here("l = [7]"),
        hinting(gives("l", [7])),
        here("l.append(8)"),
        gives("l", [7, 8]),
    ],
    "a value that the ranks have counted up": [
        here("y = 1"),
        ranks("y += 1"),
        here("y = 5"),
        hinting(gives("y", 5), "`y`"),
    ],
    "a counted name that the notebook reads": [
        here("counted = 1"),
        ranks("counted += 1"),
        here("counted", r"rank"),
    ],
    "a class in the place of a value": [
        here("y = [1]"),
        ranks("y.append(2); mine = [y]"),
        here("class y: pass"),
        hinting(gives("y.__name__, mine", ("y", [[1, 2]])), "`y`", "`mine`"),
    ],
}


PARTS = {
    "two keys": ("d = {'a': 1}", "d['r'] = 2", "d['n'] = 3", "d", {"a": 1, "r": 2}, "n"),
    "two attributes": (f"{BOX}d = Box(1)", "d.r = 2", "d.n = 3", "vars(d)", {"x": 1, "r": 2}, "n"),
    "two attributes of a function": (
        *("def d(): pass", "d.r = 2", "d.n = 3", "vars(d)", {"r": 2}, "n"),
    ),
    "two elements of a set": (
        *("d = {'a'}", "d.add('r')", "d.add('n')", "dict.fromkeys(sorted(d), 3)"),
        *({"a": 3, "r": 3}, "n"),
    ),
}
"""Cells that make `d`, change it on the ranks, and change it in the notebook; how to read it as a
dict; that dict without the notebook's change; the key of the change, whose value is 3."""


@table(PARTS)
def test_both_sides_may_change_parts_of_an_object(two: Notebook, program: Run, name: str) -> None:
    """The ranks' part stays; the notebook's part arrives too, or a line shows `%dist_push d`."""
    made, there, then, read, theirs, key = PARTS[name]
    program([here(made), ranks(there), here(then)])
    outcome = two.run(f"%%distributed -o seen\n{read}")
    for value in (two.value(f"seen[{rank}]") for rank in range(2)):
        assert {**value, key: 3} == {**theirs, key: 3}
        assert key in value or "%dist_push d" in outcome.seen, outcome.seen


@table(CASES | BOTH)
def test_containers_are_as_in_a_plain_kernel(program: Run, name: str) -> None:
    """Values and identities on the ranks are those of one plain kernel; nothing is overwritten."""
    program((CASES | BOTH)[name])


@pytest.mark.unit
@table(CASES)
def test_values_are_those_of_a_plain_kernel(name: str) -> None:
    """A program gives equal values if one process runs it, without a notebook."""
    assert is_plain(CASES[name])
    run_in_one_process(CASES[name])
