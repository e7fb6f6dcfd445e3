"""Cutting batches, and counting their samples and tokens."""

import dataclasses
import functools
import re
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distaccum import count_samples, count_tokens
from distaccum.law import cut_evenly
from tests.support.windows import accumulating

Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: list
    scale: float = 1.0


def split(batch, length=None, whole=(), **sizes):
    model, accumulator = accumulating(nn.Linear(1, 1), **sizes)
    window = accumulator.split(batch, length, whole)
    parts = []
    for part in window:
        window.backward(model.weight.sum())
        parts.append(part)
    return parts


@pytest.mark.parametrize(("size", "steps", "sizes"), [(10, 4, [2, 2, 3, 3]), (3, 8, [1, 1, 1]), (0, 8, [])])
def test_steps_give_the_number_of_parts(size, steps, sizes):
    assert [len(part) for part in split(torch.zeros(size, 2), steps=steps)] == sizes


@given(length=st.integers(0, 500), largest=st.integers(1, 60))
def test_cut_is_complete_and_has_the_fewest_parts(length, largest):
    sizes = cut_evenly(length, largest=largest)
    assert sum(sizes) == length
    assert all(0 < size <= largest for size in sizes)
    assert len(sizes) == -(-length // largest)
    assert sizes == sorted(sizes) and max(sizes, default=0) - min(sizes, default=0) <= 1


def test_parts_are_views_of_the_batch():
    batch = torch.zeros(4, 2)
    for part in split(batch, steps=2):
        part += 1
    assert batch.sum() == 8


X, LATER = torch.arange(5.0), torch.arange(2.0, 5.0)
ROW = torch.zeros(1, 7)
# Entries of a batch of 5, and their second half.
ENTRIES = {
    "x": (X, LATER),
    "pair": (Pair(X, X), Pair(LATER, LATER)),
    "tuple": ((X, None), (LATER, None)),
    "list": ([X, ROW], [LATER, ROW]),
    "data": (Sample(X, list("abcde")), Sample(LATER, list("cde"))),
    "array": (np.arange(5), np.arange(2, 5)),
    "texts": (["a", "b", "c", "d", "e"], ["c", "d", "e"]),
    "collated texts": (("a", "b", "c", "d", "e"), ("c", "d", "e")),
    "labels": ([0, 1, 0, 1, 1], [0, 1, 1]),
    "ordered": (OrderedDict(x=X), OrderedDict(x=LATER)),
    "default": (defaultdict(list, x=X), defaultdict(list, x=LATER)),
    "user": (UserDict(x=X), UserDict(x=LATER)),
    **{f"whole {i}": [kept] * 2 for i, kept in enumerate([torch.Size((224, 224)), ROW, torch.tensor(3.0), 5, "hello"])},
}


def test_nested_batch_is_cut_along_the_batch_dimension():
    first, second = split({name: entry for name, (entry, _) in ENTRIES.items()}, steps=2)
    assert first["x"].tolist() == [0, 1] and X.tolist() == [0, 1, 2, 3, 4]
    for name, (entry, half) in ENTRIES.items():
        assert repr(second[name]) == repr(half) and type(second[name]) is type(entry)


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    n: int = 0

    def __post_init__(self) -> None:
        self.n = len(self.x)


@dataclasses.dataclass
class WithMean:
    x: torch.Tensor
    mean: torch.Tensor = dataclasses.field(init=False)


@pytest.mark.parametrize("kind", [Derived, WithMean])
def test_dataclass_that_derives_fields_is_counted_and_its_cut_refused(kind):
    whole = kind(torch.arange(5.0))
    whole.mean = torch.zeros(())
    assert count_samples(whole) == 5
    with pytest.raises(TypeError, match=rf"a {kind.__name__} derives fields .*window\(micro_batches"):
        split(whole, steps=2)


def test_tensors_that_cannot_be_cut_are_refused():
    rows = [torch.ones(n, 3) for n in (2, 4, 1, 3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for kind, value in (("nested tensor", nested), ("sparse tensor", torch.eye(5).to_sparse())):
        with pytest.raises(TypeError, match=f"the batch holds a {kind}.*: it cannot be cut; give a list of samples"):
            split({"x": torch.ones(5, 2), "more": {"rows": value}}, steps=2)
    rows = torch.ones(9)
    several = nn.utils.rnn.pack_sequence([rows] * 9, enforce_sorted=False)
    for packed in ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, {"position_ids": torch.arange(9) % 4}, {"x": several}):
        with pytest.raises(TypeError, match=r"packed sequences, .* of which '[cpb].*: it cannot be cut.*window\(micro"):
            split({"input_ids": rows, "labels": rows, **packed}, 9, steps=2)
    shared = torch.eye(7).to_sparse()
    assert all(part["graph"] is shared for part in split({"x": torch.ones(5), "graph": shared}, 5, steps=2))


UNEQUAL = [
    ({"a": torch.zeros(4, 2), "b": torch.zeros(6, 2)}, "{'a': 4, 'b': 6}"),
    # Two of three are no reason: sequences first, padding of another length, weights of classes.
    ((torch.zeros(4, 6, 5), torch.zeros(4, 6), torch.zeros(6)), "{'0': 4, '1': 4, '2': 6}"),
    ((torch.zeros(4, 1, 5), torch.zeros(4, 1), torch.zeros(1)), "{'0': 4, '1': 4, '2': 1}"),
    ({"x": torch.zeros(4, 2), "of": {"weights": torch.zeros(3)}}, "{'x': 4, 'of.weights': 3}"),
    ({"x": torch.zeros(5), "classes": ["cat", "dog"]}, "{'x': 5, 'classes': 2}"),
    ({"x": torch.zeros(5), "size": (224, 224)}, "{'x': 5, 'size': 2}"),
    ({"x": nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])}, "{'x.data': 4, 'x.batch_sizes': 3}"),
    # A list may be of samples or of columns, and nothing else says which.
    ({"images": [torch.zeros(3, 8, 8) for _ in range(5)]}, "{'images': 3 or 5}"),
    ({"images": [torch.zeros(1, 8, 8) for _ in range(5)]}, "{'images': 1 or 5}"),
    ([torch.zeros(4), torch.zeros(6), torch.zeros(4)], "{'list': 3 or 4 or 6}"),
    ([{"ids": torch.zeros(7)} for _ in range(4)], "{'list': 4 or 7}"),
    (({"x": torch.zeros(8)}, {"x": torch.zeros(24)}), "{'tuple': 2 or 8"),
]


@pytest.mark.parametrize(("batch", "lengths"), UNEQUAL)
def test_entries_that_differ_in_length_are_listed_with_the_cures(batch, lengths):
    said = rf"a batch are {re.escape(lengths)}.*split\(batch, length=n\), .*whole=\('name',\) .*count=, a function"
    for ask in (count_samples, functools.partial(split, steps=2)):
        with pytest.raises(ValueError, match=said):
            ask(batch)
    _, accumulator = accumulating(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=said):
        accumulator.window([batch])


def test_length_cuts_the_entries_of_that_length():
    batch = {"a": torch.zeros(4, 2), "b": torch.zeros(6, 2)}
    first, second = split(batch, length=6, steps=2)
    assert (len(first["a"]), len(first["b"]), len(second["b"])) == (4, 3, 3)
    with pytest.raises(ValueError, match="length=5 and nothing in the dict is as long"):
        split(batch, length=5, steps=2)
    rows = [torch.zeros(7) for _ in range(5)]
    assert [len(part) for part in split(rows, length=5, steps=2)] == [2, 3]


def image(size=8, channels=3):
    return torch.zeros(channels, size, size)


def boxes(n, of_hugging_face=False):
    target = {"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)}
    return {**target, "size": torch.zeros(2), "image_id": torch.zeros(1)} if of_hugging_face else target


BATCHES_OF = {
    # Detection: as Hugging Face's collators give it, as torchvision's, and uncollated.
    "a list of dicts": (2, {"x": torch.zeros(2, 3, 8, 8), "labels": [boxes(7, True), boxes(7, True)]}),
    "a list of one dict": (1, {"x": torch.zeros(1, 3, 8, 8), "labels": [boxes(7, True)]}),
    "a dict, and none": (3, {"x": torch.zeros(3, 2), "y": torch.zeros(3), "labels": [boxes(4), None, boxes(4)]}),
    "images and targets": (4, (tuple(image(s) for s in (8, 9, 8, 7)), tuple(boxes(n) for n in (3, 3, 1, 3)))),
    "two images, two targets": (2, ([image(8), image(9)], [boxes(1), boxes(5)])),
    "two images, three boxes each": (2, ([image(8), image(9)], [boxes(3), boxes(3)])),
    "a tensor of images, and targets": (2, (torch.zeros(2, 3, 8, 8), [boxes(1), boxes(5)])),
    "samples": (4, [{"image": image(s), "boxes": torch.zeros(5, 4)} for s in (8, 9, 8, 7)]),
    "pairs of image and number": (4, [(image(), label) for label in range(4)]),
    "pairs of image and label": (4, [(image(), torch.tensor(label)) for label in range(4)]),
    "images and labels": (5, {"images": [image() for _ in range(5)], "labels": torch.zeros(5)}),
    "numpy rows": (3, {"rows": [np.zeros(4), np.zeros(6), np.zeros(4)], "y": np.zeros(3)}),
    "rows of one width": (3, {"rows": [torch.zeros(9) for _ in range(3)], "y": torch.zeros(3)}),
    "rows, one as long as the batch": (3, {"rows": [torch.zeros(n) for n in (2, 3, 5)], "y": torch.zeros(3)}),
    "texts": (3, ["a", "b", "c"]),
    "texts with labels": (3, {"text": ("a", "b", "c"), "label": [0, 1, 0]}),
    "dicts of texts": (3, [{"text": "a", "label": 0} for _ in range(3)]),
    "plain numbers": (3, [1, 2, 3]),
    "rows of plain numbers": (2, {"ids": [[1, 2, 3], [4, 5, 6]], "labels": [0, 1]}),
    "one dict, and images of one": (1, {"x": torch.zeros(1, 3, 8, 8), "labels": [boxes(7)]}),
    # Columns: each entry has a value per sample.
    "a pair of columns": (2, (torch.zeros(2, 4), torch.zeros(2, 4))),
    "a list of columns": (5, [torch.zeros(5, 4), torch.zeros(5, 1)]),
    "inputs and masks": (5, {"in": [torch.zeros(5, 4), torch.zeros(5, 4).bool()]}),
    "a tuple of one column": (5, (torch.zeros(5, 4),)),
    "feature maps": (4, {"maps": [torch.zeros(4, 2, s, s) for s in (8, 4, 2)], "y": torch.zeros(4)}),
    "views of a sample": (4, ([torch.zeros(4, 3), torch.zeros(4, 3)], torch.zeros(4))),
    "tokens of two texts": (4, ([{"ids": torch.zeros(4, 7)}, {"ids": torch.zeros(4, 9)}], torch.zeros(4))),
    "a named tuple": (2, Pair(torch.zeros(2, 4), torch.zeros(2, 4))),
    "views of one sample": (1, ([torch.zeros(1, 3), torch.zeros(1, 3)], torch.zeros(1))),
    "a row for all samples": (5, {"x": torch.zeros(5, 2), "at": torch.zeros(1, 7), "shape": torch.zeros(2, 3).shape}),
}


@pytest.mark.parametrize("name", BATCHES_OF)
def test_batch_of_any_form_is_counted_and_cut_by_its_length(name):
    length, batch = BATCHES_OF[name]
    assert count_samples(batch) == length
    parts = split(batch, steps=length)
    assert len(parts) == length and [count_samples(part) for part in parts if length > 1] == [1] * length * (length > 1)


def test_parts_of_lists_are_entries_of_samples_and_rows_of_columns():
    first, second, _ = split(BATCHES_OF["a dict, and none"][1], steps=3)
    assert (len(first["x"]), len(first["labels"]), second["labels"]) == (1, 1, [None])
    images, targets = BATCHES_OF["images and targets"][1]
    (a, b), (c, d) = split((images, targets), steps=2)
    assert a + c == images and b + d == targets and type(a) is tuple
    first, second = split(BATCHES_OF["pairs of image and number"][1], steps=2)
    assert [label for _, label in second] == [2, 3]
    first, _ = split(BATCHES_OF["a pair of columns"][1], steps=2)
    assert [tensor.shape for tensor in first] == [(1, 4), (1, 4)] and split([], steps=2) == []
    first, second = split(BATCHES_OF["feature maps"][1], steps=2)
    assert [len(one) for one in first["maps"]] == [2, 2, 2]
    first, second = split(BATCHES_OF["tokens of two texts"][1], steps=2)
    assert [len(one["ids"]) for one in first[0]] == [2, 2]
    first, _, _ = split(BATCHES_OF["rows, one as long as the batch"][1], steps=3)
    assert [len(row) for row in first["rows"]] == [2]


@pytest.mark.parametrize(
    "batch",
    [
        {"maps": [torch.zeros(3, 2, s, s) for s in (8, 4, 2)], "y": torch.zeros(3)},
        ([torch.zeros(2, 4), torch.zeros(2, 4)], torch.zeros(2)),
        [("a", "b"), ("c", "d")],
    ],
)
def test_list_as_long_as_its_entries_is_refused_where_it_would_be_cut(batch):
    length = count_samples(batch)
    with pytest.raises(ValueError, match=rf"{length} entries, each with a first dimension of {length}: .*stack it"):
        split(batch, steps=2)


def test_batch_without_tensors_or_samples_needs_a_given_length():
    for batch in ("text", {"scale": 0.1, "x": torch.tensor(3.0)}, None):
        with pytest.raises(TypeError, match="length="):
            split(batch, steps=2)


def test_entries_said_to_be_whole_are_neither_counted_nor_cut():
    x, prior = torch.zeros(3, 2), torch.zeros(3)
    batch = {"x": x, "a": {"prior": prior, "y": x}, "b": torch.zeros(9), "c": torch.zeros(9)}
    for part in split(batch, None, ("b", "c", "prior"), steps=2):
        assert part["a"]["prior"] is prior and len(part["b"]) == len(part["c"]) == 9 and len(part["a"]["y"]) < 3
    for part in split((x, prior), whole=(1,), steps=3):
        assert len(part[0]) == 1 and part[1] is prior
    for part in split(Pair(x, prior), whole=["label"], steps=3):
        assert len(part.image) == 1 and part.label is prior
    for part in split(Sample(x, list("abc")), whole=("name",), steps=3):
        assert len(part.image) == 1 and part.name == list("abc")
    said = r"whole=\('pior',\) and the batch has no 'pior', expected some of \['prior', 'x'\]"
    with pytest.raises(ValueError, match=said):
        split({"x": x, "prior": prior}, whole=("pior",), steps=2)
    for wrong in ("prior", (1.5,)):
        with pytest.raises(TypeError, match="expected a tuple of names"):
            split({"x": x, "prior": prior}, whole=wrong, steps=2)


def test_entry_that_was_whole_and_is_cut_is_named_in_one_warning():
    model, accumulator = accumulating(nn.Linear(4, 3), micro_batch_size=1)

    def updates(**said):
        """Of 4, 3 and 3 samples, beside a prior over 3 classes."""
        for rows in (4, 3, 3):
            batch = {"x": torch.randn(rows, 4), "log_prior": torch.zeros(3)}
            loss_fn = lambda part: (model(part["x"]) + part["log_prior"]).square().mean()  # noqa: E731
            accumulator.update(batch, loss_fn, **{name: say(rows) for name, say in said.items()})

    with pytest.warns(UserWarning, match=r"'log_prior' is cut in a batch of 3 .*say whole=\('log_prior',\)") as seen:
        updates(length=lambda rows: rows)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updates(whole=lambda _: ("log_prior",))


def test_update_contrast_and_check_take_length_and_whole():
    model, accumulator = accumulating(nn.Linear(4, 2).double(), micro_batch_size=2)
    batch = {"x": torch.randn(6, 4).double(), "bias": torch.randn(2).double(), "other": torch.randn(2).double()}
    loss_fn = lambda part: (model(part["x"]) + part["bias"]).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match="'x': 6, 'bias': 2, 'other': 2}, expected one length"):
        accumulator.update(batch, loss_fn)
    for said in ({"length": 6}, {"whole": ("bias", "other")}):
        assert accumulator.update(batch, loss_fn, **said).counts == {"samples": 6}
        report = accumulator.check(batch, loss_fn, **said)
        assert report.equivalent and report.samples == 6
        update = accumulator.contrast(batch, lambda part: model(part["x"]), lambda z: (z @ z.T).mean(), **said)
        assert update.micro_batches == 3


def test_count_tokens_finds_labels_by_key_position_or_attribute():
    labels = torch.tensor([[1, -100, 2], [3, -100, -100]])
    assert count_tokens("labels")({"labels": labels}) == 3
    assert count_tokens(1)((None, labels)) == 3
    assert count_tokens("image")(Sample(labels, [])) == 3
    assert count_tokens("labels", shift=True)({"labels": labels}) == 1
    assert count_tokens("labels", ignore_index=2)({"labels": labels}) == 5
    with pytest.raises(TypeError, match=r"count_tokens\(0\) found NoneType in a Tensor"):
        count_tokens(0)(labels)  # it would be the first row
    with pytest.raises(TypeError, match=r"found NoneType in a dict.* position of the labels, of 'x', 'labels'"):
        count_tokens("label")({"x": labels, "labels": labels})
