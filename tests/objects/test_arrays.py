"""Arrays, tensors and tables share memory on the ranks as they do in the notebook."""

from __future__ import annotations

import pytest

from tests.objects.programs import (
    Run,
    Step,
    gives,
    gives_here,
    here,
    hinting,
    holds,
    is_plain,
    ranks,
    run_in_one_process,
    table,
)

pytestmark = pytest.mark.shared_world

SUM = "print(float(a.sum()))"

CASES: dict[str, list[Step]] = {
    "a numpy view that is sent with its array": [
        here("a = np.zeros(4); v = a[1:3]"),
        ranks("v += 1; a[0] = 5"),
        gives("a.tolist(), v.tolist(), np.shares_memory(a, v)", ([5, 1, 1, 0], [1, 1], True)),
    ],
    "a numpy view that is sent later": [
        here("a = np.zeros(4)"),
        ranks("a += 1"),
        here("v = a[1:3]; w = a.reshape(2, 2).T"),
        ranks("v += 1; w[0, 0] = 7"),
        gives("a.tolist(), w.tolist()", ([7, 2, 2, 1], [[7, 2], [2, 1]])),
        holds("np.shares_memory(a, v) and np.shares_memory(a, w)"),
    ],
    "a view first, then its array": [
        here("a = np.zeros(4); v = a[1:3]"),
        ranks("v += 1"),
        gives("a.tolist()", [0, 1, 1, 0]),
        ranks("a += 1"),
        gives("v.tolist()", [2, 2]),
    ],
    "an array that the notebook changes through a view": [
        here("a = np.zeros(4); v = a[::2]"),
        ranks("kept = a, v"),
        here("v[1] = 3; a[0] = 1"),
        gives("kept[0].tolist(), kept[1].tolist(), a is kept[0]", ([1, 0, 3, 0], [1, 3], True)),
    ],
    "views of the ranks": [
        here("a = np.arange(6.)"),
        ranks("mine = a[2:4]; mine2 = a.reshape(2, 3)"),
        here("a[2] = 50"),
        gives("mine.tolist(), float(mine2[0, 2]), float(a[2])", ([50, 3], 50, 50)),
    ],
    "a transposed and a Fortran array": [
        here("a = np.arange(6.).reshape(2, 3); f = np.asfortranarray(a); t = a.T"),
        ranks("kept = a, f"),
        here("a[0, 1] = 9; f[1, 0] = 8"),
        gives(
            "float(t[1, 0]), float(f[1, 0]), f.flags.f_contiguous, kept[1] is f", (9, 8, True, True)
        ),
    ],
    "other kinds of arrays": [
        here(
            "o = np.array([[1], None], dtype=object); l = o[0]; s = np.zeros(2, 'i4,f8'); "
            "b = np.zeros(0)\n"
            "d = np.array('2020-01-01', 'M8[D]'); m = np.ma.masked_array([1, 2], [0, 1]); "
            "u = np.array(['a', 'bc'])"
        ),
        ranks("kept = o, s; l.append(2)"),
        holds("o[0] is l and kept[0] is o and l == [1, 2]"),
        here("o[1] = l; s['f0'] = 3"),
        gives(
            "o[1] is l, kept[1]['f0'].tolist(), b.shape, str(d), m.tolist(), u.tolist()",
            (True, [3, 3], (0,), "2020-01-01", [1, None], ["a", "bc"]),
        ),
    ],
    "a structured array and its field": [
        here("s = np.zeros(3, [('x', float), ('y', int)]); x = s['x']; r = s.view(np.recarray)"),
        ranks("x += 1"),
        gives("s['x'].tolist(), r.x.tolist()", ([1, 1, 1], [1, 1, 1])),
    ],
    "a read-only array": [
        here("a = np.arange(3); a.flags.writeable = False; b = [a]"),
        gives("a.flags.writeable, b[0] is a", (False, True)),
    ],
    "a subclass of array": [
        here(
            "class Image(np.ndarray):\n    pass\n"
            "a = np.zeros(4).view(Image); a.note = [1]; v = a[:2]"
        ),
        ranks("v += 1; kept = a"),
        gives("type(a).__name__, a.tolist(), a.note", ("Image", [1, 1, 0, 0], [1])),
    ],
    "a memory map": [
        here(
            "import tempfile, os\npath = tempfile.mkdtemp() + '/m'\n"
            "m = np.memmap(path, dtype='f8', mode='w+', shape=4); m[:] = 1; m.flush()"
        ),
        gives("float(m.sum()), type(m).__name__ in ('memmap', 'ndarray')", (4, True)),
        here("v = m[1:]"),
        gives("float(v.sum())", 3),
    ],
    "a memory map of more than there is memory, and its slices": [
        here(
            "import os, tempfile\npath = tempfile.mkdtemp() + '/m'; open(path, 'wb').close()\n"
            "os.truncate(path, 1 << 40)\nm = np.memmap(path, dtype='u2', mode='r', offset=6)\n"
            "def batch(n, data=m):\n    return [int(data[-i]) for i in range(1, n)]\n"
            "v, w = m[5:], m[10_000:19_999:3].reshape(11, -1)[:, ::-1]"
        ),
        gives("batch(3), m.shape[0], v.shape[0]", ([0, 0], (1 << 39) - 3, (1 << 39) - 8)),
        gives("type(m) is type(w) is np.memmap, m.flags.writeable", (True, False)),
        gives("w.shape, w.strides, m.filename == path", ((11, 303), (1818, -6), True)),
        here("os.unlink(path)"),
        gives("int(m[-1]), path.endswith('/m')", (0, True)),
    ],
    "an array that repeats elements without end": [
        here("a = np.broadcast_to(np.arange(3), (1 << 50, 3))"),
        here("b = np.broadcast_to(np.array(['x', None], dtype=object), (1 << 50, 2))"),
        gives("a.shape, a[-1].tolist(), a.strides[0]", ((1 << 50, 3), [0, 1, 2], 0)),
        gives("b.shape, b[-1].tolist(), b.strides[0]", ((1 << 50, 2), ["x", None], 0)),
    ],
    "tensor views": [
        here("t = torch.zeros(4); v = t[1:3]; n = t.view(2, 2)"),
        ranks("v += 1; n[0, 0] = 5"),
        gives("t.tolist(), v.data_ptr() == t.data_ptr() + 4", ([5, 1, 1, 0], True)),
    ],
    "a tensor view that is sent later": [
        here("t = torch.zeros(4)"),
        ranks("t += 1; mine = t[:1]"),
        here("v = t[1:3]; e = t.expand(2, 4); d = t.detach()"),
        ranks("v += 1"),
        gives("t.tolist(), e[1].tolist(), d.tolist()", ([1, 2, 2, 1],) * 3),
        here("v2 = t[:1]"),
        ranks("v2 += 5"),
        gives("mine.item()", 6),
    ],
    ".data": [
        here("p = torch.nn.Parameter(torch.zeros(2)); d = p.data"),
        ranks("d += 1"),
        gives("p.tolist(), p.requires_grad, d.requires_grad", ([1, 1], True, False)),
        here("e = p.data"),
        ranks("e += 1"),
        gives("p.tolist(), d.tolist()", ([2, 2], [2, 2])),
    ],
    "the notebook changes .data": [
        here("p = torch.nn.Parameter(torch.zeros(2))"),
        ranks("kept = p, p.data"),
        here("p.data += 1"),
        gives("kept[0] is p, kept[1].tolist()", (True, [1, 1])),
        here("p.data = torch.full((2,), 5.)"),
        gives("kept[0] is p, p.tolist()", (True, [5, 5])),
    ],
    "from_numpy and numpy()": [
        here("a = np.zeros(3); t = torch.from_numpy(a); u = torch.zeros(3); b = u.numpy()"),
        ranks("t += 1; b += 2"),
        gives("a.tolist(), u.tolist()", ([1, 1, 1], [2, 2, 2])),
    ],
    "numpy() in a later cell": [
        here("t = torch.zeros(3)"),
        ranks("t += 1"),
        here("a = t.numpy(); a2 = t.numpy()[1:]"),
        ranks("a += 1"),
        gives("t.tolist(), a2.tolist()", ([2, 2, 2], [2, 2])),
    ],
    "a tensor that the notebook resizes": [
        here("t = torch.zeros(2); l = [t]"),
        ranks("kept = l"),
        here("t.resize_(3).fill_(1)"),
        gives("t.tolist(), l[0] is t, kept is l, kept[0] is t", ([1, 1, 1], True, True, True)),
    ],
    "a tensor that the notebook transposes in place": [
        here("t = torch.arange(6.).reshape(2, 3); d = {'t': t}"),
        ranks("kept = d"),
        here("t.t_()"),
        gives("t.shape == (3, 2), kept['t'] is t, t[1, 0].item()", (True, True, 1)),
    ],
    "a row that is assigned": [
        here("t = torch.zeros(2, 2); rows = [t[0], t[1]]"),
        ranks("kept = t"),
        here("rows[1][:] = 3"),
        gives("kept.tolist(), rows[1].tolist()", ([[0, 0], [3, 3]], [3, 3])),
    ],
    "gradients and leaves": [
        here("w = torch.ones(2, requires_grad=True); (w * 3).sum().backward(); g = w.grad"),
        ranks("kept = w"),
        gives("w.grad.tolist(), w.is_leaf, g is w.grad", ([3, 3], True, True)),
        here("w.grad = None"),
        gives("kept.grad is None, kept is w", (True, True)),
        ranks("(w * 2).sum().backward()"),
        here("h = [w]"),
        gives("h[0].grad.tolist()", [2, 2]),
    ],
    "a gradient that the notebook makes": [
        here("w = torch.ones(2, requires_grad=True)"),
        ranks("kept = w"),
        here("(w * 3).sum().backward()"),
        gives("kept.grad.tolist(), kept is w, w.tolist()", ([3, 3], True, [1, 1])),
    ],
    "a gradient that a result keeps": [
        here("w = torch.ones(2, requires_grad=True); y = w * 3; y.retain_grad()"),
        here("(y * 5).sum().backward(); g = y.grad"),
        gives("y.grad.tolist(), g is y.grad, y.tolist()", ([5, 5], True, [3, 3])),
    ],
    "a subclass of tensor": [
        here(
            "class Named(torch.Tensor):\n    pass\n"
            "t = torch.zeros(2).as_subclass(Named); t.note = ['x']; l = t.note"
        ),
        ranks("t += 1; kept = t"),
        gives("type(t).__name__, t.tolist(), t.note is l", ("Named", [1, 1], True)),
        here("u = [t]"),
        holds("u[0] is t"),
    ],
    "attributes of a tensor": [
        here("t = torch.zeros(1); t.tag = [1]; l = t.tag"),
        ranks("kept = t; l.append(2)"),
        gives("t.tag, t.tag is l", ([1, 2], True)),
        here("t.other = 3"),
        gives("kept.other, kept is t", (3, True)),
    ],
    "channels_last and other strides": [
        here(
            "c = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last); "
            "s = torch.zeros(4)[::2]; k = c"
        ),
        ranks("kept = c; c += 1"),
        gives(
            "c.is_contiguous(memory_format=torch.channels_last), c.stride(), s.stride(), k is c",
            (True, (8, 1, 4, 2), (2,), True),
        ),
        here("d = c[0]"),
        gives("d.sum().item(), d.data_ptr() == c.data_ptr()", (8, True)),
    ],
    "a channels_last tensor that the notebook changes": [
        here("c = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)"),
        ranks("kept = c"),
        here("c[0, 1, 0, 1] = 7"),
        gives(
            "kept[0, 1, 0, 1].item(), kept.sum().item(), kept is c, kept.stride()",
            (7, 7, True, (8, 1, 4, 2)),
        ),
    ],
    "other dtypes": [
        here(
            "b, c, q, h = (torch.ones(2, dtype=d) for d in (torch.bfloat16, "
            "torch.complex64, torch.bool, torch.uint8))\n"
            "all_of = [b, c, q, h]"
        ),
        ranks("kept = all_of"),
        here("b += 1; c *= 1j; q[0] = False; h += 1"),
        gives(
            "[each.tolist() for each in kept], kept[0] is b, str(b.dtype)",
            ([[2, 2], [1j, 1j], [False, True], [2, 2]], True, "torch.bfloat16"),
        ),
    ],
    "empty tensors": [
        here("e, f, g = torch.zeros(0), torch.zeros(0, 3), np.zeros((2, 0)); l = [e, f, g, e]"),
        ranks("kept = e"),
        gives(
            "l[0] is e is l[3] is kept, l[0] is l[1], e.shape == (0,), f.shape == (0, 3), g.shape",
            (True, False, True, True, (2, 0)),
        ),
    ],
    "scalars": [
        here("s = torch.tensor(1.); n = np.float64(2); z = np.array(3); l = [s, z]"),
        ranks("s += rank; z[()] = 4"),
        gives("l[0].item(), float(n), int(l[1]), l[0] is s", (1, 2.0, 4, True), (2, 2.0, 4, True)),
    ],
    "sparse tensors": [
        here("s = torch.eye(2).to_sparse(); c = torch.eye(2).to_sparse_csr(); l = [s, c]"),
        ranks("kept = l"),
        gives(
            "l[0] is s, l[1] is c, s.to_dense().tolist(), c.layout == torch.sparse_csr",
            (True, True, [[1, 0], [0, 1]], True),
        ),
        here("s *= 3"),
        gives("s.to_dense().tolist(), kept[0] is s", ([[3, 0], [0, 3]], True)),
    ],
    "sparse arrays of scipy": [
        here("import scipy.sparse\nm = scipy.sparse.csr_matrix(np.eye(2)); d = m.data"),
        ranks("kept = m; d *= 5"),
        gives("m.toarray().tolist(), m.data is d", ([[5, 0], [0, 5]], True)),
        here("l = [m]"),
        holds("l[0] is m is kept"),
    ],
    "a numpy Generator": [
        here("g = np.random.default_rng(1); l = [g]"),
        ranks("kept = g; drawn = g.random()"),
        gives("l[0] is g, drawn == np.random.default_rng(1).random()", (True, True)),
        here("m = {'g': g, 'bits': g.bit_generator}"),
        gives("m['g'] is kept, m['bits'] is g.bit_generator", (True, True)),
        holds("(lambda r: (r.random(), r.random())[1])(np.random.default_rng(1)) == g.random()"),
    ],
    "two numpy Generators that share nothing": [
        here("g, h = np.random.default_rng(1), np.random.default_rng(2)"),
        ranks("g.random()"),
        holds("h.random() == np.random.default_rng(2).random()"),
        here("i = np.random.default_rng(3)"),
        holds("i.random() == np.random.default_rng(3).random()"),
        here("h2 = np.random.default_rng(2); g3 = [g, h2]"),
        holds("g3[0] is g"),
    ],
    "a Generator that the notebook draws from": [
        here("g = np.random.default_rng(1)"),
        ranks("kept = g"),
        here("g.random(5)"),
        holds(
            "(lambda r: (r.random(5), r.random())[1])(np.random.default_rng(1)) == kept.random()"
        ),
        holds("g is kept"),
    ],
    "a frame and a slice of it": [
        here("import pandas as pd\ndf = pd.DataFrame({'a': [1., 2, 3, 4, 5], 'b': list('vwxyz')})"),
        ranks("print(len(df))"),
        here("train = df[:4]; a = df['a']"),
        gives("len(train), float(train.a.sum()), float(a.sum())", (4, 10, 15)),
        ranks("df['c'] = df.a * 2"),
        here("test = df[4:]"),
        gives("len(test), list(df.columns), float(df.c.sum())", (1, ["a", "b", "c"], 30)),
    ],
    "two frames that share nothing": [
        here(
            "import pandas as pd\n"
            "train, test = pd.DataFrame({'a': [1, 2]}), pd.DataFrame({'a': [3]})"
        ),
        ranks("train['n'] = train.a - rank"),
        gives("test.a.tolist()", [3]),
        here("test['m'] = 5; other = pd.DataFrame({'a': [9]})"),
        gives(
            "test.m.tolist(), other.a.tolist(), train.n.tolist()",
            ([5], [9], [1, 2]),
            ([5], [9], [0, 1]),
        ),
    ],
    "a frame that the notebook changes": [
        here("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2]}); holder = {'df': df}"),
        ranks("kept = df"),
        here("df.loc[0, 'a'] = 7; df['b'] = 1; df.attrs['x'] = 1"),
        gives(
            "kept.a.tolist(), list(kept.columns), kept is df is holder['df']",
            ([7, 2], ["a", "b"], True),
        ),
    ],
    "Series, indexes and timestamps": [
        here(
            "import pandas as pd\n"
            "s = pd.Series([1, 2], name='s'); i = pd.Index(['a', 'b']); t = pd.Timestamp('2020')"
        ),
        ranks("kept = s; s.iloc[0] = 5"),
        here("u = [s, i, t, pd.Timestamp('2021'), pd.Categorical(['a', 'b'])]"),
        gives(
            "u[0] is s is kept, s.tolist(), list(u[1]), u[3].year, u[2] == t",
            (True, [5, 2], ["a", "b"], 2021, True),
        ),
    ],
    "a big frame with text that ranks have only read": [
        here(
            "import pandas as pd\n"
            "big = pd.DataFrame({'text': ['abc', 'd'] * 400_000, 'n': np.arange(800_000)})"
        ),
        ranks(
            "print(len(big), big.text[0], list(big.columns), big.memory_usage(deep=True).sum() > 0)"
        ),
        here("big.loc[0, 'n'] = 77"),
        gives("int(big.n[0])", 77),
        ranks("print(big.text.str.len().sum(), big.head())"),
        here("big['m'] = 1"),
        gives("int(big.m.sum())", 800_000),
    ],
    "RandomForests": [
        here(
            "from sklearn.ensemble import RandomForestClassifier as R\n"
            "X, y = [[0.], [1.]] * 9, [0, 1] * 9\na, b = R(2, random_state=0), R(2, random_state=1)"
        ),
        ranks("a.fit(X, y); kept = a"),
        gives("b.get_params()['random_state'], hasattr(b, 'estimators_')", (1, False)),
        here("c = R(3); l = [a, c]; b.fit(X, y)"),
        gives(
            "l[0] is a is kept, len(l[0].estimators_), len(b.estimators_), c.n_estimators",
            (True, 2, 2, 3),
        ),
        gives("b.predict([[1.]]).tolist(), a.predict([[0.]]).tolist()", ([1], [0])),
    ],
    "polars": [
        here("import polars as pl\np = pl.DataFrame({'a': [1, 2]}); q = {'p': p}"),
        ranks("kept = p"),
        gives("q['p'] is p, p['a'].to_list()", (True, [1, 2])),
        here("r = [p, pl.Series([1])]"),
        gives("r[0] is p is kept, r[1].to_list()", (True, [1])),
    ],
    "arrow": [
        here("import pyarrow as pa\nt = pa.table({'a': [1, 2]}); l = [t]"),
        ranks("kept = t"),
        gives("l[0] is kept, t['a'].to_pylist()", (True, [1, 2])),
    ],
    "a packed sequence and a named tuple of torch": [
        here(
            "from torch.nn.utils.rnn import pack_sequence\n"
            "t = torch.tensor([1., 2]); p = pack_sequence([t])\nm = torch.max(torch.eye(2), 0)"
        ),
        ranks("print(t)"),
        gives("p.data.tolist(), m.indices.tolist()", ([1, 2], [0, 1])),
    ],
    "a list of parameters": [
        here(
            "ps = torch.nn.ParameterList([torch.zeros(1)]); "
            "pd = torch.nn.ParameterDict({'a': ps[0]})"
        ),
        ranks("ps[0].data += 1"),
        gives("pd['a'] is ps[0], pd['a'].item()", (True, 1)),
    ],
    "a storage in common, of other dtypes": [
        here("t = torch.zeros(2); i = t.view(torch.int32); s = t.untyped_storage()"),
        ranks("t += 1"),
        gives("i.tolist(), i.data_ptr() == t.data_ptr()", ([1065353216] * 2, True)),
    ],
    "a buffer": [
        here(
            "class N(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('steps', torch.zeros(1))\nn = N(); s = n.steps"
        ),
        ranks("n.steps += 1"),
        gives("s is n.steps, s.item()", (True, 1)),
        here("t = {'s': s}"),
        holds("t['s'] is n.steps"),
    ],
    "batch statistics": [
        here("b = torch.nn.BatchNorm1d(1); m = b.running_mean"),
        ranks("b(torch.ones(4, 1) * 10)"),
        gives(
            "round(m.item(), 3), m is b.running_mean, b.num_batches_tracked.item()", (1, True, 1)
        ),
        here("again = [b]"),
        gives("again[0] is b, round(b.running_mean.item(), 3)", (True, 1)),
    ],
    "frames and series of one table, of which the ranks change some": [
        here(
            "import pandas as pd\n"
            "raw = pd.DataFrame({'a': [1., -1.], 'b': [3., 4.], 'y': [0, 1]})\n"
            "X = raw.drop(columns='y'); ren = raw.rename(columns={'a': 'x'}); col = raw['b']"
        ),
        ranks("X.loc[X.a < 0, 'a'] = 0.; col.iloc[0] = 100."),
        gives("raw.a.tolist(), X.a.tolist(), ren.x.tolist()", ([1, -1], [1, 0], [1, -1])),
        gives("raw.b.tolist(), ren.b.tolist(), col.tolist()", ([3, 4], [3, 4], [100, 4])),
    ],
    "series of one table, of which the notebook changes one": [
        here("import pandas as pd\ns = pd.Series([1, 2]); t = s.copy(deep=False); u = s"),
        ranks("s.sum() + t.sum()"),
        here("s[0] = 5"),
        gives("s.tolist(), t.tolist(), u is s", ([5, 2], [1, 2], True)),
        here("s.name = 'n'; s.attrs['k'] = 1; s.index = ['x', 'y']"),
        gives("s.name, s.attrs, u.index.tolist()", ("n", {"k": 1}, ["x", "y"])),
    ],
    "many small tensors": [
        here("ts = {i: torch.full((2,), float(i)) for i in range(300)}"),
        ranks("kept = ts; ts[5] += 1"),
        here("ts[7] += 1; t5 = ts[5]"),
        gives("kept[7].tolist(), t5.tolist(), t5 is kept[5]", ([8, 8], [6, 6], True)),
    ],
}

BOTH: dict[str, list[Step]] = {
    "both add to a tensor": [
        here("t = torch.zeros(2)"),
        ranks("t += 1 + rank"),
        here("t += 5"),
        hinting(gives("t.tolist()", [1, 1], [2, 2]), "%dist_push t", "%dist_gather t"),
    ],
    "both change an array, at other places": [
        here("a = np.zeros(2)"),
        ranks("a[0] = 1"),
        here("a[1] = 5"),
        hinting(gives("float(a[0])", 1), "%dist_push a"),
    ],
    "one view each": [
        here("a = np.zeros(4); v, w = a[:2], a[2:]"),
        ranks("v += 1; print(w)"),
        here("w += 5"),
        hinting(gives("v.tolist()", [1, 1])),
    ],
    "both write into the file of a memory map": [
        here(
            "import tempfile\npath = tempfile.mkdtemp() + '/m'\n"
            "m = np.memmap(path, dtype='f8', mode='w+', shape=(4, 2)); v, t = m[2:], m.T\n"
            "own = np.memmap(path, dtype='f8', mode='c', shape=8); own[0] = 9"
        ),
        ranks("m[rank] = 1 + rank; v[rank] = 5; dist.barrier(); print(t[:, 3])", r"\[5. 5.\]"),
        gives_here("m.tolist()", [[1, 1], [2, 2], [5, 5], [5, 5]]),
        here("m[0] = 7; own[1] = 9"),
        gives(
            "t[0].tolist(), m[:, 0].tolist(), v.tolist()",
            ([7, 2, 5, 5], [7, 2, 5, 5], [[5, 5]] * 2),
        ),
        gives("own[:2].tolist()", [9, 9]),
        here("import os; os.replace(path, path + '2'); open(path, 'wb').close(); w = m[1:]"),
        gives("w[0].tolist(), t[0].tolist()", ([2, 2], [7, 2, 5, 5])),
    ],
    "both train": [
        here("model = net(); optimizer = sgd(model)"),
        ranks("print(train(model, optimizer))"),
        here("train(model, optimizer, 1)"),
        hinting(gives("train(model, optimizer)", 0.004), "model", "%dist_push", "%dist_gather"),
        gives("train(model, optimizer)", 0.0),
    ],
    "the notebook moves weights that the ranks have trained to other memory": [
        here("model = net(); t = torch.zeros(2)"),
        ranks("print(train(model, sgd(model), 1)); t += 1"),
        here("model.double(); t.data = t.data.clone()"),
        hinting(gives("model.weight.tolist(), t.tolist()", ([[2, 2]], [1, 1])), "%dist_push model"),
    ],
    "the ranks rename a frame's columns, and the notebook changes a value": [
        here("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2]})"),
        ranks("df.columns = ['r']"),
        here("df.loc[0, 'a'] = 10"),
        hinting(gives("df.columns.tolist(), int(df.iloc[0, 0])", (["r"], 1)), "%dist_push df"),
    ],
    "both change columns of a frame": [
        here("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2]})"),
        ranks("df['n'] = rank"),
        here("df['m'] = 5"),
        hinting(gives("df.n.tolist()", [0, 0], [1, 1]), "%dist_push df", "%dist_gather df"),
    ],
}


@table(CASES | BOTH)
def test_arrays_share_memory_as_in_a_plain_kernel(program: Run, name: str) -> None:
    """Values, identities and shared memory on the ranks are those of one plain kernel."""
    program((CASES | BOTH)[name])


@pytest.mark.unit
@table(CASES)
def test_values_are_those_of_a_plain_kernel(name: str) -> None:
    """A program gives equal values if one process runs it, without a notebook."""
    assert is_plain(CASES[name])
    run_in_one_process(CASES[name])
