"""Go's templates as services use them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.templates import DEEPEST, Table, check, expand
from engine.errors import InvalidParameter

VALUES: dict[str, Any] = {
    "Service": {"ID": "s1", "Name": "web", "Labels": {"tier": "front", "a-b": "c"}},
    "Node": {"Hostname": "host1", "Platform": {"OS": "linux"}},
    "Task": {"Slot": "3"},
    "List": ["a", "b", "c"],
    "Empty": [],
    "Table": Table({"x": "y"}),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain } text", "plain } text"),
        ("{{.Task.Slot}}", "3"),
        ("a-{{ .Service.Name }}-{{.Task.Slot}}-b", "a-web-3-b"),
        ("{{.Service.Labels.tier}}", "front"),
        ('{{index .Service.Labels "a-b"}}', "c"),
        ('{{index .Service.Labels "none"}}', ""),
        ("{{.Service.Labels}}", "map[a-b:c tier:front]"),
        ('{{"quoted }} \\"x\\" \\n"}}', 'quoted }} "x" \n'),
        ("{{`raw \\n`}}", "raw \\n"),
        ("{{/* a comment */}}x", "x"),
        ("a  {{- .Task.Slot -}}  b", "a3b"),
        ("a {{- /* gone */ -}} b", "ab"),
        ('{{join "," "a" "b" .Task.Slot}}', "a,b,3"),
        ('{{.Node.Hostname | printf "%s:%v" "x"}}', "x:host1"),
        ('{{printf "%q %d%%" "a" 7}}', '"a" 7%'),
        ('{{printf "%s"}}', "%!s(MISSING)"),
        ('{{if eq .Task.Slot "3"}}three{{else}}other{{end}}', "three"),
        ('{{if eq .Task.Slot "4"}}four{{else if eq .Node.Hostname "host1"}}one{{else}}x{{end}}', "one"),
        ('{{if ne .Task.Slot "3"}}x{{end}}y', "y"),
        ('{{if and .Task.Slot (not "")}}a{{end}}{{if or "" .Task.Slot}}b{{end}}', "ab"),
        ("{{range .Service.Labels}}<{{.}}>{{end}}", "<c><front>"),
        ("{{print 1 true}}", "1true"),
        ("{{len .Node.Hostname}}", "5"),
        ("{{eq 1 2 1}}", "true"),
        ("{{ (index .Service.Labels `tier`) | print }}", "front"),
        ("{{.}}", "map[Empty:[] List:[a b c] Node:map[Hostname:host1 Platform:map[OS:linux]] "
         "Service:map[ID:s1 Labels:map[a-b:c tier:front] Name:web] Table:map[x:y] Task:map[Slot:3]]"),
        ("{{.List}} {{len .List}}", "[a b c] 3"),
        ("{{index .List 1}}", "b"),
        ("{{range .List}}<{{.}}>{{end}}", "<a><b><c>"),
        ("{{range .Empty}}x{{else}}none{{end}}", "none"),
        ("{{with .Task.Slot}}slot {{.}}{{else}}none{{end}}", "slot 3"),
        ("{{with .Empty}}x{{else}}{{.Task.Slot}}{{end}}", "3"),
        ("{{with .Empty}}x{{else with .List}}{{.}}{{end}}", "[a b c]"),
        ("{{with .Node}}{{.Hostname}} {{$.Task.Slot}}{{end}}", "host1 3"),
        ("{{range .List}}{{$.Task.Slot}}{{end}}", "333"),
        ("{{with $}}{{.Task.Slot}}{{end}}", "3"),
        ("{{.Table.x}}-{{.Table.none}}-{{index .Table `z`}}", "y--"),
    ],
)  # fmt: skip
def test_expanded(text: str, expected: str) -> None:
    assert expand(text, VALUES) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{.Task.Wrong}}", "can't evaluate field Wrong"),
        ("{{.Task.Slot.Deeper}}", "can't evaluate field Deeper"),
        ("{{.Service.Labels.none}}", "can't evaluate field none"),
        ("{{", "unclosed action"),
        ("{{.Task.Slot", "unclosed action"),
        ("{{}}", "missing value"),
        ("{{nothing}}", 'function "nothing" not defined'),
        ("{{.Task.Slot .Task.Slot}}", "non-function"),
        ('{{"a" | "b"}}', "non-function"),
        ("{{end}}", "unexpected end"),
        ("{{else}}", "unexpected else"),
        ("{{if .Task.Slot}}x", "no {{end}}"),
        ("{{if .Task.Slot}}x{{else}}y{{else}}z{{end}}", "expected end"),
        ("{{define `x`}}x{{end}}", "define is not supported"),
        ("{{with .Task}}{{.Wrong}}{{end}}", "can't evaluate field Wrong"),
        ("{{with .Task.Slot}}{{.Task}}{{end}}", "can't evaluate field Task"),
        ("{{$.Wrong}}", "can't evaluate field Wrong"),
        ("{{index .List 3}}", "index out of range: 3"),
        ("{{index .List `a`}}", "index out of range: a"),
        ("{{range $.List}}" * 20 + "{{end}}" * 20, "steps"),
        ("{{$x := 1}}", "unexpected '$x"),
        ("{{range .Task.Slot}}x{{end}}", "can't iterate"),
        ("{{(1}}", "unclosed parenthesis"),
        ("{{1)}}", "unexpected ')'"),
        ("{{index .Task.Slot `x`}}", "not a map or a list"),
        ("{{len}}", "wrong arguments"),
        ("{{if .Task.Slot}}" * (DEEPEST + 2), "levels"),
        ("{{" + "(" * 100 + "1" + ")" * 100 + "}}", "levels"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match="template: ") as caught:
        expand(text, VALUES)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{.Name}}{{if .Name}}{{.Name}}{{else}}{{.Name}}{{end}}{{printf `%s` .Name | own}}", ""),
        ("{{with .Name}}{{.Anything}}{{$.Name}}{{else}}{{.Name}}{{end}}{{range .Name}}{{.X}}{{end}}{{.Name.X}}", ""),
        ("{{.Wrong}}", "can't evaluate field Wrong"),
        ("{{if .Name}}{{.Wrong}}{{end}}", "can't evaluate field Wrong"),
        ("{{with .Name}}{{$.Wrong}}{{end}}", "can't evaluate field Wrong"),
        ("{{with .Name}}{{else}}{{.Wrong}}{{end}}", "can't evaluate field Wrong"),
        ("{{print (print .Wrong)}}", "can't evaluate field Wrong"),
        ("{{other .Name}}", 'function "other" not defined'),
        ("{{.Name | other}}", 'function "other" not defined'),
        ("{{print other}}", 'function "other" not defined'),
        ("{{range .Name}}{{other}}{{end}}", 'function "other" not defined'),
        ("{{.Name", "unclosed action"),
    ],
)
def test_checked_without_values(text: str, words: str) -> None:
    if not words:
        check(text, ("Name",), ("own",))
        return
    with pytest.raises(InvalidParameter, match="template: ") as caught:
        check(text, ("Name",), ("own",))
    assert words in caught.value.message


def test_functions_and_the_limit() -> None:
    assert expand('{{secret "a"}}', {}, {"secret": lambda name: f"<{name}>"}) == "<a>"
    assert expand('{{"a" | secret}}', {}, {"secret": lambda name: f"<{name}>"}) == "<a>"
    with pytest.raises(InvalidParameter, match="more than"):
        expand("{{x}}{{x}}", {}, {"x": lambda: "x" * 600_000})


_PIECES = st.sampled_from(
    [
        "{{",
        "}}",
        "{{-",
        "-}}",
        ".Task.Slot",
        " ",
        "if ",
        "else",
        "end",
        "range ",
        "with ",
        "$",
        ".List",
        '"',
        "`",
        "(",
        ")",
        "|",
        "index",
        "x",
    ]
)


@given(st.lists(_PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        result = expand(text, VALUES)
    except InvalidParameter as error:
        assert error.message
    else:
        assert "{{" in text or result == text


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="{")))
def test_text_without_actions_stays(text: str) -> None:
    assert expand(text, VALUES) == text
    assert expand(text + "{{.Task.Slot}}" + text, VALUES) == text + "3" + text
