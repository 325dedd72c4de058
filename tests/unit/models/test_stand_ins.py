"""Stand-ins behave as what they stand for, and are replaced by it."""

import builtins
import sys

import pytest

from automodel.models.lean_imports import _answers_about_sizes, _Distributions
from automodel.models.stand_ins import Rules, StandIn, StandInImports, real_object


@pytest.fixture
def without(monkeypatch):
    """A standard module that nobody here has imported, put back as it was."""

    def forget(name):
        monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    return forget


def imports(names, **rules):
    settings = {"answers": {}, "packages": ("somebody.",), "files": (), "ask_the_compiler": (), **rules}
    hook = StandInImports(Rules(names=names, **settings), lambda importer, module: None)
    hook.install()
    return hook


def run_as(name, code):
    namespace = {"__name__": name, "__package__": name.rpartition(".")[0]}
    exec(code, namespace)
    return namespace


def test_a_name_is_stood_in_for_until_it_is_called(without):
    without("colorsys")
    imports({"colorsys": {"rgb_to_hsv"}})
    file = run_as("somebody.colours", "from colorsys import rgb_to_hsv as convert")
    assert isinstance(file["convert"], StandIn)
    assert "colorsys" not in sys.modules
    assert file["convert"](1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert "colorsys" in sys.modules


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("another.colours", "from colorsys import rgb_to_hsv"),  # not in the packages
        ("somebody.colours", "from colorsys import rgb_to_hsv, hsv_to_rgb"),  # a name that is not in the table
        ("somebody.colours", "import colorsys"),
    ],
)
def test_everything_else_is_imported_as_ever(without, importer, code):
    without("colorsys")
    imports({"colorsys": {"rgb_to_hsv"}})
    file = run_as(importer, code)
    assert "colorsys" in sys.modules
    assert not any(isinstance(value, StandIn) for value in file.values())


def test_it_is_replaced_wherever_it_went_once_anybody_imports_the_module(without):
    without("colorsys")
    imports({"colorsys": {"rgb_to_hsv"}})
    files = [run_as(f"somebody.{n}", "from colorsys import rgb_to_hsv as convert") for n in "ab"]
    import colorsys

    assert all(file["convert"] is colorsys.rgb_to_hsv for file in files)
    assert run_as("somebody.c", "from colorsys import rgb_to_hsv")["rgb_to_hsv"] is colorsys.rgb_to_hsv


def test_a_package_that_is_not_installed_fails_as_ever(without):
    imports({"not_installed_here.part": {"name"}})
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        run_as("somebody.file", "from not_installed_here.part import name")


def test_without_its_module_a_class_has_no_instances(without):
    without("sched")
    scheduler = StandIn("scheduler", module="sched")
    assert not isinstance(object(), scheduler)
    assert "sched" not in sys.modules
    assert isinstance(real_object(scheduler)(), scheduler)
    assert not isinstance(object(), scheduler)
    assert str(scheduler | None)  # as in an annotation


def test_a_class_derived_from_a_stand_in_is_derived_from_the_real_one(without):
    without("sched")
    stand_in = StandIn("scheduler", module="sched")

    class Mine(stand_in):
        def hello(self):
            return "hello"

    assert issubclass(Mine, real_object(stand_in))
    assert Mine().hello() == "hello"
    assert Mine().empty()  # the real class's own method


def test_attributes_are_those_of_the_real_object(without):
    without("sched")
    stand_in = StandIn("scheduler", module="sched")
    assert stand_in.run is real_object(stand_in).run
    assert not hasattr(stand_in, "no_such_thing")


def test_withdrawing_gives_pythons_own_import_back(without):
    before = builtins.__import__
    hook = imports({})
    assert builtins.__import__ is hook
    hook.withdraw()
    assert builtins.__import__ is before


def test_answers_about_sizes_are_torchs_own():
    from torch.fx.experimental import symbolic_shapes

    arguments = [(True,), (False,), (3,), (0,), (True, False), (True, True, False), (2, 2), (2, 3), (1, 2, 3)]
    arguments += [((2, 3), (2, 3)), ((2, 3), (2, 4)), ((2, 3), (2,)), ((), ())]
    compared = 0
    for name, answer in _answers_about_sizes().items():
        real = getattr(symbolic_shapes, name, None)  # some are of one version of torch only
        for args in arguments if real else []:
            given = answer(*args)
            if given is NotImplemented:
                continue
            assert given == real(*args), (name, args)
            assert type(given) is type(real(*args)), (name, args)
            compared += 1
    assert compared > 20


def test_answers_leave_everything_symbolic_to_torch():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    for name, answer in _answers_about_sizes().items():
        assert answer(size) is NotImplemented, name
        assert answer(size, 2) is NotImplemented, name


def test_distributions_are_those_of_the_installed_packages():
    from importlib.metadata import packages_distributions

    every = packages_distributions()
    with _Distributions.in_place():
        import importlib.metadata

        asked = importlib.metadata.packages_distributions()
    assert asked["torch"] == every["torch"]
    assert asked.get("no_such_package", []) == []
    assert asked.get("yaml") == every["yaml"]
    assert dict(asked) == dict(every)
    assert importlib.metadata.packages_distributions is packages_distributions
