"""The compiled core is never stale: what counts as fresh, and what is removed."""

import os

import pytest

from controlplane.scheduler import compile as core


@pytest.fixture
def tree(tmp_path):
    """Sources of the group and their shared objects, all empty, sources a second older."""
    for module in core.MODULES:
        source = core.source_of(module, tmp_path)
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
        os.utime(source, ns=(1_000_000_000, 1_000_000_000))
    for name in (*core.MODULES, core.LIBRARY):
        built = core.object_of(name, tmp_path)
        built.touch()
        os.utime(built, ns=(2_000_000_000, 2_000_000_000))
    return tmp_path


def test_objects_newer_than_all_sources_are_fresh(tree):
    assert core.is_fresh(tree)
    assert not core.is_stale(tree)
    assert len(core.objects(tree)) == len(core.MODULES) + 1


def test_one_newer_source_makes_all_stale(tree):
    source = core.source_of(core.MODULES[3], tree)
    os.utime(source, ns=(3_000_000_000, 3_000_000_000))
    assert not core.is_fresh(tree)
    assert core.is_stale(tree)


def test_a_missing_object_makes_the_rest_stale(tree):
    core.object_of(core.LIBRARY, tree).unlink()
    assert core.is_stale(tree)


def test_no_objects_are_not_stale(tree):
    assert core.remove(tree) == len(core.MODULES) + 1
    assert core.objects(tree) == []
    assert not core.is_stale(tree)
    assert not core.is_fresh(tree)
    assert all(core.source_of(module, tree).is_file() for module in core.MODULES)


def test_objects_of_another_python_are_removed_too(tree):
    other = core.object_of(core.MODULES[0], tree).with_suffix("").with_suffix(".cpython-399-x.so")
    other.touch()
    assert other in core.objects(tree)
    core.remove(tree)
    assert not other.exists()


def test_what_these_tests_ran_against_was_not_stale():
    assert not core.is_stale(), "the sources of the decision core are newer: run `make compile`"
