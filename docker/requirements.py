"""Prints what an image has to install before the project itself: `requirements.py [--extra NAME]... PYPROJECT...`

Images install this first and the project's own code last, so that a change of code rebuilds one small layer.
Needs Python 3.11 or newer; nothing is installed and nothing imported but the standard library.
"""

import argparse
from pathlib import Path

import tomllib

OWN_PACKAGES = ("tritandem", "tritandem-client", "tritandem-loadtest", "tritandem-bench")


def requirements(pyprojects: list[Path], extras: list[str]) -> list[str]:
    """Every requirement that is not one of our own packages. Raises SystemExit for an extra that nobody declares."""
    projects = [tomllib.loads(path.read_text())["project"] for path in pyprojects]
    found = [line for project in projects for line in project["dependencies"]]
    for extra in extras:
        declared = [p["optional-dependencies"][extra] for p in projects if extra in p.get("optional-dependencies", {})]
        if not declared:
            raise SystemExit(f"no project declares the extra {extra!r}")
        found += [line for lines in declared for line in lines]
    return sorted({line for line in found if line not in OWN_PACKAGES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pyprojects", nargs="+", type=Path, metavar="PYPROJECT")
    parser.add_argument("--extra", action="append", default=[])
    args = parser.parse_args()
    print("\n".join(requirements(args.pyprojects, args.extra)))


if __name__ == "__main__":
    main()
