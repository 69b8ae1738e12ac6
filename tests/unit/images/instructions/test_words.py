"""Words: flags, quotes, JSON, heredocs, and the replacement of variables with every modifier."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.images.instructions import words
from engine.images.instructions.words import Heredoc, Line

V = {
    "A": "one",
    "B": "two words",
    "EMPTY": "",
    "PATH": "/bin:/usr/bin",
    "FILE": "/a/b/archive.tar.gz",
    "STAR": "a*b?c",
    "Q": "it's",
    "SLASH": "a/b/c",
    "É": "e",
    "_x1": "under",
    "LINES": "a\nb",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # plain
        ("", ""),
        ("abc", "abc"),
        ("a b  c", "a b  c"),
        ("$A", "one"),
        ("${A}", "one"),
        ("x$A-y", "xone-y"),
        ("$A$A", "oneone"),
        ("${A}b", "oneb"),
        ("$Ab", ""),
        ("$", "$"),
        ("a$", "a$"),
        ("$/x", "$/x"),
        ("$ A", "$ A"),
        ("$_x1", "under"),
        ("$É", "e"),
        ("$1abc", "abc"),
        ("$12", ""),
        ("$@$*$#$?$-$!", ""),
        ("${1}${@}", ""),
        ("$$A", "A"),
        ("$NONE", ""),
        ("${NONE}", ""),
        ("%A% {A} $(A)", "%A% {A} $(A)"),
        # quotes and escapes
        ("'$A'", "$A"),
        ("''", ""),
        ('""', ""),
        ('"$A"', "one"),
        ('"a\'b"', "a'b"),
        ("'a\"b'", 'a"b'),
        ("a'b c'd", "ab cd"),
        (r"\$A", "$A"),
        (r"\\$A", r"\one"),
        (r"\a\ b", "a b"),
        ("a\\", "a"),
        (r"'a\b'", r"a\b"),
        (r'"\$A"', "$A"),
        (r'"\\ \" \a"', r"\ " + '" ' + r"\a"),
        (r'"\n"', r"\n"),
        ("$Q", "it's"),
        ('"$B"', "two words"),
        # - and :-
        ("${A-x}", "one"),
        ("${A:-x}", "one"),
        ("${EMPTY-x}", ""),
        ("${EMPTY:-x}", "x"),
        ("${NONE-x}", "x"),
        ("${NONE:-x}", "x"),
        ("${NONE-}", ""),
        ("${NONE:-}", ""),
        ("${NONE:-$A}", "one"),
        ("${NONE:-${A}}", "one"),
        ("${NONE:-${NO2:-${A}x}y}z", "onexyz"),
        ("${NONE:-a b}", "a b"),
        ("${NONE:-'}'}", "}"),
        ('${NONE:-"}"}', "}"),
        (r"${NONE:-\}}", "}"),
        ("${NONE:-'$A'}", "$A"),
        ("${NONE:-a:-b}", "a:-b"),
        ("${NONE:--}", "-"),
        ('"${NONE:-x}"', "x"),
        # + and :+
        ("${A+x}", "x"),
        ("${A:+x}", "x"),
        ("${EMPTY+x}", "x"),
        ("${EMPTY:+x}", ""),
        ("${NONE+x}", ""),
        ("${NONE:+x}", ""),
        ("${A:+$B}", "two words"),
        # ? and :?
        ("${A?x}", "one"),
        ("${A:?x}", "one"),
        ("${EMPTY?x}", ""),
        ("${A:?}", "one"),
        # # and ##
        ("${FILE#*/}", "a/b/archive.tar.gz"),
        ("${FILE##*/}", "archive.tar.gz"),
        ("${FILE#/a}", "/b/archive.tar.gz"),
        ("${FILE#nothing}", "/a/b/archive.tar.gz"),
        ("${FILE#}", "/a/b/archive.tar.gz"),
        ("${FILE##}", "/a/b/archive.tar.gz"),
        ("${FILE##*}", ""),
        ("${FILE#*}", "/a/b/archive.tar.gz"),
        ("${FILE#?}", "a/b/archive.tar.gz"),
        ("${FILE#??}", "/b/archive.tar.gz"),
        ("${FILE#$NONE/}", "a/b/archive.tar.gz"),
        ("${FILE#'/a'/}", "b/archive.tar.gz"),
        ("${STAR#a\\*}", "b?c"),
        ("${STAR#*\\?}", "c"),
        ("${STAR##*b}", "?c"),
        ("${NONE#x}", ""),
        ("${SLASH#a\\/}", "b/c"),
        ("${A#o}", "ne"),
        ("${A#[o]}", "one"),
        ("${A#.}", "one"),
        # % and %%
        ("${FILE%.*}", "/a/b/archive.tar"),
        ("${FILE%%.*}", "/a/b/archive"),
        ("${FILE%/*}", "/a/b"),
        ("${FILE%%/*}", ""),
        ("${FILE%.gz}", "/a/b/archive.tar"),
        ("${FILE%?}", "/a/b/archive.tar.g"),
        ("${FILE%nothing}", "/a/b/archive.tar.gz"),
        ("${FILE%}", "/a/b/archive.tar.gz"),
        ("${FILE%%*}", ""),
        ("${STAR%\\?c}", "a*b"),
        ("${STAR%\\**}", "a"),
        ("${PATH%%:*}", "/bin"),
        ("${NONE%x}", ""),
        ("${LINES%?b}", "a"),
        # / and //
        ("${A/n/N}", "oNe"),
        ("${SLASH/\\//-}", "a-b/c"),
        ("${SLASH//\\//-}", "a-b-c"),
        ("${SLASH//b/}", "a//c"),
        ("${A//?/x}", "xxx"),
        ("${A/?/x}", "xne"),
        ("${A/*/x}", "x"),
        ("${A//*/x}", "x"),
        ("${A/z/x}", "one"),
        ("${A//n*/x}", "ox"),
        ("${A/o/$B}", "two wordsne"),
        ("${A/o/'}'}", "}ne"),
        ("${A//[on]/x}", "one"),
        ("${STAR//\\*/x}", "axb?c"),
        ("${STAR//\\?/x}", "a*bxc"),
        ("${NONE/a/b}", ""),
        ("${PATH//:/ }", "/bin /usr/bin"),
        ("${FILE//a*i/x}", "/xve.tar.gz"),
    ],
)
def test_expanded(text: str, expected: str) -> None:
    assert words.expanded(text, V) == expected
    words.check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'a", "looking for matching single-quote"),
        ('"a', "looking for matching double-quote"),
        ("\"'a", "looking for matching double-quote"),
        (r'"a\"', "looking for matching double-quote"),
        ("a'", "single-quote"),
        ("${", "missing '}'"),
        ("${A", "missing '}'"),
        ("${A:", "missing '}'"),
        ("${A:-x", "missing '}'"),
        ("${A:-${B}", "missing '}'"),
        ("${A:-'}", "single-quote"),
        ("${A#x", "missing '}'"),
        ("${A/x}", "missing '/' in ${}"),
        ("${A/x/y", "missing '}'"),
        ("${}", "bad substitution"),
        ("${:-x}", "bad substitution"),
        ("${{A}}", "bad substitution"),
        ("${ A}", "bad substitution"),
        ("${/a/b}", "bad substitution"),
        ("${A:=x}", r"unsupported modifier (:=) in substitution"),
        ("${A=x}", r"unsupported modifier (=) in substitution"),
        ("${A:#x}", r"unsupported modifier (:#) in substitution"),
        ("${A:}", r"unsupported modifier (:}) in substitution"),
        ("${A:0:1}", r"unsupported modifier (:0) in substitution"),
        ("${A^}", r"unsupported modifier (^) in substitution"),
        ("${A@Q}", r"unsupported modifier (@) in substitution"),
        ("${A B}", r"unsupported modifier ( ) in substitution"),
        ("${#A}", r"unsupported modifier (A) in substitution"),
        ("${!A}", r"unsupported modifier (A) in substitution"),
        (r"${A#\x}", r"invalid pattern (\x) in substitution: invalid escape '\x'"),
        (r"${A//\x/y}", r"invalid pattern (\x) in substitution: invalid escape '\x'"),
        ("${X-" * 200, "nested too deeply"),
        ("${X-" * 200 + "}" * 200, "nested too deeply"),
        ("${A#" + "x" * 5000 + "}", "a pattern is longer than"),
    ],
)
def test_words_that_are_none(text: str, message: str) -> None:
    for function in (words.check, lambda text: words.expanded(text, V)):
        with pytest.raises(InvalidParameter) as error:
            function(text)
        assert message in error.value.message
        assert error.value.message.startswith('failed to process "')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN echo $A $NONE", "RUN echo one $NONE"),
        ("a \"$A\" '$A'", "a \"one\" '$A'"),
        ("${A}${NONE}", "one${NONE}"),
        (
            "${NONE:-$A} ${NONE-w} ${NONE:+w} ${NONE?w} ${NONE:?}",
            "${NONE:-one} ${NONE-w} ${NONE:+w} ${NONE?w} ${NONE:?}",
        ),
        ("${EMPTY:-w}${EMPTY-w}", "w"),
        ("${NONE#*/} ${NONE%%x} ${NONE/a/b} ${NONE//a/$A}", "${NONE#*/} ${NONE%%x} ${NONE/a/b} ${NONE/a/one}"),
        ("awk '{print $1}' $(x) $$ \"$1\" $", "awk '{print $1}' $(x) $$ \"$1\" $"),
        ('\\$A a\\b "a\\n"', '$A ab "a\\n"'),
    ],
)
def test_words_that_are_shown(text: str, expected: str) -> None:
    assert words.shown(text, V) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${NONE?}", "NONE: is not allowed to be unset"),
        ("${NONE:?}", "NONE: is not allowed to be unset"),
        ("${EMPTY:?}", "EMPTY: is not allowed to be empty"),
        ("${NONE?give one}", "NONE: give one"),
        ("${EMPTY:?$A is}", "EMPTY: one is"),
    ],
)
def test_variables_that_must_be_set(text: str, message: str) -> None:
    words.check(text)
    with pytest.raises(InvalidParameter) as error:
        words.expanded(text, V)
    assert error.value.message.endswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`$A", "$A"),
        (r"\$A", r"\one"),
        ('"`$A `` `" \\"', '$A ` " \\'),
        (r"C:\dir\$A", r"C:\dir\one"),
        ("a` b", "a b"),
        ("'`'", "`"),
        ("${NONE:-`}}", "}"),
    ],
)
def test_expanded_with_another_escape(text: str, expected: str) -> None:
    assert words.expanded(text, V, "`") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'$A' \"$A\"\n", "'one' \"one\"\n"),
        (r"\$A \\ \n", "$A \\ n"),
        ("it's $A\n${NONE:-x}\n", "it's one\nx\n"),
        ("a\n\tb\n", "a\n\tb\n"),
    ],
)
def test_the_content_of_a_heredoc(text: str, expected: str) -> None:
    words.check_content(text)
    assert words.expanded_content(text, V) == expected


def test_what_grows_without_end_is_refused() -> None:
    big = {"A": "x" * 100_000}
    for text in ("$A$A", '"$A$A"', "${A//?/yy}", "${A/*/$A$A}", "${A:+$A$A}"):
        with pytest.raises(InvalidParameter, match="characters"):
            words.expanded(text, big)


def test_patterns_take_linear_time() -> None:
    """The regular expressions of these would backtrack for years."""
    value = "a" * 20_000
    for pattern in ("*a" * 30 + "b", "*?" * 30 + "b", "**" * 30 + "b"):
        assert words.expanded(f"${{A#{pattern}}}", {"A": value}) == value
        assert words.expanded(f"${{A%%b{pattern}}}", {"A": value}) == value
        assert words.expanded(f"${{A//{pattern}/x}}", {"A": value}) == value


# --- patterns against regular expressions ---------------------------------------------------------

patterns = st.text(alphabet="ab*?.[", max_size=6)
values = st.text(alphabet="ab.[\n", max_size=12)


def expression(pattern: str, star: str) -> str:
    return "".join(star if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)


@given(patterns, values)
def test_prefixes(pattern: str, value: str) -> None:
    for operator, star in (("#", ".*?"), ("##", ".*")):
        match = re.match(f"(?s:{expression(pattern, star)})", value)
        expected = value[match.end() :] if match else value
        if operator == "#" and match:  # a lazy expression is not always the shortest match
            ends = [at for at in range(len(value) + 1) if re.fullmatch(f"(?s:{expression(pattern, star)})", value[:at])]
            expected = value[ends[0] :]
        assert words.expanded(f"${{X{operator}{pattern}}}", {"X": value}) == expected


@given(patterns, values)
def test_suffixes(pattern: str, value: str) -> None:
    whole = f"(?s:{expression(pattern, '.*')})"
    begins = [at for at in range(len(value) + 1) if re.fullmatch(whole, value[at:])]
    assert words.expanded(f"${{X%{pattern}}}", {"X": value}) == (value[: begins[-1]] if begins else value)
    assert words.expanded(f"${{X%%{pattern}}}", {"X": value}) == (value[: begins[0]] if begins else value)


@given(patterns.filter(bool), values)
@example("*a*", "bab")
def test_replacements(pattern: str, value: str) -> None:
    whole = f"(?s:{expression(pattern, '.*')})"
    first = re.sub(whole, "<>", value, count=1)
    assert words.expanded(f"${{X/{pattern}/<>}}", {"X": value}) == first
    if pattern.strip("*"):  # Go and Python differ in empty matches
        assert words.expanded(f"${{X//{pattern}/<>}}", {"X": value}) == re.sub(whole, "<>", value)


VARIABLES = {"E": "", "X": "ab.ba", "Y": "aaa", "Z": "b"}

substitutions = st.one_of(
    st.builds(
        "${{{}{}{}}}".format,
        st.sampled_from(["E", "X", "Y", "NONE"]),
        st.sampled_from(["-", ":-", "+", ":+"]),
        st.sampled_from(["", "w", "$Z", "${Z}x", "${NONE:-$Z}", "'$Z'", '"$Z"', "${X%b*}"]),
    ),
    st.builds(
        "${{{}{}{}}}".format,
        st.sampled_from(["E", "X", "Y", "NONE"]),
        st.sampled_from(["#", "##", "%", "%%"]),
        st.one_of(st.text(alphabet="ab*?.", max_size=5), st.sampled_from(["$Z", "'b'", '"$Z"*', "\\*", "*$Z"])),
    ),
    st.builds(
        "${{{}{}{}/{}}}".format,
        st.sampled_from(["X", "Y", "NONE"]),
        st.sampled_from(["/", "//"]),
        st.text(alphabet="ab*?.", min_size=1, max_size=4).filter(lambda pattern: bool(pattern.strip("*#%"))),
        st.sampled_from(["", "w", "$Z"]),
    ),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(substitutions, min_size=1, max_size=50))
def test_modifiers_are_those_of_bash(texts: list[str]) -> None:
    script = "".join(f'printf "%s\\n" {text}\n' for text in (f'"<"{one}">"' for one in texts))
    done = subprocess.run(
        ["bash", "-f", "-c", f"IFS=\n{script}"], env=VARIABLES, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"<{words.expanded(text, VARIABLES)}>" for text in texts]


@given(st.text(alphabet="ab$ {}:-+?'\"\\=#%/*\n\t1`", max_size=60), st.sampled_from(["\\", "`"]))
def test_any_text(text: str, escape: str) -> None:
    """Expanded or refused; what `check` refuses is refused with any variables."""
    try:
        words.check(text, escape)
    except InvalidParameter as error:
        assert error.message
        with pytest.raises(InvalidParameter):
            words.expanded(text, {"a": "1", "b": "", "ab": "x"}, escape)


@given(st.text(alphabet="ab \t'\"\\=$", max_size=40), st.sampled_from(["\\", "`"]))
def test_splitting_keeps_the_text(text: str, escape: str) -> None:
    found = words.words(text, escape)
    assert all(found) and not any(word[0].isspace() for word in found)
    joined = "".join(found)
    assert re.sub(r"\s", "", joined) in (re.sub(r"\s", "", text), re.sub(r"\s", "", text)[: -len(escape)])


@given(st.lists(st.text(min_size=1, max_size=8).filter(lambda text: "\x00" not in text), max_size=5))
def test_quoted_words_come_back(texts: list[str]) -> None:
    def quoted(text: str) -> str:
        return '"' + re.sub(r'(["$\\])', r"\\\1", text) + '"'

    line = " ".join(quoted(text) for text in texts)
    assert [words.expanded(word, {}) for word in words.words(line)] == texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b", ["a", "b"]),
        ("  a\t b ", ["a", "b"]),
        ("a='b c' d", ["a='b c'", "d"]),
        ('a="b \\" c" d', ['a="b \\" c"', "d"]),
        ("a\\ b c", ["a\\ b", "c"]),
        ("'a\\' b", ["'a\\'", "b"]),
        ("a b\\", ["a", "b"]),
        ("'a b", ["'a b"]),
        ("", []),
        ("\\", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words.words(text) == expected


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags", "rest"),
    [
        ("a b", [], "a b"),
        ("--f a", [("f", None)], "a"),
        ("--f=v a", [("f", "v")], "a"),
        ("--f= a", [("f", "")], "a"),
        ("--f=a=b a", [("f", "a=b")], "a"),
        ("  --f=v\t--g  a --h", [("f", "v"), ("g", None)], "a --h"),
        ("--f='a b' c", [("f", "a b")], "c"),
        ('--f="a b"c d', [("f", "a bc")], "d"),
        ("--f=a\\ b c", [("f", "a b")], "c"),
        ("-- --f a", [], "--f a"),
        ("--f -- --g", [("f", None)], "--g"),
        ("-f a", [], "-f a"),
        ("-", [], "-"),
        ("--f", [("f", None)], ""),
        ("", [], ""),
    ],
)
def test_flags(text: str, flags: list[tuple[str, str | None]], rest: str) -> None:
    line = words.line(f"run {text}", 7)
    assert (line.keyword, line.number, list(line.flags), line.rest) == ("RUN", 7, flags, rest)
    assert line.text == text.strip()


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", []),
        ('["a"]', ["a"]),
        (' [ "a" ,\t"b c" ] ', ["a", "b c"]),
        ('["a"] && b', ["a"]),
        ('["a"]]', ["a"]),
        (r'["\u00e9\n\"\\"]', ['é\n"\\']),
        (r'["\ud83d\ude00 \ud800x"]', ["😀 \ufffdx"]),
        ("['a']", None),
        ('["a",]', None),
        ('["a" "b"]', None),
        ('["a', None),
        ("[", None),
        ("[ -f x ]", None),
        ("[NaN]", None),
        ('["a\tb"]', None),
        ("a", None),
        ("", None),
        ('{"a": "b"}', None),
        ("[" * 100_000, None),
    ],
)
def test_arrays(text: str, expected: list[str] | None) -> None:
    assert words.array(text) == expected


@pytest.mark.parametrize("text", ["[1]", '["a", 1.5e3]', '["a", null]', '[["a"]]', '[{"a": 1}, "b"]', "[true]"])
def test_arrays_of_other_things(text: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        words.array(text)
    assert error.value.message == "when using JSON array syntax, arrays must be comprised of strings only"


def test_what_follows_an_array() -> None:
    assert words.array('["x"] # y') == words.array('["x"] \t', whole=True) == ["x"]
    assert words.array('["x"] # y', whole=True) is None


def test_a_nul_in_an_array() -> None:
    with pytest.raises(InvalidParameter, match="NUL"):
        words.array('["a\\u0000"]')


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8"), max_size=10)))
def test_arrays_come_back(texts: list[str]) -> None:
    import json

    assert words.array(json.dumps(texts)) == texts
    assert words.array(json.dumps(texts, ensure_ascii=False) + " x") == texts


# --- heredocs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("<<EOF", Heredoc(name="EOF")),
        ("<<-EOF", Heredoc(name="EOF", chomp=True)),
        ("3<<EOF", Heredoc(name="EOF", descriptor=3)),
        ('<<"EOF"', Heredoc(name="EOF", expand=False)),
        ("<<'E F'", Heredoc(name="E F", expand=False)),
        ('<<E"O"F', Heredoc(name="EOF", expand=False)),
        (r"<<\EOF", Heredoc(name="EOF")),
        ("<< EOF", Heredoc(name="EOF", doubtful=True)),
        ("<<3", Heredoc(name="3", doubtful=True)),
        ("<<$X", Heredoc(name="$X", doubtful=True)),
        ("<<", None),
        ("<", None),
        ("<<<a", None),
        ("a<<EOF", None),
        ("<<'EOF", None),
        ("<<''", None),
        ("EOF", None),
    ],
)
def test_heredoc_heads(word: str, expected: Heredoc | None) -> None:
    assert words.heredoc_head(word) == expected


def with_bodies(text: str) -> Line:
    first, _, rest = text.partition("\n")
    return words.with_heredocs(words.line(first, 1), words.Source(rest.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        ("RUN cat <<A\nx\nA\n", [("A", "x\n")]),
        ("RUN cat << A\nx\nA\n", [("A", "x\n")]),
        ("RUN cat <<-A\n\tx\n\tA\n", [("A", "\tx\n")]),
        ("RUN cat <<A 3<<B\nB\nA\nA\nB", [("A", "B\n"), ("B", "A\n")]),
        ("RUN --mount=type=tmpfs,target=/x <<A\nA", [("A", "")]),
        ("RUN '<<A' \"<<B\"", []),
        ('RUN ["<<A"]', []),
        ("RUN echo $((1 << 3))", []),
        ("RUN echo $(( 1 <<3 ))", []),
        ("RUN a <<< b", []),
        ("CMD cat <<A", []),
        ("ENV a <<A", []),
        ("RUN it's <<A", []),
        ("COPY <<A <<B /x\na\nA\nb\r\nB\r\n", [("A", "a\n"), ("B", "b\r\n")]),
        ("ADD x <<A /x\nA\n", [("A", "")]),
        ("ONBUILD RUN <<A\nx\nA\n", [("A", "x\n")]),
        ("ONBUILD ENV a=<<A", []),
        ('COPY ["<<A", "/x"]', []),
    ],
)
def test_heredocs(text: str, bodies: list[tuple[str, str]]) -> None:
    assert [(body.name, body.content) for body in with_bodies(text).heredocs] == bodies


@pytest.mark.parametrize("text", ["RUN <<A", "RUN <<A\nB\n", "COPY <<A /x\n A\n", "RUN <<-A\n A\n", "RUN <<A <<B\nA\n"])
def test_heredocs_without_an_end(text: str) -> None:
    with pytest.raises(InvalidParameter, match="unterminated heredoc"):
        with_bodies(text)


def test_tabs_before_lines_are_chomped() -> None:
    assert Heredoc(name="A", content="\t\ta\n b\n\tc\td\n", chomp=True).value() == "a\n b\nc\td\n"


def test_the_content_of_a_heredoc_may_be_long() -> None:
    variables = {"A": "x" * 1000}
    text = "line of $A and \\$A and \\\\\n" * 4000
    assert words.expanded_content(text, variables) == f"line of {'x' * 1000} and $A and \\\n" * 4000
    with pytest.raises(InvalidParameter, match=f"a value is longer than {10_000 + words.MAX_ADDED} characters"):
        words.expanded_content("$A" * 5000, {"A": "x" * 1000})
