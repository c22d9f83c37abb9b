"""Real configuration files with mistakes in them, under random layouts: each ends in a prediction or in a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isclose, isfinite, nan
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import stepgraph.lowering
from stepgraph.errors import InputError
from stepgraph.hwtargets.reading import load_target
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.prediction import predict
from stepgraph.report import Prediction

H100 = load_target("h100")
FOLDERS = (Path(__file__).parent / "data/hf", Path(stepgraph.lowering.__file__).parent / "configs")
TEXTS = tuple(path.read_text(encoding="utf-8") for folder in FOLDERS for path in sorted(folder.glob("*.json")))
EXAMPLES = 200
LONGEST_S = 2.0  # of processor time: a busy machine is not a bug
Config = dict[str, Any]

# layouts -------------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from((1, 1, 1, 2, 2, 4, 8, 3))
ODD: SearchStrategy[Any] = st.sampled_from(
    (
        0,
        -1,
        5,
        7,
        64,
        1000,
        10**6,
        10**9,
        10**9 + 1,
        2**63,
        10**30,
        True,
        None,
        "2",
        "",
        1.0,
        2.5,
        nan,
        float("inf"),
        [2],
        {},
    )
)
USUAL: Mapping[str, SearchStrategy[Any]] = MappingProxyType(
    {
        **dict.fromkeys(("tp", "pp", "dp", "ep", "etp", "micro_batch"), SIZES),
        "seq": st.sampled_from((None, 1, 8, 128, 1000, 4096, 8192)),
        "global_batch": st.sampled_from((None, None, 8, 64, 24)),
        "recompute": st.sampled_from(("none", "selective", "full")),
        "zero": st.sampled_from((0, 1)),
        "sp": st.sampled_from((None, None, True, False)),
        "tp_regather": st.sampled_from((None, None, True, False)),
        "capacity_factor": st.sampled_from((None, None, 1.0, 1.25, 3, 1e-3)),
        "expert_imbalance": st.sampled_from((1.0, 1.0, 1.5, 1000)),
    }
)


def some(most: int) -> SearchStrategy[dict[str, Any]]:
    """Fields with usual values, at most so many of them."""
    names = st.lists(st.sampled_from(sorted(USUAL)), max_size=most)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: USUAL[name] for name in chosen}))


@st.composite
def usual_layouts(draw: DrawFn) -> Layout:
    """A few fields that are not their defaults; the data ranks are often as many as the experts need."""
    fields = {"tp": draw(SIZES), "pp": draw(SIZES), **draw(some(5))}
    if draw(st.booleans()):
        fields["dp"] = fields.get("ep", 1) * fields.get("etp", 1) * draw(st.sampled_from((1, 2)))
    return Layout(**fields)


@st.composite
def odd_layouts(draw: DrawFn) -> Layout:
    """One to three fields are out of the ordinary."""
    odd = draw(st.lists(st.sampled_from(sorted(USUAL)), min_size=1, max_size=3))
    return Layout(**{**draw(some(4)), **{name: draw(ODD) for name in odd}})


# configurations ------------------------------------------------------------------------------------------------------


def objects(config: Config) -> list[Config]:
    """The objects whose keys speak of the language model, outermost first."""
    inner = (config[key] for key in ("thinker_config", "text_config") if isinstance(config.get(key), dict))
    return [config, *(found for each in inner for found in objects(each))]


def set_to(values: SearchStrategy[Any]) -> Callable[[DrawFn, Config, str], None]:
    def mutate(draw: DrawFn, keys: Config, key: str) -> None:
        keys[key] = draw(values)

    return mutate


def remove(draw: DrawFn, keys: Config, key: str) -> None:
    keys.pop(key, None)


def nudge(draw: DrawFn, keys: Config, key: str) -> None:
    """A number becomes another number of its size; anything else goes into a list or an object."""
    value = keys[key]
    if isinstance(value, bool) or not isinstance(value, int):
        keys[key] = draw(st.sampled_from(([value], {"value": value}, [value, value], [[value]], str(value))))
        return
    keys[key] = draw(st.sampled_from((value + 1, value - 1, 2 * value, value // 2, value * 3, -value, value // 7)))


def swap(draw: DrawFn, keys: Config, key: str) -> None:
    other = draw(st.sampled_from(sorted(keys)))
    keys[key], keys[other] = keys[other], keys[key]


def adopt(draw: DrawFn, keys: Config, key: str) -> None:
    """A key of another file, with its value there."""
    other = objects(json.loads(draw(st.sampled_from(TEXTS))))[-1]
    taken = draw(st.sampled_from(sorted(other)))
    keys[taken] = other[taken]


TYPES: tuple[Any, ...] = (
    None,
    "",
    "8",
    "none",
    "gelu",
    True,
    False,
    [],
    {},
    [None],
    [1, 2],
    ["full_attention"],
    {"a": {"b": [1]}},
)
SMALL = (0, 1, 2, 3, 7, -1, -8, 16, 48, 100)
HUGE = (10**4, 10**5, 10**5 + 1, 10**6, 10**9, 2**26, 99_328, 2**31, 2**63, 10**30, 10**400, -(10**18), 131_072)
FRACTIONS = (nan, float("inf"), -float("inf"), 0.5, 1.5, 8.0, 4096.0, 1e-300, 1e308, -0.0)
MUTATIONS: Mapping[str, Callable[[DrawFn, Config, str], None]] = MappingProxyType(
    {
        "remove": remove,
        "other type": set_to(st.sampled_from(TYPES)),
        "small": set_to(st.sampled_from(SMALL)),
        "huge": set_to(st.sampled_from(HUGE)),
        "fraction": set_to(st.sampled_from(FRACTIONS)),
        "nudge": nudge,
        "swap": swap,
        "adopt": adopt,
    }
)


@st.composite
def mutated(draw: DrawFn, mutation: str) -> Config:
    """A real file after one to three mutations of one kind."""
    config: Config = json.loads(draw(st.sampled_from(TEXTS)))
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.sampled_from(objects(config)))
        if keys:
            MUTATIONS[mutation](draw, keys, draw(st.sampled_from(sorted(keys))))
    return config


# mutated files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "config.json"


@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_a_file_with_mistakes_is_predicted_or_refused(mutation: str, path: Path) -> None:
    @settings(max_examples=EXAMPLES)
    @given(config=mutated(mutation), layout=usual_layouts())
    def run(config: Config, layout: Layout) -> None:
        assert_answered(path, config, layout)

    run()


@pytest.mark.parametrize("half", [0, 1])
def test_an_odd_layout_is_predicted_or_refused(half: int, path: Path) -> None:
    @settings(max_examples=EXAMPLES)
    @given(text=st.sampled_from(TEXTS[half::2]), layout=odd_layouts())
    def run(text: str, layout: Layout) -> None:
        assert_answered(path, json.loads(text), layout)

    run()


# the largest values that are accepted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "layout"),
    [
        ("llama-3-8b", {"num_hidden_layers": 10**5}, Layout()),
        ("llama-3-8b", {"num_hidden_layers": 10**5}, Layout(pp=64)),
        ("llama-3-8b", {}, Layout(dp=10**6)),
        ("llama-3-8b", {}, Layout(pp=8, global_batch=10**9)),
        ("gemma-2-9b", {"num_hidden_layers": 10**5}, Layout()),
        ("llama-3-8b", {}, Layout(dp=10**9)),
        ("llama-3-8b", {"hidden_size": 2**26}, Layout()),
        ("deepseek-v3", {"n_routed_experts": 10**9}, Layout()),
        ("llama-3-8b", {}, Layout(micro_batch=10**9)),
        ("llama-3-8b", {}, Layout(seq=10**9)),
    ],
)
def test_the_largest_values_are_answered_too(name: str, changes: Config, layout: Layout, path: Path) -> None:
    config = json.loads((FOLDERS[1] / f"{name}.json").read_text(encoding="utf-8"))
    assert_answered(path, {**config, **changes}, layout)


def assert_answered(path: Path, config: Config, layout: Layout) -> None:
    """Write the file, go all the way, and look at what comes out."""
    path.write_text(json.dumps(config), encoding="utf-8")
    start = process_time()
    try:
        prediction = predict(load_model(path), layout, H100)
    except InputError as refusal:
        assert refusal.problems and all(p.code and p.where and p.what for p in refusal.problems), refusal
    else:
        assert_sound(prediction)
    assert process_time() - start < LONGEST_S


def assert_sound(prediction: Prediction) -> None:
    """All numbers are finite, none of the seconds is negative, and the buckets of every stage add up to the step."""
    assert isfinite(prediction.step_time_s) and prediction.step_time_s > 0
    numbers = json.loads(json.dumps(prediction.to_json(), allow_nan=False))  # refuses NaN and infinity
    for buckets in (numbers["buckets_s"], *(stage["buckets_s"] for stage in numbers["stages"])):
        assert min(buckets.values()) >= 0
        assert isclose(sum(buckets.values()), prediction.step_time_s, rel_tol=1e-9)
