"""Run by the `build` session inside a clean environment: `python -I installed.py PACKAGE SIBLING ...`.

Says what is wrong with the installation of PACKAGE, if anything: its siblings must be exactly the ones named.
"""

import importlib
import sys
from importlib import metadata
from pathlib import Path

OURS = ("llama-core", "llama-kernels", "llama-parallel", "llama-train", "llama-infer")


def main(package: str, *siblings: str) -> None:
    present = {name for name in OURS if any(True for _ in metadata.distributions(name=name))}
    assert present == {package, *siblings}, f"{package} brought {sorted(present)}"

    module = importlib.import_module(package.replace("-", "_"))
    folder = Path(str(module.__file__)).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not in {sys.prefix}"
    assert (folder / "py.typed").is_file(), "no py.typed: type checkers would ignore the package"

    distribution = metadata.distribution(package)
    licences = [str(path) for path in distribution.files or () if path.name == "LICENSE"]
    assert licences, "the wheel carries no licence"
    for command in distribution.entry_points:
        assert callable(command.load()), command
    print(package, distribution.version, "imports;", "with", ", ".join(sorted(present - {package})) or "no sibling")


if __name__ == "__main__":
    main(*sys.argv[1:])
