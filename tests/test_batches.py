"""Cutting batches, and counting their samples and tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from distaccum.law.batches import fingerprint, join_batches
from distaccum.law.shares import cut_evenly

Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: list
    scale: float = 1.0


def split(batch, length=None, **sizes):
    model = nn.Linear(1, 1)
    window = Accumulator(model, SGD(model.parameters(), lr=0.1), **sizes).split(batch, length)
    parts = []
    for part in window:
        window.backward(model.weight.sum())
        parts.append(part)
    return parts


def test_split_cuts_101_samples_of_which_50_fit_into_three_parts():
    parts = split(torch.arange(101.0).unsqueeze(1), micro_batch_size=50)
    assert [len(part) for part in parts] == [33, 34, 34]
    assert torch.equal(torch.cat(parts).squeeze(1), torch.arange(101.0))


def test_steps_give_the_number_of_parts():
    assert [len(part) for part in split(torch.zeros(10, 2), steps=4)] == [2, 2, 3, 3]


def test_samples_fewer_than_steps_make_one_part_each():
    assert [len(part) for part in split(torch.zeros(3, 2), steps=8)] == [1, 1, 1]


def test_empty_batch_has_no_parts():
    assert split(torch.zeros(0, 2), steps=8) == []


@given(length=st.integers(0, 500), largest=st.integers(1, 60))
def test_cut_is_complete_and_has_the_fewest_parts(length, largest):
    sizes = cut_evenly(length, largest=largest)
    assert sum(sizes) == length
    assert all(0 < size <= largest for size in sizes)
    assert len(sizes) == -(-length // largest)
    assert sizes == sorted(sizes)


def test_parts_are_views_of_the_batch():
    batch = torch.zeros(4, 2)
    for part in split(batch, steps=2):
        part += 1
    assert batch.sum() == 8


def test_nested_batch_is_cut_along_the_batch_dimension():
    x = torch.arange(5.0)
    batch = {
        "x": x,
        "pair": Pair(x, x),
        "tuple": (x, None),
        "list": [x, torch.zeros(1, 7)],
        "data": Sample(x, list("abcde")),
        "array": np.arange(5),
        "texts": ["a", "b", "c", "d", "e"],
        "collated texts": ("a", "b", "c", "d", "e"),
        "other list": [1, 2],
        "size": (224, 224),
        "positions": torch.arange(3).unsqueeze(0),
        "scalar": torch.tensor(3.0),
        "number": 5,
        "text": "hello",
        "ordered": OrderedDict(x=x),
        "default": defaultdict(list, x=x),
        "user": UserDict(x=x),
    }
    first, second = split(batch, steps=2)
    assert first["x"].tolist() == [0, 1]
    assert second["x"].tolist() == [2, 3, 4]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].label.tolist() == [2, 3, 4]
    assert second["tuple"][0].tolist() == [2, 3, 4]
    assert second["tuple"][1] is None
    assert second["list"][0].tolist() == [2, 3, 4]
    assert second["list"][1].shape == (1, 7)
    assert (second["data"].image.tolist(), second["data"].name) == ([2, 3, 4], ["c", "d", "e"])
    assert second["data"].scale == 1.0
    assert second["array"].tolist() == [2, 3, 4]
    assert second["texts"] == ["c", "d", "e"]
    assert second["collated texts"] == ("c", "d", "e")
    assert (second["other list"], second["size"], second["number"]) == ([1, 2], (224, 224), 5)
    assert second["positions"].shape == (1, 3)
    assert second["scalar"] == 3
    assert second["text"] == "hello"
    for kind in ("ordered", "default", "user"):
        assert type(second[kind]) is type(batch[kind])
        assert second[kind]["x"].tolist() == [2, 3, 4]
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    n: int = dataclasses.field(init=False)
    total: int = 0
    mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.n = self.total = self.twice = len(self.x)
        self.mask = self.x > 0 if self.mask is None else self.mask

    @functools.cached_property
    def length(self) -> int:
        return len(self.x)


@dataclasses.dataclass
class Cached:
    x: torch.Tensor

    @functools.cached_property
    def length(self) -> int:
        return len(self.x)


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 2


@dataclasses.dataclass
class ScaledAndDerived(Scaled):
    mean: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean = self.x.mean()


@dataclasses.dataclass
class WholeAlone:
    x: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.x) != 5:
            raise ValueError("expected five rows")


@dataclasses.dataclass
class WholeAloneAndDerived(WholeAlone):
    n: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n = len(self.x)


def test_derived_fields_of_a_dataclass_fit_each_part():
    x = torch.arange(5.0)
    whole = Derived(x)
    assert whole.length == 5
    for part, size in zip(split({"data": whole, "y": x}, steps=2), (2, 3), strict=True):
        data = part["data"]
        assert (data.n, data.total, data.twice, data.length) == (size, size, size, size)
        assert torch.equal(data.mask, data.x > 0) and data.x.data_ptr() in (x.data_ptr(), x[2:].data_ptr())
    assert (whole.n, whole.total, whole.twice, whole.length) == (5, 5, 5, 5)
    cached = Cached(x)
    assert [cached.length, *(part.length for part in split(cached, steps=2))] == [5, 2, 3]
    joined = join_batches([Derived(x), Derived(x[:2])], [5, 2])
    assert (joined.n, joined.twice, len(joined.mask)) == (7, 7, 7)


def test_dataclass_that_changes_its_fields_is_cut_as_is_or_refused():
    x = torch.arange(5.0)
    assert torch.equal(torch.cat([part.x for part in split(Scaled(x), steps=2)]), x / 2)
    assert torch.equal(torch.cat([part.x for part in split(WholeAlone(x), steps=2)]), x)
    with pytest.raises(TypeError, match=r"ScaledAndDerived.__post_init__ changes x, which it did .*window\(micro_b"):
        split(ScaledAndDerived(x), steps=2)
    with pytest.raises(TypeError, match=r"a WholeAloneAndDerived of a part of its samples cannot be made \(ValueError"):
        split(WholeAloneAndDerived(x), steps=2)


@dataclasses.dataclass
class WithColumns:
    x: torch.Tensor
    names: list
    noisy: torch.Tensor = dataclasses.field(init=False)
    length: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.x, self.names = self.x.clone(), list(self.names)
        self.noisy = self.x + torch.randn(len(self.x))
        self.length = len(self.x)
        self.cache = None


def test_derived_column_of_a_dataclass_is_cut_and_not_recomputed():
    whole = WithColumns(torch.arange(5.0), list("abcde"))
    whole.weights = torch.arange(5.0) * 2
    parts = split(whole, steps=2)
    assert [part.length for part in parts] == [2, 3] and [part.cache for part in parts] == [None, None]
    for name in ("x", "noisy", "weights"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    assert [part.names for part in parts] == [["a", "b"], ["c", "d", "e"]]


def test_tensors_that_cannot_be_cut_are_refused():
    rows = [torch.ones(n, 3) for n in (2, 4, 1, 3, 5)]
    kinds = {
        "PackedSequence": nn.utils.rnn.pack_sequence(rows, enforce_sorted=False),
        "nested tensor": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse tensor": torch.eye(5).to_sparse(),
    }
    for kind, value in kinds.items():
        with pytest.raises(TypeError, match=f"the batch holds a {kind}.*: it cannot be cut; give a list of samples"):
            split({"x": torch.ones(5, 2), "more": [value]}, steps=2)
    rows = torch.ones(9)
    for packed in ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, {"position_ids": torch.arange(9) % 4}):
        with pytest.raises(TypeError, match=r"packed sequences, .* of which '[cp].*: it cannot be cut.*window\(micro"):
            split({"input_ids": rows, "labels": rows, **packed}, steps=2)
    shared = torch.eye(7).to_sparse()
    assert all(part["graph"] is shared for part in split({"x": torch.ones(5), "graph": shared}, 5, steps=2))


def test_tie_between_batch_lengths_is_refused_until_length_is_given():
    batch = {"a": torch.zeros(4, 2), "b": torch.zeros(6, 2)}
    with pytest.raises(ValueError, match=r"\[4, 6\], a tie.*length=n"):
        split(batch, steps=2)
    first, second = split(batch, length=6, steps=2)
    assert (len(first["a"]), len(first["b"]), len(second["b"])) == (4, 3, 3)


def test_list_of_one_tensor_per_sample_is_cut_by_a_given_length():
    batch = {"images": [torch.zeros(3, 4, 4) for _ in range(5)], "labels": torch.arange(5)}
    first, second = split(batch, length=5, steps=2)
    assert (len(first["images"]), len(second["images"]), second["labels"].tolist()) == (2, 3, [2, 3, 4])


def test_length_that_no_tensor_has_is_refused():
    with pytest.raises(ValueError, match=r"length=3.*nothing"):
        split({"a": torch.zeros(4, 2)}, length=3, steps=2)


def test_batch_without_tensors_needs_a_given_length():
    with pytest.raises(TypeError, match="length="):
        split(["a", "b", "c"], steps=2)
    assert split(["a", "b", "c"], length=3, steps=2) == [["a"], ["b", "c"]]


def test_count_samples_takes_the_dimension_that_most_tensors_share():
    batch = {"ids": torch.zeros(4, 16), "labels": torch.zeros(4, 16), "positions": torch.zeros(1, 16)}
    assert count_samples(batch) == 4
    assert count_samples((torch.zeros(3, 2), torch.zeros(3))) == 3


def test_count_tokens_finds_labels_by_key_position_or_attribute():
    labels = torch.tensor([[1, -100, 2], [3, -100, -100]])
    assert count_tokens("labels")({"labels": labels}) == 3
    assert count_tokens(1)((None, labels)) == 3
    assert count_tokens("image")(Sample(labels, [])) == 3
    assert count_tokens("labels", shift=True)({"labels": labels}) == 1
    assert count_tokens("labels", ignore_index=2)({"labels": labels}) == 5


def test_count_tokens_names_the_type_found_instead_of_labels():
    with pytest.raises(TypeError, match=r"count_tokens\('labels'\) found NoneType in a dict"):
        count_tokens("labels")({"x": 1})


def test_fingerprint_passes_over_sparse_and_nested_tensors():
    dense = torch.arange(3.0)
    nested = torch.nested.nested_tensor([dense, dense[:2]], layout=torch.jagged)
    batch = {"x": dense, "sparse": torch.eye(3).to_sparse(), "nested": nested}
    assert fingerprint(batch) == fingerprint({"x": dense})
    assert fingerprint(batch) != fingerprint({**batch, "x": dense + 1})
