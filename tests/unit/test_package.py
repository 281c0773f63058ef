"""The package from outside: light to import, and what it says it exports it has."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import textwrap

import pytest

import coterie

HEAVY = ("torch", "transformers", "numba", "numpy", "safetensors", "yaml")


def loaded_after(statements: str, *names: str) -> set[str]:
    """Which of these packages a new interpreter holds after running `statements`."""
    code = f"import sys\n{textwrap.dedent(statements)}\nprint('LOADED', *(set({names}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("LOADED")[1].split())


def test_importing_it_costs_nothing() -> None:
    assert loaded_after("import coterie", *HEAVY, "coterie.placement") == set()


def test_no_verb_loads_arrays_before_it_works() -> None:
    verbs = [
        "",
        "compare",
        "place",
        "export",
        "validate",
        "trace import",
        "trace prune",
        "widths",
        "calibrate",
        "tune",
        "cap",
        "bench parallel",
        "drift",
        "report",
        "advise",
        "loads",
        "study stability",
        "study transfer",
        "study pruning",
    ]
    run = f"""
    from coterie.cli.main import main
    for verb in {verbs}:
        sys.argv = ["coterie", *verb.split(), "--help"]
        try:
            main()
        except SystemExit as stopped:
            assert not stopped.code, verb
    """
    assert loaded_after(run, *HEAVY) == set()


def test_no_module_of_the_package_needs_torch() -> None:
    """Whatever is imported offline works where there is no torch at all."""
    names = [
        found.name for found in pkgutil.walk_packages(coterie.__path__, "coterie.") if "__main__" not in found.name
    ]
    offline = [
        name for name in names if name.split(".")[1] in ("cli", "engines", "placement", "profile", "pruning", "trace")
    ]
    assert len(offline) > 30
    assert loaded_after(f"import {', '.join(offline)}", "torch", "transformers") == set()


def test_everything_exported_is_there() -> None:
    assert len(set(coterie.__all__)) == len(coterie.__all__) > 1
    for name in coterie.__all__:
        value = getattr(coterie, name)
        assert name in dir(coterie)
        if name != "__version__":
            assert getattr(importlib.import_module(value.__module__), name) is value


def test_nothing_exported_needs_torch_before_it_is_called() -> None:
    """Whoever lacks torch is told what to install, by the call, and can look everything up."""
    assert loaded_after("import coterie\nfor name in coterie.__all__: getattr(coterie, name)", *HEAVY[:2]) == set()
    call = """
    sys.modules["torch"] = None
    import coterie
    try:
        coterie.expert_parallel("model", None, None)
    except coterie.CoterieError as error:
        assert "running models needs torch, which is not installed; run: pip install 'coterie[models]'" in str(error)
    else:
        raise AssertionError("it ran without torch")
    """
    loaded_after(call)


def test_what_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'coterie' has no attribute 'Placements'"):
        coterie.Placements  # noqa: B018 - the access is the test
