"""Chat templates as programs that may be wrong or hostile: what they may do, and how much of it.

Owns the environment that templates run in: jinja2's sandbox with the filters and functions of `transformers`, made to
keep the authors of texts (authorship.py) and to end. Knows nothing about models or messages. Any thread.

Every way to repeat is charged to the rendering's budget (template_bounds.py); what stands between is as long as the
template at most.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any, TypeVar, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

from .authorship import Authored, TooLarge, join, joined, percent, shown, whole, writer_of
from .template_bounds import (
    MAX_INDENT_CHARS,
    MAX_NUMBER,
    MAX_NUMBER_BITS,
    MAX_TEMPLATE_CHARS,
    Budget,
    check_numbers,
    size_of,
)

_ITEMS, _SUM, _SLICE = "items of a loop", "sum or text", "part of"  # filters that no template can name
# What no chat needs: much text out of little, or a text for each part of another one.
LEFT_OUT_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
LEFT_OUT_GLOBALS = ("lipsum",)
REPEATING_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "truncate"})
FILLING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
WIDE_FIELD = re.compile(r"\{[^{}]*(?:\{|:[^{}]*\d{5})")
Made = TypeVar("Made")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs templates. The ones of one model share it."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=shown)
        self._running = threading.local()
        self.filters = {name: self._bounded(name, function) for name, function in (FILTERS | _EXACT).items()}
        self.filters |= {"join": self._join, "tojson": self._tojson, "sum": self._total}
        self.filters |= {_ITEMS: self._items, _SUM: self._sum, _SLICE: self._charged}
        self.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace, "dict": _Dict()}
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        for name in LEFT_OUT_FILTERS:
            del self.filters[name]
        for name in LEFT_OUT_GLOBALS:
            del self.globals[name]

    def template(self, text: str) -> Template:
        """Compiled. Raises TemplateError, TooLarge, TooMuchWork."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TooLarge(f"a template of more than {MAX_TEMPLATE_CHARS} characters")
        return self._within(Budget(0), lambda: self.from_string(text))

    def render(self, template: Template, input_chars: int, variables: Mapping[str, Any]) -> str:
        """The text with its authors. Raises TooLarge, TooMuchWork, and what the template raises."""
        return self._within(Budget(input_chars), lambda: template.render(variables))

    def concat(self, parts: Iterable[str]) -> str:
        """What a template, a macro or a block writes: its pieces in a row."""
        pieces = []
        for piece in parts:
            self._budget.charge(0, len(piece))
            pieces.append(piece)
        return joined(pieces)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A function, macro or method that a template calls."""
        receiver = getattr(obj, "__self__", None)
        if isinstance(receiver, str):
            if obj.__name__ in FILLING:
                check_numbers((*args, *kwargs.values()))
                self._budget.charge(1, MAX_NUMBER * receiver.count("\t") if obj.__name__ == "expandtabs" else 0)
            elif obj.__name__ == "translate":
                raise TooLarge("a text for every character")
            if type(receiver) is str:  # so that what it makes of authored texts has their authors
                obj = getattr(_authored(receiver), obj.__name__)
        made = super().call(context, obj, *args, **kwargs)
        self._budget.charge(1, size_of(made))
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that make much out of little."""
        if operator == "%" and isinstance(left, str):
            return self._charged(percent(left, right))
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                    self._budget.charge(1, size_of(value) * max(count, 0))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise TooLarge(f"a number of more than {MAX_NUMBER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of a template, with authors."""
        native = super().wrap_str_format(value)
        if native is None:
            return None
        text: str = value.__self__

        def format_text(*args: Any, **kwargs: Any) -> str:
            if WIDE_FIELD.search(text):
                raise TooLarge("a field of a text is too wide")
            fields = list(Formatter().parse(text))
            if value.__name__ != "format" or any(spec or conversion for _, _, spec, conversion in fields):
                return whole(str.__str__(native(*args, **kwargs)), writer_of((text, args, kwargs)))
            formatter, parts, numbers = SandboxedFormatter(self), [], iter(range(len(args)))
            for literal, name, _, _ in fields:
                parts.append(literal)
                if name is not None:
                    numbered = f"{next(numbers)}{name}" if name[:1] in ("", ".", "[") else name
                    parts.append(shown(formatter.get_field(numbered, args, kwargs)[0]))
            return joined(parts)

        format_text.__name__ = "format"
        return format_text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Rewritten().visit(tree)
        tree.set_environment(self)
        return tree

    def _within(self, budget: Budget, run: Callable[[], Made]) -> Made:
        self._running.budget = budget
        try:
            return run()
        finally:
            del self._running.budget

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._running.budget
        return budget

    def _charged(self, made: Any) -> Any:
        self._budget.charge(1, size_of(made))
        return made

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that does not repeat far, whose result is charged, and whose texts have authors."""
        own = 1 if hasattr(function, "jinja_pass_arg") else 0  # an argument that is jinja's

        @wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            if name in REPEATING_FILTERS:
                check_numbers((*args[own + 1 :], *kwargs.values()))
            made = function(*args, **kwargs)
            if isinstance(made, str) and type(made) is not Authored:
                made = whole(str.__str__(made), writer_of((args[own:], kwargs)))
            return self._charged(made)

        return filtered

    def _items(self, value: Any) -> Any:
        """What a loop goes through, charged in advance."""
        try:
            count = len(value)
        except TypeError:
            value = list(value)
            count = len(value)
        self._budget.charge(1 + count)
        return value

    def _sum(self, operands: tuple[Any, ...]) -> Any:
        """a + b + c."""
        if all(isinstance(operand, str) for operand in operands):
            return self._charged(joined(operands))
        total = operands[0]
        for operand in operands[1:]:
            total = self._charged(total + operand)
        return total

    def _join(self, values: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        made: str = self._charged(join(shown(separator), [shown(value) for value in values]))
        return made

    def _total(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """jinja's `sum`: of numbers, or of lists, which are copied for every one that follows."""
        values = [start, *(values if attribute is None else map(make_attrgetter(self, attribute), values))]
        self._budget.charge(len(values), len(values) * sum(map(size_of, values)))
        return sum(values[1:], start)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers: without escapes for HTML."""
        check_numbers([indent])
        author = writer_of(value)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        made: str = self._charged(whole(text, author))
        return made


class _Rewritten(NodeTransformer):
    """Loops, sums, `~` and slices go through filters of the sandbox, whose names no template can write."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)  # what is inside first
        if isinstance(node, nodes.For):
            node.iter = _filtered(cast(nodes.Expr, node.iter), _ITEMS)
        elif isinstance(node, nodes.Add):
            return _sum_of([*_operands(node.left), node.right], node)
        elif isinstance(node, nodes.Concat):
            return _sum_of([_filtered(operand, "string") for operand in node.nodes], node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, _SLICE)
        return node


def _operands(left: nodes.Expr) -> list[nodes.Expr]:
    """Those of a sum that stands on the left of a `+`."""
    if isinstance(left, nodes.Filter) and left.name == _SUM and isinstance(left.node, nodes.Tuple):
        return left.node.items
    return [left]


def _sum_of(operands: list[nodes.Expr], node: nodes.Node) -> nodes.Filter:
    return _filtered(nodes.Tuple(operands, "load", lineno=node.lineno), _SUM)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what a model writes, for training: its body and nothing else."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """As jinja's; names that begin with an underscore lead to Python's own attributes."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` as a function, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _authored(text: str) -> Authored:
    return text if isinstance(text, Authored) else Authored(text)


def _trim(value: Any, chars: str | None = None) -> str:
    return shown(value).strip(chars)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _authored(shown(value)).replace(shown(old), shown(new), -1 if count is None else count)


def _indent(value: Any, width: Any = 4, *options: Any, **named: Any) -> Any:
    if (len(width) if isinstance(width, str) else width) > MAX_INDENT_CHARS:
        raise TooLarge("an indent of a text")
    return FILTERS["indent"](value, width, *options, **named)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    return percent(shown(value), kwargs or args)


def _escaped(value: Any) -> str:
    return whole(str.__str__(escape(str.__str__(shown(value)))), writer_of(value))


# Texts stay texts: nothing here is HTML, and `Markup` would know nothing of authors.
_EXACT = {"string": shown, "safe": shown, "trim": _trim, "replace": _replace, "format": _format, "indent": _indent}
_EXACT |= dict.fromkeys(("e", "escape", "forceescape"), _escaped)
