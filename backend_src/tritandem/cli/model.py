"""`tritandem model fetch | list | path | show`: the models that can be had by name, and what is in one."""

from __future__ import annotations

import argparse
from typing import Any

from tritandem.models.catalog import CATALOG, DEFAULT_MODEL
from tritandem.models.fetch import fetch, fetched, in_cache

from . import model_show
from .narrator import Narrator


def add_parser(subparsers: Any) -> None:
    about = "fetch, find and look into models"
    parser = subparsers.add_parser("model", help=about, description=f"{about.capitalize()}.")
    actions = parser.add_subparsers(required=True, metavar="fetch|list|path|show")
    fetch_parser = actions.add_parser("fetch", help="download, check and convert; prints the folder")
    fetch_parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s")
    fetch_parser.set_defaults(run=run_fetch)
    actions.add_parser("list", help="names, and whether they are fetched").set_defaults(run=run_list)
    path_parser = actions.add_parser("path", help="the folder of a fetched model")
    path_parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s")
    path_parser.set_defaults(run=run_path)
    model_show.add_parser(actions)


def run_fetch(args: argparse.Namespace) -> int:
    print(fetch(args.name, Narrator()))
    return 0


def run_list(args: argparse.Namespace) -> int:
    for name, model in sorted(CATALOG.items()):
        folder = fetched(name)
        print(f"{name:<12} {folder or 'not fetched'}\n{'':<12} {model.description}")
    return 0


def run_path(args: argparse.Namespace) -> int:
    print(in_cache(args.name))
    return 0
