import inspect
import pickle

import pytest

from memkv_pp import errors
from memkv_pp.errors import (
    CapacityError,
    ConfigError,
    MemkvError,
    OutOfRecords,
    StageError,
    StageLost,
    StageShortfall,
)

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, MemkvError)
]
SHORT = StageShortfall(stage=1, have_bytes=10, need_bytes=20)


def fields_of(error: MemkvError) -> dict[str, object]:
    return {"text": str(error), **vars(error)}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_a_docstring_of_its_own_and_is_drawn_in_the_tree(kind):
    assert kind.__dict__.get("__doc__")
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_fields(kind):
    if issubclass(kind, CapacityError):
        error = kind("no room", "fewer tokens", (SHORT,))
    elif issubclass(kind, StageError):
        error = kind("gone", "restart it", 3)
    else:
        error = kind("bad", "do better")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert fields_of(copy) == fields_of(error)
    assert copy.hint == error.hint != ""


def test_the_stages_of_a_shortage_and_the_number_of_a_lost_stage_are_fields():
    assert OutOfRecords("m", "h", (SHORT,)).stages == (SHORT,)
    assert StageLost("m", "h", 3).stage == 3


def test_a_users_mistake_is_a_value_error_too():
    assert issubclass(ConfigError, ValueError)


def test_the_hint_follows_the_message_in_brackets():
    assert str(MemkvError("what", "do this")) == "what (do this)"
    assert str(MemkvError("what")) == "what"
